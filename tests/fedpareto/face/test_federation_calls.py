"""A federation in a notebook: real processes on this machine, and the calls that the commands make."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

import fedpareto
from federation.tasks.digits import Digits
from fedpareto.processes.forked import Forked, completed, start_server
from fedpareto.processes.process_federation import serving
from tests.harness import wait_for
from tests.paths import ROOT
from tests.running import command

SPEC: dict[str, Any] = {
    "name": "first",
    "rounds": 2,
    "algorithm": {"name": "fedmgda+"},
    "selection": {"minimum": 2},
    "train": {"steps": 2},
}


class Own(Digits):
    """The task of the local federation."""


class Other(Digits):
    """A model that the members do not have."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(64, 10)


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def federation() -> Iterator[Any]:
    """Two members on this machine; after the block neither a process nor a file is left."""
    start_server()
    before = descendants()
    with fedpareto.local(members=2, task=Own) as started:
        assert len(descendants() - before) >= 4, "the coordinator, two workers, and the process that deletes"
        yield started
    assert descendants() <= before
    assert not started.home.exists()


def test_a_run_is_submitted_waited_for_and_read_where_an_event_loop_runs(
    federation: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def cell() -> Any:
        told: list[Any] = []
        run = federation.submit(SPEC).wait(progress=told.append)
        return run, told, run.history, run.report(), federation.members()

    run, told, history, report, members = asyncio.run(cell())
    assert repr(run) == f"first (run {run.run_id}): COMPLETED, 2 of 2 rounds"
    assert [(now.done, now.total) for now in told][-1] == (2, 2)
    assert history.spec.task == f"{__name__}:Own"
    assert (history.state, len(history.rounds), set(history.clients["client"])) == (
        *("COMPLETED", 2),
        {"member-1", "member-2"},
    )
    assert "How each member fares" in history._repr_html_()
    assert torch.equal(history.module().state_dict()["out.bias"], run.state_dict()["out.bias"])
    assert report.startswith("<!doctype html>")
    assert report._repr_html_().startswith("<iframe")
    assert list(members["member"]) == ["member-1", "member-2"]
    assert members["attending"].all()
    assert members["tasks"].tolist() == [[f"{__name__}:Own"]] * 2
    assert capfd.readouterr() == ("", "")


def test_runs_are_found_by_name_and_a_model_is_written_once(federation: Any, tmp_path: Path) -> None:
    (run,) = federation.runs()
    found = fedpareto.connect(federation.home).run("first")
    assert (found.run_id, found.state) == (run.run_id, "COMPLETED")
    found.save(tmp_path / "model.safetensors")
    with pytest.raises(fedpareto.Error, match="exists: name another file"):
        found.save(tmp_path / "model.safetensors")
    found.report().save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == found.report()


def test_a_run_is_stopped_and_whoever_waits_is_told_why(federation: Any) -> None:
    run = federation.submit({**SPEC, "name": "ended", "rounds": 100_000}, paused=True)
    with pytest.raises(fedpareto.Error, match=r"is paused: .*see resume"):
        run.wait(progress=False)
    run.resume()
    run.stop("seen enough")
    run.stop()
    with pytest.raises(fedpareto.Error, match=r"did not complete: STOPPED.*seen enough"):
        run.wait(progress=False)


def test_what_a_command_refuses_is_an_error_with_the_commands_words(federation: Any, tmp_path: Path) -> None:
    home = federation.home
    for arguments, call in (
        (["admin", "--home", home, "run", "no-such"], lambda: federation.run("no-such")),
        (["admin", "--home", tmp_path, "runs"], lambda: fedpareto.connect(tmp_path)),
    ):
        with pytest.raises(fedpareto.Error) as caught:
            call()
        assert str(command(*arguments, code=1).exception or "") == str(caught.value)
    with pytest.raises(fedpareto.Error, match="rounds: Input should be greater"):
        federation.submit({**SPEC, "rounds": 0})


def test_the_class_makes_the_initial_model_and_its_code_is_never_sent(federation: Any) -> None:
    elsewhere = fedpareto.connect(federation.home)
    run = elsewhere.submit({**SPEC, "name": "other", "task": f"{__name__}:Own"}, task=Other, paused=True)
    assert {name: tuple(tensor.shape) for name, tensor in run.state_dict().items()} == {
        "weight": (10, 64),
        "bias": (10,),
    }
    run.stop()
    with pytest.raises(fedpareto.Error, match="task"):
        elsewhere.submit({**SPEC, "name": "nameless"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"members": 0}, "members: a number from 1 to 100, or directories by name; got 0"),
        ({"members": {}}, "members: name one or more"),
        ({"members": {"east": "/no/such"}}, "members: east: /no/such is not a directory"),
        ({"members": {"east": "/"}, "data": "/"}, "data or members"),
        ({"task": 7}, "task: a class that inherits from fedpareto.Task is needed, not 7"),
    ],
)
def test_arguments_that_cannot_be_used_start_nothing(arguments: dict[str, Any], says: str) -> None:
    before = descendants()
    with pytest.raises(fedpareto.Error, match=says), fedpareto.local(**{"task": "digits", **arguments}):
        pytest.fail("it started")
    assert descendants() <= before


def test_while_the_coordinator_does_not_run_its_record_is_read_where_an_event_loop_runs(federation: Any) -> None:
    home = federation.home.parent
    process = serving(home)
    assert process is not None
    os.kill(process, signal.SIGTERM)
    wait_for(
        lambda: not psutil.pid_exists(process) or psutil.Process(process).status() == "zombie",
        "the end of the coordinator",
    )

    async def cell() -> Any:
        return federation.run("first").history

    history = asyncio.run(cell())
    assert (history.state, history.model.size) == ("COMPLETED", 0)
    assert history.warnings[-1].startswith("without its model: no coordinator serves")
    with pytest.raises(fedpareto.Error, match="the model of first is not known"):
        history.module()
    with pytest.raises(fedpareto.Error, match=r"no coordinator serves .* start it with"):
        federation.submit(SPEC)


def test_a_script_is_not_run_once_more_in_the_processes_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, program = tmp_path / "script.py", ModuleType("__main__")
    script.write_text("raise SystemExit('run once more')")
    program.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert completed(["-c", "print('done')"]).stdout == "done\n"
    assert sys.modules["__main__"] is program


KERNEL = """
import sys, time
from pathlib import Path
from fedpareto.face.local_processes import _directory
import fedpareto

def use(home):
    (Path(home) / "file").write_text("left")
    print(home, flush=True)
    time.sleep(600)

if sys.argv[1] == "directory":
    with _directory() as directory:
        use(directory)
else:
    with fedpareto.local(members=2, task="digits") as federation:
        use(federation.home)
"""


@pytest.mark.parametrize("what", ["directory", pytest.param("federation", marks=pytest.mark.full)])
def test_after_a_killed_kernel_neither_processes_nor_files_are_left(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    out.touch()
    kernel = Forked(["-c", KERNEL, what], out, cwd=ROOT, env=os.environ)
    wait_for(lambda: out.read_text().endswith("\n"), "the start")
    home, processes = Path(out.read_text().strip()), psutil.Process(kernel.pid).children(recursive=True)
    assert home.exists(), out.read_text()
    assert processes
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()
    wait_for(lambda: not home.exists() and not any(process.is_running() for process in processes), "the end")
