"""A real tracking server of MLflow: what it has after runs, kills and absences."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from fedpareto.sinks.sink import RunEnd
from tests.fedpareto.sinks.scene import kill_at, numbers, send
from tests.paths import ROOT
from tests.waiting import wait_for

pytestmark = pytest.mark.full
pytest.importorskip("mlflow", reason="needs fedpareto[tracking]")
ROUNDS = 3
_SECONDS = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a server with SQLite, of the whole MLflow in an environment of its own."""
    program = shutil.which("mlflow", path=f"{ROOT / '.venv-mlflow' / 'bin'}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no mlflow: `make test-full` installs it into .venv-mlflow")
    place = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stores = ["--backend-store-uri", f"sqlite:///{place}/runs.db", "--artifacts-destination", str(place / "artifacts")]
    words = [program, "server", *stores, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (place / "log").open("wb") as log:
        running = subprocess.Popen(words, cwd=place, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(uri, running), f"the server, see {place / 'log'}", _SECONDS)
        yield uri
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def answers(uri: str, running: "subprocess.Popen[bytes]") -> bool:
    assert running.poll() is None, "the server has ended"
    with suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=10):
        return True
    return False


def client(uri: str) -> Any:
    return import_module("mlflow.tracking.client").MlflowClient(tracking_uri=uri)


def only_run(uri: str) -> Any:
    """The run at the server; a repeated one would be a second one."""
    asked = client(uri)
    (run,) = asked.search_runs([experiment.experiment_id for experiment in asked.search_experiments()])
    return run


def forget(uri: str) -> None:
    """Deletes the run, so that the next test begins anew."""
    asked = client(uri)
    for run in asked.search_runs([experiment.experiment_id for experiment in asked.search_experiments()]):
        asked.delete_run(run.info.run_id)


def points(uri: str, name: str) -> list[tuple[int, int, float]]:
    history = client(uri).get_metric_history(only_run(uri).info.run_id, name)
    return [(metric.step, metric.timestamp, metric.value) for metric in history]


def wanted(name: str, rounds: int = ROUNDS) -> list[tuple[int, int, float]]:
    return [
        (number, int(numbers(number).ended * 1000), min(numbers(number).values[name], 1.7976931348623157e308))
        for number in range(rounds)
    ]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("model.safetensors", "card.md", "report.html")]
    for path in made:
        path.write_text(path.name)
    return made


def test_a_server_gets_metrics_state_and_files_once(server: str, files: list[Path]) -> None:
    end = RunEnd("STOPPED", "enough", files)
    for rounds in (2, ROUNDS, ROUNDS):
        (delivered,) = send([f"mlflow:{server}"], rounds, end if rounds == ROUNDS else RunEnd("PAUSED", ""))
        assert (delivered.rounds, delivered.problem) == (rounds, "")
    for name in ("accuracy/mean", "loss/train", "loss/train/left half", "evaluated"):
        assert points(server, name) == wanted(name)
    run = only_run(server)
    assert (run.info.run_name, run.info.status) == ("scans, ålder", "KILLED")
    assert run.data.tags["fedpareto.reason"] == "enough"
    assert run.data.params == {"task": "digits", "algorithm": "fedmgda+", "rounds": "6", "run_id": "3f2a91c05be7"}
    artifacts = client(server).list_artifacts(run.info.run_id)
    assert sorted(artifact.path for artifact in artifacts) == ["card.md", "model.safetensors", "report.html"]
    forget(server)


@pytest.mark.parametrize("returned", [False, True])
def test_a_process_that_is_killed_at_any_request_leaves_no_gap_and_no_repetition(
    server: str, files: list[Path], returned: bool
) -> None:
    session, target, end = import_module("requests").Session, f"mlflow:{server}", RunEnd("COMPLETED", "", files)
    kills = 0
    while code := kill_at(session, "send", 1 + kills, returned=returned, target=target, rounds=ROUNDS, end=end):
        assert code == -signal.SIGKILL
        kills += 1
    assert kills > 3
    for name in ("accuracy/mean", "loss/train/left half"):
        assert points(server, name) == wanted(name)
    assert only_run(server).info.status == "FINISHED"
    forget(server)


def sends(target: str, together: Mapping[str, Barrier]) -> int:
    """Starts a process that sends the run, and makes what the server lacks at the same time as others."""
    if pid := os.fork():
        return pid
    code = 1
    with suppress(BaseException):
        for name, barrier in together.items():
            at_the_same_time(import_module("mlflow.tracking.client").MlflowClient, name, barrier)
        (delivered,) = send([target], ROUNDS)
        code = 0 if (delivered.rounds, delivered.problem) == (ROUNDS, "") else 2
    os._exit(code)


def at_the_same_time(owner: Any, name: str, barrier: Barrier) -> None:
    """Has the first call of a function begin in all processes at once."""
    function = getattr(owner, name)

    def called(*given: Any, **more: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            barrier.wait(60)
            barrier.abort()  # a later call does not wait
        return function(*given, **more)

    setattr(owner, name, called)


def test_processes_that_send_a_run_at_the_same_time_make_one_run_with_each_number_once(server: str) -> None:
    for experiment in client(server).search_experiments():
        client(server).rename_experiment(experiment.experiment_id, f"before-{experiment.experiment_id}")
    context = multiprocessing.get_context("fork")
    together = {name: context.Barrier(3) for name in ("create_experiment", "create_run")}
    sending = [sends(f"mlflow:{server}", together) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in sending] == [0, 0, 0]
    for name in numbers(0).values:
        assert points(server, name) == wanted(name)
    assert only_run(server).data.tags["fedpareto.rounds"] == str(ROUNDS)
    forget(server)


def test_a_server_that_is_away_is_told_of_once_without_its_password(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (away,) = send([f"mlflow:http://reader:pa%24%24word@127.0.0.1:{port}"], ROUNDS)
    shown = capfd.readouterr()
    assert "MlflowException" in away.problem
    assert shown.err.count("cannot be reached") == 1
    assert not [part for part in (shown.out, shown.err, str(away)) if "pa%24" in part or "pa$$" in part]
