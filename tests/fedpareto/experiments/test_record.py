"""`runs.jsonl`: which runs a table contains, how each came about, and that no row is lost."""

import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from typer.testing import CliRunner

from fedpareto.cli.main import app
from fedpareto.experiments.definition import parse
from fedpareto.experiments.experiment_runner import ExperimentRunner, RunnerSettings
from fedpareto.experiments.result_store import RUNS, Job, Session, Store

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
    monkeypatch.setattr("fedpareto.experiments.loading.load", lambda name: parse(name, SMALL))


@pytest.fixture(scope="module")
def first_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of both methods with seed 1, each made by a call of its own, of which the first was killed."""
    store = Store(tmp_path_factory.mktemp("small") / "out", Session("killed", "2026-01-01T00:00:00+00:00"))
    cell = parse("small", SMALL).cells()[0]
    ExperimentRunner(store, RunnerSettings()).run([Job(cell, 1)], lambda event: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpareto.experiments.loading.load", lambda name: parse(name, SMALL))
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
    """Of each call: the command, and its runs in the file."""
    runs = list(Store(directory).runs().values())
    calls = {run.session.began: run.session.command for run in runs}
    return [
        (command, [(run.method, run.seed) for run in runs if run.session.began == began])
        for began, command in calls.items()
    ]


def shown(directory: Path) -> list[tuple[str, str]]:
    """The methods in the table, with the number of their seeds."""
    lines = (directory / "table.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| Fed")]
    return [(line[0], line[1]) for line in cells]


def test_the_file_has_every_run_of_the_table_even_of_a_call_that_was_killed(out: Path) -> None:
    killed, finished = listed(out)
    assert killed == ("killed", [("FedAvg", 1)])
    assert finished[1] == [("FedMGDA+", 1)]
    assert shown(out) == [("FedAvg", "1"), ("FedMGDA+", "1")]
    table = (out / "table.md").read_text()
    assert "seeds 1; 2 of 4 runs. 2 commands made them (runs.jsonl), the last of which is `" in table


def test_a_later_call_adds_a_line_and_leaves_the_others_as_they_are(out: Path) -> None:
    before = (out / RUNS).read_bytes()
    said = run("small", "--seeds", 2, "--methods", "FedAvg", "--out", out)
    assert "1 run, 0 of them done before" in said
    after = (out / RUNS).read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 3
    assert shown(out) == [("FedAvg", "2"), ("FedMGDA+", "1")]
    assert "2 runs, 2 of them done before" in run("small", "--seeds", 1, "--out", out)


def test_a_seed_that_is_not_the_experiments_own_stays_in_the_table(out: Path) -> None:
    run("small", "--seeds", 9, "--methods", "FedAvg", "--out", out)
    run("small", "--seeds", 1, "--out", out)
    assert shown(out) == [("FedAvg", "2"), ("FedMGDA+", "1")]
    assert "seeds 1, 9; 3 of 6 runs" in (out / "table.md").read_text()


def test_a_line_says_what_was_run_how_and_what_was_measured(out: Path) -> None:
    job = Job(parse("small", SMALL).cells()[1], 1)
    found = Store(out).find(job)
    assert found is not None
    line = json.loads((out / RUNS).read_bytes().splitlines()[1])
    assert list(line) == ["method", "condition", "seed", "digest", "spec", "session", "final", "rounds"]
    assert (line["method"], line["condition"], line["seed"]) == ("FedMGDA+", "", 1)
    assert line["spec"] == job.document
    spelled = json.dumps(line["spec"], sort_keys=True, separators=(",", ":"))
    assert line["digest"] == f"blake3:{blake3(spelled.encode()).hexdigest()}"
    assert list(line["session"]) == ["command", "began", "hardware", "software", "commit"]
    assert {"python", "numpy", "torch"} <= line["session"]["software"].keys()
    assert line["final"] == found.final
    assert line["rounds"] == {name: [measures[name] for measures in found.rounds] for name in found.rounds[0]}
    assert line["rounds"]["round"] == [1.0, 2.0]


def test_runs_of_another_specification_are_refused_and_never_mixed(out: Path) -> None:
    said = run("small", "--rounds", 1, "--seeds", 1, "--out", out, code=2)
    assert "2 of these 2 runs are in" in said
    assert "another specification (rounds = 2, not 1)" in said
    said = run("small", "--rounds", 1, "--seeds", 2, "--methods", "FedAvg", "--out", out)
    assert "FedAvg, seed 1 is of another specification (rounds = 2, not 1): left out" in said
    assert shown(out) == [("FedAvg", "1")]
    assert "seeds 2; 1 of 4 runs" in (out / "table.md").read_text()


def test_runs_that_the_experiment_has_no_more_are_left_out_and_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = SMALL.replace('name = "FedMGDA+"', 'name = "FedMGDA+ renamed"')
    monkeypatch.setattr("fedpareto.experiments.loading.load", lambda name: parse(name, renamed))
    said = run("small", "--seeds", 1, "--methods", "FedAvg", "--out", out)
    assert "the experiment has no run fedmgda-plus-1 (one of 1): left out" in said
    assert shown(out) == [("FedAvg", "1")]


def test_a_run_that_is_made_anew_is_gone_after_the_call_was_killed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    again = ("small", "--seeds", 1, "--methods", "FedAvg", "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr("fedpareto.experiments.experiment_runner.ExperimentRunner.run", killed)
        assert "killed" in run(*again, "--anew", code=1)
    assert [len(runs) for _, runs in listed(out)] == [1]
    assert "1 run, 0 of them done before" in run(*again)
    assert sorted(path.name for path in out.iterdir()) == [RUNS, "table.md", "work"]
    assert [len(runs) for _, runs in listed(out)] == [1, 1]


def test_a_line_that_was_half_written_is_dropped_with_a_word_and_its_run_made_again(out: Path) -> None:
    first, second = (out / RUNS).read_bytes().splitlines(keepends=True)
    for half in (second[:1], second[:500], second[:-2], b"\0" * 512):
        (out / RUNS).write_bytes(first + half)
        done = CliRunner().invoke(app, ["experiment", "compare", "small", "--out", str(out)])
        assert "runs.jsonl ends in half a line, of a run that was being written: dropped\n" in done.output
        assert (out / RUNS).read_bytes() == first
    (out / RUNS).write_bytes(first + second[:500])
    said = run("small", "--seeds", 1, "--out", out)
    assert "runs.jsonl ends in half a line" in said
    assert "2 runs, 1 of them done before" in said
    assert "half a line" not in run("small", "--seeds", 1, "--out", out)


def test_a_damaged_line_is_named_and_nothing_is_changed(out: Path) -> None:
    lines = (out / RUNS).read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b'{"method":"FedAvg"}\n' + lines[1]
    (out / RUNS).write_bytes(damaged)
    why = "line 2 cannot be read (condition: missing): remove the line, and its run is made again"
    for options in ((), ("--anew",)):
        assert why in run("small", "--seeds", 1, "--out", out, *options, code=2)
    assert (out / RUNS).read_bytes() == damaged


@pytest.mark.full
def test_the_files_of_two_tables_are_combined_by_concatenation(out: Path, tmp_path: Path) -> None:
    run("small", "--seeds", 2, "--out", tmp_path / "other")
    with (out / RUNS).open("ab") as file:
        file.write((tmp_path / "other" / RUNS).read_bytes() * 2)
    done = CliRunner().invoke(app, ["experiment", "compare", "small", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert shown(out) == [("FedAvg", "2"), ("FedMGDA+", "2")]
