"""run.json and the CSV files: which runs a table contains, how each came about, and that no row is lost."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import record
from experiments.definition import parse
from experiments.results import DamagedError, Job, RunResult, Session, Store
from experiments.runner import ExperimentRunner, RunnerSettings
from fedpareto.cli.main import app

ROOT = Path(__file__).resolve().parent.parent

SMALL = """
title = "Small"
seeds = [1, 2]
columns = [{ title = "Avg.", measure = "mean" }]
spec = { task = "digits", rounds = 2, simulation.clients = 3, train.steps = 1 }
methods = [
    { name = "FedAvg", spec.algorithm.name = "fedavg" },
    { name = "FedMGDA+", spec.algorithm.name = "fedmgda+" },
]
"""


@pytest.fixture(autouse=True)
def _small_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue holds the small experiment, under every name."""
    monkeypatch.setattr("experiments.loading.load", lambda name: parse(name, SMALL))


@pytest.fixture(scope="module")
def first_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of both methods with seed 1, each made by a call of its own, of which the first was killed."""
    store = Store(tmp_path_factory.mktemp("small") / "out", Session("killed", "2026-01-01T00:00:00+00:00"))
    cell = parse("small", SMALL).cells()[0]
    ExperimentRunner(store, RunnerSettings()).run([Job(cell, 1)], lambda event: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.loading.load", lambda name: parse(name, SMALL))
        run("small", "--seeds", 1, "--out", store.directory)
    return store.directory


@pytest.fixture
def out(first_seed: Path, tmp_path: Path) -> Path:
    """A copy of these results."""
    return shutil.copytree(first_seed, tmp_path / "out")


def run(*arguments: object, code: int = 0) -> str:
    """What `experiment run` says."""
    done = CliRunner().invoke(app, ["experiment", "run", *map(str, arguments)])
    assert done.exit_code == code or getattr(done.exception, "code", None) == code, (done.output, done.exception)
    return done.output + str(done.exception or "")


def listed(directory: Path) -> list[tuple[str, list[tuple[str, int]]]]:
    """Of each call: the command, and its runs in run.json."""
    sessions = json.loads((directory / "run.json").read_text())["sessions"]
    return [
        (part["session"]["command"], [(item["method"], item["seed"]) for item in part["runs"]]) for part in sessions
    ]


def rows(directory: Path, name: str = "results.csv") -> list[dict[str, Any]]:
    with (directory / name).open() as file:
        return list(csv.DictReader(file))


def test_run_json_lists_every_run_of_the_table_even_of_a_call_that_was_killed(out: Path) -> None:
    killed, finished = listed(out)
    assert killed == ("killed", [("FedAvg", 1)])
    assert finished[1] == [("FedMGDA+", 1)]
    assert [(row["method"], int(row["seed"])) for row in rows(out)] == killed[1] + finished[1]
    table = (out / "table.md").read_text()
    assert "seeds 1; 2 of 4 runs. 2 commands made them (run.json), the last of which is `" in table


def test_a_table_keeps_the_rows_of_earlier_runs_whose_files_are_gone(out: Path) -> None:
    before = {name: rows(out, name) for name in ("results.csv", "curves.csv")}
    calls = listed(out)
    shutil.rmtree(out / "runs")
    said = run("small", "--seeds", 2, "--methods", "FedAvg", "--out", out)
    assert "1 run, 0 of them done before" in said
    for name, own in before.items():
        now = rows(out, name)
        assert [row for row in now if row["seed"] == "1"] == own
        assert {row["method"] for row in now if row["seed"] == "2"} == {"FedAvg"}
    assert listed(out)[:2] == calls
    assert [runs for _, runs in listed(out)[2:]] == [[("FedAvg", 2)]]
    assert "2 runs, 2 of them done before" in run("small", "--seeds", 1, "--out", out)


def test_a_seed_that_is_not_the_experiments_own_stays_in_the_table(out: Path) -> None:
    run("small", "--seeds", 9, "--methods", "FedAvg", "--out", out)
    run("small", "--seeds", 1, "--out", out)
    assert [(row["method"], row["seed"]) for row in rows(out)] == [("FedAvg", "1"), ("FedAvg", "9"), ("FedMGDA+", "1")]


def test_a_restored_run_has_its_specification_and_every_number_of_the_files(out: Path) -> None:
    job = Job(parse("small", SMALL).cells()[1], 1)
    store = Store(out)
    whole = store.find(job)
    assert whole is not None
    final = {**whole.final, "loss/test": math.nan}
    record.write(store, "small", [RunResult(*job.key, whole.spec, final, whole.rounds, whole.session)], {})
    shutil.rmtree(out / "runs")
    record.restore(store)
    restored = store.find(job)
    assert restored is not None
    assert restored.session == whole.session
    assert restored.spec == whole.spec
    assert math.isnan(restored.final.pop("loss/test"))
    assert restored.final == pytest.approx({key: value for key, value in final.items() if key != "loss/test"}, rel=1e-5)
    assert [item.keys() for item in restored.rounds] == [item.keys() for item in whole.rounds]


def test_restored_runs_of_another_specification_are_refused_and_never_mixed(out: Path) -> None:
    shutil.rmtree(out / "runs")
    said = run("small", "--rounds", 1, "--seeds", 1, "--out", out, code=2)
    assert "2 of these 2 runs are in" in said
    assert "another specification (rounds = 2, not 1)" in said
    said = run("small", "--rounds", 1, "--seeds", 2, "--methods", "FedAvg", "--out", out)
    assert "FedAvg, seed 1 is of another specification (rounds = 2, not 1): left out" in said
    assert [(row["method"], row["seed"]) for row in rows(out)] == [("FedAvg", "2")]


def test_runs_that_the_experiment_has_no_more_are_left_out_and_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = SMALL.replace('name = "FedMGDA+"', 'name = "FedMGDA+ renamed"')
    monkeypatch.setattr("experiments.loading.load", lambda name: parse(name, renamed))
    said = run("small", "--seeds", 1, "--methods", "FedAvg", "--out", out)
    assert "the experiment has no run fedmgda-plus-1 (one of 1): left out" in said
    assert [row["method"] for row in rows(out)] == ["FedAvg"]


def test_a_run_that_is_made_anew_is_not_restored_after_the_call_was_killed(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    again = ("small", "--seeds", 1, "--methods", "FedAvg", "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr("experiments.runner.ExperimentRunner.run", killed)
        assert "killed" in run(*again, "--anew", code=1)
    assert "1 run, 0 of them done before" in run(*again)
    assert [len(runs) for _, runs in listed(out)] == [1, 1]


def test_a_failed_run_is_named_with_its_reason_until_it_is_made(out: Path) -> None:
    store = Store(out)
    found = [store.find(Job(cell, 1)) for cell in parse("small", SMALL).cells()]
    record.write(store, "small", [item for item in found if item], {"FedAvg, seed 2": "no room", "FedAvg, seed 1": "x"})
    run("small", "--seeds", 1, "--out", out)
    assert json.loads((out / "run.json").read_text())["failed"] == {"FedAvg, seed 2": "no room"}
    run("small", "--seeds", 2, "--methods", "FedAvg", "--out", out)
    assert json.loads((out / "run.json").read_text())["failed"] == {}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("results.csv", "method,seed\nFedAvg,1\n", "KeyError: 'condition'"),
        ("curves.csv", "method,condition,seed,round,mean\nFedAvg,,1,1,high\n", "could not convert string to float"),
    ],
)
def test_a_damaged_csv_file_is_set_aside_not_overwritten(out: Path, name: str, content: str, why: str) -> None:
    (out / name).write_text(content)
    shutil.rmtree(out / "runs")
    with pytest.raises(DamagedError, match=why):
        record.restore(Store(out))
    assert record.set_aside(Store(out)) == ["run.json.bad", "results.csv.bad", "curves.csv.bad"]
    assert (out / f"{name}.bad").read_text() == content


@pytest.mark.parametrize("directory", sorted(path.parent for path in (ROOT / "docs/results").glob("*/run.json")))
def test_every_published_run_json_lists_the_runs_of_its_table(directory: Path) -> None:
    runs = [run.key for part in record.read(Store(directory)).sessions for run in part.runs]
    there = [(row["method"], row["condition"], int(row["seed"])) for row in rows(directory)]
    assert sorted(runs) == sorted(there)
    assert {(row["method"], row["condition"], int(row["seed"])) for row in rows(directory, "curves.csv")} <= set(runs)
