"""The commands for experiments."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.main import app
from fedpareto.experiments import origins
from fedpareto.experiments.definition import parse
from fedpareto.experiments.loading import names
from fedpareto.experiments.result_store import Job, Store
from storage.database import Database
from tests.command_lines import failure
from tests.fedpareto.experiments import scene as experiment_cases
from tests.fedpareto.experiments.scene import TINY, tiny

one_thread, under_way = experiment_cases.one_thread, experiment_cases.under_way  # fixtures


def command(*arguments: object, code: int = 0) -> str:
    """All that an `experiment` command says, which must end with this code."""
    done = CliRunner().invoke(app, ["experiment", *map(str, arguments)])
    failed = done.exception if isinstance(done.exception, CommandFailure) else None
    assert (failed.code if failed else done.exit_code) == code, (done.output, done.exception)
    return done.output + (failed.message if failed else "")


@pytest.fixture
def tiny_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue holds the tiny experiment, under every name."""
    monkeypatch.setattr("fedpareto.experiments.loading.load", lambda name: parse(name, TINY))


@pytest.mark.full
@pytest.mark.usefixtures("tiny_is_there")
def test_nothing_of_another_specification_is_replaced_unasked_and_no_table_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command("run", "tiny", "--rounds", 1, "--methods", "fedavg")
    out = Path("results/tiny-1-rounds")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert (
        "1 of these 2 runs are in results/tiny-1-rounds with another specification (rounds = 1, not 3): name another "
        "--out, or --anew to replace them" in command("run", "tiny", "--out", out, code=2)
    )
    said = command("compare", "tiny", "--out", out, code=2)
    assert "1 finished run in results/tiny-1-rounds, none of this specification: was it --quick, --rounds N?" in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    command("compare", "tiny", "--rounds", 1)
    said = command("compare", "tiny", "--quick", "--rounds", 1, code=2)
    assert said.startswith("no results in results/tiny-quick-1-rounds")
    command("run", "tiny", "--out", out, "--methods", "fedavg", "--anew")
    command("compare", "tiny", "--out", out)


@pytest.mark.usefixtures("tiny_is_there")
def test_anew_removes_nothing_while_another_process_makes_one_of_the_runs(tmp_path: Path, under_way: Path) -> None:
    out = shutil.copytree(under_way, tmp_path / "out")
    workspace = Store(out).workspace(Job(tiny().cells()[0], 1))
    with closing(Database.open(f"sqlite:///{workspace}/coordinator.db")) as database:
        database.lock_exclusive()
        said = command("run", "tiny", "--out", out, "--anew", code=2)
    assert "--anew removes nothing while another process makes one of these runs" in said
    assert f"pid {os.getpid()}" in said
    assert workspace.is_dir()


@pytest.mark.usefixtures("tiny_is_there")
@pytest.mark.full
def test_a_run_under_way_with_other_settings_is_refused_before_anything_is_made(
    tmp_path: Path, under_way: Path
) -> None:
    out = shutil.copytree(under_way, tmp_path / "out")
    said = command("run", "tiny", "--out", out, "--rounds", 2, code=2)
    assert "1 of these 2 runs are in " in said
    assert "(rounds = 3, not 2)" in said
    assert [path.name for path in out.iterdir()] == ["work"]
    command("run", "tiny", "--out", out, "--rounds", 2, "--methods", "fedavg", "--anew")


@pytest.mark.full
@pytest.mark.usefixtures("tiny_is_there")
def test_files_that_cannot_be_used_are_told_of_and_paths_may_have_brackets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("Z[/b]")
    of_tiny = ("tiny", "--out", out, "--rounds", 1)
    assert "in Z[/b]: runs.jsonl, table.md, " in command("run", *of_tiny)
    (out / "table.md").unlink()
    (out / "table.md").mkdir()
    assert command("compare", *of_tiny, code=1) == f"cannot use {out}/table.md: Is a directory"
    why = "cannot be read ((the document): Input should be an object): remove the line, and its run is made again"
    (out / "runs.jsonl").write_text("[]\n")
    assert command("compare", *of_tiny, code=1) == f"{out}/runs.jsonl, line 1 {why}"
    assert command("run", *of_tiny, code=2) == f"{out}/runs.jsonl, line 1 {why}"
    (out / "runs.jsonl").unlink()
    (out / "runs.jsonl").mkdir()
    assert command("run", *of_tiny, code=2) == f"cannot use {out}/runs.jsonl: Is a directory"


@pytest.mark.usefixtures("tiny_is_there")
def test_no_tables_are_written_while_nothing_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpareto.experiments.experiment_runner.ExperimentRunner.run", lambda self, jobs, tell: None)
    out = tmp_path / "out"
    command("run", "tiny", "--out", out, code=130)
    assert list(out.iterdir()) == []


@pytest.mark.full
def test_the_list_says_whether_data_is_there(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data.gz").touch()
    listed = json.loads(command("list", "--data", tmp_path, "--json"))["experiments"]
    there = {item["name"]: item["data_there"] for item in listed}
    assert set(there) == set(names())
    assert [there[name] for name in ("fedmgda-adult-bias", "fedfv-table3")] == [True, False]
    assert there["robustness-digits"], "which needs none"
    command("list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fedfv-table9"], "no experiment 'fedfv-table9': there are "),
        (["run", "fedfv-table3"], "fedfv-table3 needs data: --data DIR, with FashionMNIST/raw in it"),
        (["run", "fedfv-table3", "--data", "."], ". lacks the data of fedfv-table3: FashionMNIST/raw"),
        (["run", "robustness", "--quick", "--methods", "FedSGD"], "no method 'FedSGD': there are 'FedAvg', "),
        (["run", "robustness", "--quick", "--seeds", "one"], "--seeds 'one': expected whole numbers"),
        (["run", "robustness", "--quick", "--seeds=-1"], "seed: Input should be greater than or equal to 0"),
        (["run", "robustness", "--quick", "--device", "foo"], "no device 'foo': use auto, cpu, cuda or cuda:N"),
        (["run", "robustness", "--quick", "--backend", "foo"], "no backend 'foo': there are auto, stacked, loop"),
        (["run", "robustness-digits", "--out", "/dev/null"], "cannot use /dev/null: File exists"),
        (["run", "robustness-digits", "--out", "/dev/null/x"], "cannot use /dev/null/x: Not a directory"),
        (["compare", "ours", "--out", "nowhere"], "no results in nowhere: `fedpareto experiment run ours` makes them"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(arguments: list[str], message: str) -> None:
    refused = failure("experiment", *arguments)
    assert refused.code == 2
    assert message in refused.message


def test_a_command_on_record_names_no_directories() -> None:
    words = ["fedpareto", "experiment", "run", "a", "--data", "/home/me/data", "--out=/home/me/x y", "--seeds", "1,2"]
    assert origins.command(words) == "fedpareto experiment run a --data DATA --out=OUT --seeds 1,2"
