"""A real coordinator with members played by hand: a run that stops by a metric, its best model, runs side by side."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import Attending, Federation, Member, federation, refused

from federation.v1.admin_pb2 import BestBy, ExportModelRequest, GetRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunState
from federation.vectors import Layout, Tensor, to_bytes

LAYOUT = Layout((Tensor("a", (3,)),))
SPEC = """\
task = "digits"
rounds = 9
algorithm.name = "fedavg-n"
selection = { minimum = 2 }
evaluate.metrics = { auc = {}, rmse = { better = "lower" } }
stop = { metric = "auc", of = "worst", target = 0.9, split = "test" }
"""
# What each member claims after each round: a's and b's AUC.
AUC = [(0.6, 0.5), (0.95, 0.4), (0.8, 0.8), (0.9, 0.92)]


@pytest.fixture(scope="module")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("best")) as made:
        made.serve()
        yield made


@pytest.fixture(scope="module")
def run(centre: Federation) -> str:
    """A run of four rounds in which the members claim `AUC`."""
    vector = np.ones(LAYOUT.size, dtype=np.float32)
    model = centre.directory / "model.safetensors"
    model.write_bytes(to_bytes(LAYOUT, vector))
    members = {name: centre.enroll(name) for name in ("a", "b")}
    streams = {name: member.attend(digits=10) for name, member in members.items()}
    found = centre.submit("watched", SPEC, "--model", str(model))
    for claims in AUC:
        for name, member in members.items():
            member.answer(streams[name].assignment(), seed=1)
        for name, claim in zip(members, claims, strict=True):
            measure(members[name], streams[name], claim)
    centre.wait_completed(found)
    for name, member in members.items():
        streams[name].close()
        member.channel.close()
    return found


def measure(member: Member, stream: Attending, auc: float) -> None:
    manifest = member.manifest(member.open(stream.assignment()))
    manifest.metrics.update({"test/auc": auc, "test/rmse": 1 - auc, "test/samples": 10 if auc < 0.9 else 30})
    member.submit(member.seal(manifest))


@pytest.fixture
def stub(centre: Federation) -> Iterator[AdminStub]:
    with centre.administrator() as channel:
        yield AdminStub(channel)


def command(centre: Federation, *arguments: str, code: int = 0) -> str:
    return centre.fedpareto("admin", "--home", str(centre.home / "admin"), *arguments, code=code)


def test_the_run_ended_when_its_worst_member_reached_the_target(stub: AdminStub, run: str) -> None:
    shown = stub.GetRun(GetRunRequest(run=run)).run
    assert (shown.state, shown.rounds_done) == (RunState.RUN_STATE_COMPLETED, 4)
    assert shown.reason == "target reached: test auc (worst) = 0.9, target 0.9"
    assert [metric.name for metric in shown.metrics] == ["auc", "rmse"]


def test_a_round_shows_each_members_metrics_with_mean_weighted_worst_and_best(centre: Federation, run: str) -> None:
    record = centre.admin("round", run, "1")
    found = record["summary"]["metrics"]
    assert [found[f"metric/auc/{of}"] for of in ("mean", "weighted", "worst", "best")] == pytest.approx(
        [0.675, 0.8125, 0.4, 0.95]
    )
    assert found["metric/rmse/worst"] == pytest.approx(0.6)
    assert [part["evaluation"]["test/auc"] for part in record["participations"]] == [0.95, 0.4]
    assert "the members' own metrics" in command(centre, "round", run, "1")


@pytest.mark.parametrize(
    ("metric", "of", "number", "value"),
    [
        ("auc", "", 3, 0.91),
        ("auc", "a", 1, 0.95),
        ("rmse", "worst", 3, 0.1),
        ("auc", "weighted", 3, 0.91),
        ("accuracy", "mean", 0, 0.5),
        ("loss", "b", 0, 2.0),
    ],
)
def test_the_best_model_is_exported(stub: AdminStub, run: str, metric: str, of: str, number: int, value: float) -> None:
    best = BestBy(metric=metric, of=of, split="test")
    found = next(iter(stub.ExportModel(ExportModelRequest(run=run, best=best))))
    assert (found.best.round, found.best.value) == (number, pytest.approx(value))
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
    centre: Federation, run: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "best.safetensors")
    words = command(centre, "export", run, "--best", "auc", "--of", "worst", "--split", "test", "--out", out)
    assert "round 3, test auc (worst) = 0.9" in " ".join(words.split())
    found = centre.admin("compare", run, "watched")
    first, second = found["runs"]
    assert first == second
    assert (first["rounds"], first["evaluated_round"], first["metrics"]["metric/auc/worst"]) == (4, 3, 0.9)
    assert "0.900" in command(centre, "compare", run, "watched")
    command(centre, "compare", run, code=2)
    report = tmp_path / "report.html"
    centre.fedpareto("report", run, "--out", str(report), "--home", str(centre.home / "admin"))
    assert "own metrics" in report.read_text()
