"""A real coordinator with members played by hand: a run that stops by a metric, its best model, runs side by side."""

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from federation.v1.admin_pb2 import BestBy, ExportModelRequest, GetRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Layout, Tensor, to_bytes
from storage.database import Database
from storage.retention import is_retained
from tests.harness import Attending, Federation, Member, refused

LAYOUT = Layout((Tensor("a", (3,)),))
SPEC = """\
task = "toy"
rounds = 9
algorithm.name = "fedavg-n"
selection = { minimum = 2 }
evaluate.metrics = { auc = {}, rmse = { better = "lower" } }
"""
STOP = 'stop = { metric = "auc", of = "worst", target = 0.9, split = "test" }\n'
# What each member claims after each round: a's and b's AUC, with the samples that it was measured on.
AUC = [((0.6, 10), (0.5, 10)), ((0.95, 30), (0.4, 10)), ((0.8, 10), (0.8, 10)), ((0.9, 30), (0.92, 30))]
# Of the second run. Without samples there is no weighted mean; 0.8 is the best one, and no improvement that counts.
SECOND_STOP = 'stop = { metric = "auc", of = "weighted", patience = 2, improvement = 0.5, split = "test" }\n'
SECOND = [((0.6, 0), (0.4, 0)), ((0.6, 10), (0.4, 10)), ((0.7, 10), (0.9, 10)), ((0.9, 30), (0.4, 10))]


@pytest.fixture(scope="module")
def runs(fed: Federation) -> tuple[str, str]:
    """Two runs of four rounds, in which the members claim `AUC` and `SECOND`."""
    vector = np.ones(LAYOUT.size, dtype=np.float32)
    model = fed.directory / "model.safetensors"
    model.write_bytes(to_bytes(LAYOUT, vector))
    members = {name: fed.enroll(name) for name in ("a", "b")}
    streams = {name: member.attend(toy=10) for name, member in members.items()}
    found = []
    for run_name, stop, rounds in (("watched", STOP, AUC), ("second", SECOND_STOP, SECOND)):
        found.append(fed.submit(run_name, SPEC + stop, "--model", str(model)))
        for claims in rounds:
            for name, member in members.items():
                member.answer(streams[name].assignment(), seed=1)
            for name, claim in zip(members, claims, strict=True):
                measure(members[name], streams[name], *claim)
        fed.wait_completed(found[-1])
    for name, member in members.items():
        streams[name].close()
        member.channel.close()
    return found[0], found[1]


@pytest.fixture(scope="module")
def run(runs: tuple[str, str]) -> str:
    return runs[0]


def measure(member: Member, stream: Attending, auc: float, samples: int) -> None:
    manifest = member.manifest(member.open(stream.assignment()))
    manifest.metrics.update({"test/auc": auc, "test/rmse": 1 - auc, "test/samples": samples})
    member.submit(member.sign(manifest))


@pytest.fixture
def stub(fed: Federation) -> Iterator[AdminStub]:
    with fed.administrator() as channel:
        yield AdminStub(channel)


def cells(text: str) -> dict[str, list[str]]:
    """The rows of tables in the terminal by their first cell; of equals the first."""
    rows = [re.sub("[│┃]", " ", line).split() for line in reversed(text.splitlines())]
    return {row[0]: row[1:] for row in rows if row}


def command(fed: Federation, *arguments: str, code: int = 0) -> str:
    return fed.fedpareto("admin", "--home", str(fed.home / "admin"), *arguments, code=code)


@pytest.mark.full
def test_the_best_model_of_a_run_that_was_stopped_is_kept_although_it_is_no_improvement_that_counts(
    fed: Federation, stub: AdminStub, runs: tuple[str, str]
) -> None:
    shown = stub.GetRun(GetRunRequest(run=runs[1])).run
    assert shown.rounds_done == 4
    assert shown.reason == "no better test auc (weighted) in 2 evaluations; the last one is 0.775"
    metrics = [fed.admin("round", runs[1], str(number))["summary"]["metrics"] for number in range(4)]
    assert [one.get("stop/best") for one in metrics] == [None, 0.5, pytest.approx(0.8), pytest.approx(0.8)]
    assert [one.get("stop/since") for one in metrics] == [None, 0.0, 1.0, 2.0]
    best = BestBy(metric="auc", of="weighted", split="test")
    exported = next(iter(stub.ExportModel(ExportModelRequest(run=runs[1], best=best))))
    assert exported.best.round == 2
    with closing(Database.open(f"sqlite:///{fed.home / 'coordinator.db'}")) as database, database.read() as session:
        assert is_retained(session, exported.digest, keep_rounds=0)


@pytest.mark.full
def test_a_round_shows_each_members_metrics_with_mean_weighted_worst_and_best(fed: Federation, run: str) -> None:
    record = fed.admin("round", run, "1")
    found = record["summary"]["metrics"]
    auc = [found[f"metric/auc/{of}"] for of in ("mean", "weighted", "worst", "best")]
    assert auc == pytest.approx([0.675, 0.8125, 0.4, 0.95])
    assert found["metric/rmse/worst"] == pytest.approx(0.6)
    assert [part["evaluation"]["test/auc"] for part in record["participations"]] == [0.95, 0.4]
    shown, _, own = command(fed, "round", run, "1").partition("the members' own metrics")
    assert cells(shown)["auc"] == ["0.675", "0.812", "0.400", "0.950"], "mean, weighted, worst, best"
    assert cells(own)["member"] == ["auc", "rmse"]
    assert (cells(own)["a"], cells(own)["b"]) == (["0.950", "0.050"], ["0.400", "0.600"])


@pytest.mark.full
def test_rounds_and_watch_show_the_metric_that_stops_the_run(fed: Federation, run: str) -> None:
    table = command(fed, "rounds", run)
    assert (cells(table)["0"][-4], cells(table)["3"][-4]) == ("0.500", "0.900"), "then the worst client and the time"
    assert "auc" in table.splitlines()[0]
    assert "worst" in table.splitlines()[1].split()[2:]
    watched = command(fed, "watch", run).splitlines()
    titles = watched[0].split("  ")
    assert watched[0].index("auc (worst)") < watched[0].index("replies")
    assert "0.900" in watched[4][watched[0].index("auc (worst)") - 4 :], titles


def test_a_run_shows_its_ten_most_useful_numbers_and_with_all_every_one(fed: Federation, run: str) -> None:
    shown = (command(fed, "run", run), command(fed, "run", run, "--all"))
    few, every = (
        [
            line.split()
            for line in text.partition("metrics of round 3")[2].partition("specification")[0].split("\n")
            if line.strip()
        ]
        for text in shown
    )
    assert [line[0] for line in few[:2]] == ["accuracy/mean", "accuracy/worst5"]
    assert (len(few), few[-1]) == (11, [str(len(every) - 10), "more", "with", "--all"])
    assert {tuple(line) for line in few[:-1]} < {tuple(line) for line in every}


def test_a_run_shows_each_members_metrics_after_its_last_round(fed: Federation, runs: tuple[str, str]) -> None:
    rows = cells(command(fed, "run", runs[1]).partition("the members' own metrics after round 3")[2])
    assert (rows["member"], rows["a"], rows["b"]) == (["auc", "rmse"], ["0.900", "0.100"], ["0.400", "0.600"])


@pytest.mark.parametrize(
    ("metric", "of", "number", "value"),
    [
        ("auc", "", 3, 0.91),
        ("auc", "a", 1, 0.95),
        ("rmse", "worst", 3, 0.1),
        ("auc", "weighted", 3, 0.91),
        ("accuracy", "mean", 3, 0.5),
        ("loss", "b", 3, 2.0),
    ],
)
def test_the_best_model_is_exported(stub: AdminStub, run: str, metric: str, of: str, number: int, value: float) -> None:
    best = BestBy(metric=metric, of=of, split="test")
    found = next(iter(stub.ExportModel(ExportModelRequest(run=run, best=best))))
    assert found.best.round == number
    assert found.best.value == pytest.approx(value)
    same = next(iter(stub.ExportModel(ExportModelRequest(run=run, round=number))))
    assert (same.digest, same.HasField("best")) == (found.digest, False)


@pytest.mark.parametrize("best", [BestBy(metric="dice"), BestBy(metric="auc"), BestBy(metric="auc", of="nobody")])
def test_a_model_that_was_not_measured_so_is_not_exported(stub: AdminStub, run: str, best: BestBy) -> None:
    with refused("NOT_FOUND", "metric-unknown"):
        next(iter(stub.ExportModel(ExportModelRequest(run=run, best=best))))


def test_a_round_and_a_metric_exclude_each_other(stub: AdminStub, run: str) -> None:
    with refused("INVALID_ARGUMENT", "argument"):
        next(iter(stub.ExportModel(ExportModelRequest(run=run, round=1, best=BestBy(metric="auc")))))


def test_commands_export_the_best_model_compare_runs_and_draw_metrics(
    fed: Federation, runs: tuple[str, str], tmp_path: Path
) -> None:
    run, other = runs
    out = str(tmp_path / "best.safetensors")
    words = command(fed, "export", run, "--best", "auc", "--of", "worst", "--split", "test", "--out", out)
    assert "round 3, test auc (worst) = 0.9" in " ".join(words.split())
    words = command(fed, "export", run, "--best", "accuracy", "--split", "test", "--out", out, "--force")
    assert "as in 4 rounds; of these, this one has the lowest mean test loss" in " ".join(words.split())
    found = fed.admin("compare", run, "second")
    compared = [(one["run"], one["rounds"], one["evaluated_round"]) for one in found["runs"]]
    assert compared == [(run, 4, 3), (other, 4, 3)]
    assert [one["metrics"]["metric/auc/worst"] for one in found["runs"]] == [0.9, 0.4]
    shown_rows = cells(command(fed, "compare", run, "second"))
    shown = {name: shown_rows[f"metric/auc/{name}"] for name in ("mean", "weighted", "worst")}
    assert shown == {"mean": ["0.910", "0.650"], "weighted": ["0.910", "0.775"], "worst": ["0.900", "0.400"]}
    command(fed, "compare", run, code=2)
    report = tmp_path / "report.html"
    fed.fedpareto("report", other, "--out", str(report), "--home", str(fed.home / "admin"))
    section = report.read_text().partition("The task&#x27;s own metrics</h2>")[2]
    rows = [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in re.findall(r"<tr>.*?</tr>", section, re.DOTALL)]
    auc = rows.index(["round", "mean", "weighted", "worst", "best"])
    assert rows[auc + 1] == ["0", "0.500", "–", "0.400", "0.600"]
    assert rows[auc + 4] == ["3", "0.650", "0.775", "0.400", "0.900"]
    end = rows.index(["member", "auc", "rmse"])
    assert rows[end + 1 : end + 3] == [["a", "0.900", "0.100"], ["b", "0.400", "0.600"]]
