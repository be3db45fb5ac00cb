"""What operators see of a run with several objectives: simulated once, read as the Admin service and notebooks do."""

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from coordinator.home import CoordinatorHome
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.views import details, overview
from federation.record.results import accepted
from federation.v1.admin_pb2 import GetRoundResponse
from federation.v1.common_pb2 import AssignmentState
from fedpareto.face.simulated import simulate
from fedpareto.simulation.history import History
from fedpareto.web.report import page
from fedpareto.web.sections.shown_run import ShownRun
from storage import models, states
from storage.blob_directory import DirectoryStore
from storage.database import Database
from tests.few import few

SPEC = """
name = "seen"
task = "two-digits"
rounds = 2
seed = 3

[algorithm]
name = "{algorithm}"

[train]
steps = 2
batch_size = 16
learning_rate = 0.1

[selection]
method = "count"
count = 3

[simulation]
clients = 4

[objectives]
serve = {{ {serve} }}
"""
RIGHT = 'client-000 = ["right"], client-001 = ["right"]'
NOBODY_LEFT = ", ".join(f'client-00{i} = ["right"]' for i in range(4))


class Seen:
    """A run, and its record."""

    def __init__(self, home: Path, algorithm: str, serve: str = RIGHT) -> None:
        self.history: History = simulate(SPEC.format(algorithm=algorithm, serve=serve), home=home, threads=1)
        assert self.history.state == "COMPLETED", self.history.reason
        loaded = CoordinatorHome.load(home)
        self.checks = EnvelopeChecks(loaded.federation_id, loaded.signing.chain)
        self.blobs = DirectoryStore(loaded.blobs_dir)
        self.database = Database.open(loaded.database_url, durable=False)

    def detail(self, session: Session, number: int) -> GetRoundResponse:
        found = session.scalars(select(models.Round).where(models.Round.number == number)).one()
        return details.round_detail(session, self.blobs, self.checks, found)


@pytest.fixture(scope="module")
def cmoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    seen = Seen(tmp_path_factory.mktemp("cmoo") / "home", "fedcmoo")
    yield seen
    seen.database.close()


def test_a_run_says_who_serves_which_of_its_objectives(cmoo: Seen) -> None:
    with cmoo.database.read() as session:
        run = session.scalars(select(models.Run)).one()
        found = overview.run(session, run, spec=True)
        assert list(found.objectives) == ["left", "right"]
        assert {row.client_id: list(row.objectives) for row in found.serving} == {
            "client-000": ["right"],
            "client-001": ["right"],
            "client-002": ["left", "right"],
            "client-003": ["left", "right"],
        }
        assert not overview.run(session, run).serving
        assert list(overview.client(session, {}, datetime.now(UTC), "client-000").tasks[0].objectives) == ["right"]


def test_a_round_shows_its_objectives_and_its_phases_with_every_byte(cmoo: Seen) -> None:
    with cmoo.database.read() as session:
        for number in (0, 1):
            found = cmoo.detail(session, number)
            assert [phase.kind for phase in found.phases[:2]] == ["jacobian", "train"]
            assert all(phase.HasField("started") and phase.HasField("ended") for phase in found.phases)
            sent = sum(phase.bytes_up for phase in found.phases)
            assert sent == found.summary.metrics["bytes/up"] == sum(part.payload_bytes for part in found.participations)
            assert found.phases[0].bytes_up > 0
            results = {one.name: one for one in found.objectives.results}
            assert sum(one.weight for one in results.values()) == pytest.approx(1)
            assert results["right"].clients == 3
            assert results["left"].clients == sum("left" in part.objectives for part in found.participations)
            assert found.objectives.mode == "pgd"
            assert len(found.objectives.cosines) == 4
            for part in found.participations:
                assert list(part.answered)[:2] == [0, 1]
                assert accepted(found.phases, part)
                assert math.isfinite(part.loss_before)


def test_an_export_tells_what_the_rounds_tell_one_by_one(cmoo: Seen) -> None:
    with cmoo.database.read() as session:
        run = session.scalars(select(models.Run)).one()
        for item in details.export_rounds(session, run.run_id, 0, 20):
            detail = cmoo.detail(session, item.summary.round)
            for part in detail.participations:
                part.key_id = ""
                del part.envelopes[:]
            assert list(item.participations) == list(detail.participations)
            assert list(item.phases) == list(detail.phases)
            assert item.objectives == detail.objectives
            of_one = {scored.client_id: dict(scored.scores) for scored in item.scores}["client-003"]
            assert of_one["test/loss"] == pytest.approx((of_one["test/loss/left"] + of_one["test/loss/right"]) / 2)


def test_nobody_disappears_who_stopped_before_training(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "home", "fedcmoo")
    with seen.database.begin() as session:
        rows = session.execute(
            select(models.Phase.kind, models.Assignment)
            .join(models.Assignment)
            .join(models.Round)
            .where(models.Round.number == 0)
            .order_by(models.Assignment.client_id)
        ).all()
        first, second, _ = sorted({row.client_id for _, row in rows})
        for kind, row in rows:
            if (kind, row.client_id) in (("train", first), ("train", second), ("jacobian", first)):
                session.execute(delete(models.Reply).where(models.Reply.assignment_id == row.assignment_id))
                row.state, row.reason = states.AssignmentState.EXPIRED, "deadline"
                if kind == "train":
                    session.delete(row)
    with seen.database.read() as session:
        found = seen.detail(session, 0)
        late, idle, whole = found.participations
        assert (late.state, late.reason) == (
            AssignmentState.ASSIGNMENT_STATE_EXPIRED,
            "deadline: it got as far as phase 0, jacobian",
        )
        assert idle.state == AssignmentState.ASSIGNMENT_STATE_FULFILLED
        assert idle.reason.startswith("not asked to train")
        assert (list(late.answered), list(idle.answered), list(whole.answered)) == ([], [0], [0, 1])
        assert [accepted(found.phases, part) for part in found.participations] == [False, False, True]
        summary = found.summary
        assert (summary.asked, summary.accepted, summary.refused, summary.missing) == (2, 1, 0, 1)
    seen.database.close()


@few("scalarised")
@pytest.mark.parametrize(("algorithm", "rest"), [("fsmgda", 1.0), ("scalarised", 0.5)])
def test_an_objective_that_nobody_serves_is_shown_as_left_out(tmp_path: Path, algorithm: str, rest: float) -> None:
    seen = Seen(tmp_path / "home", algorithm, NOBODY_LEFT)
    with seen.database.read() as session:
        found = seen.detail(session, 0)
        left, right = found.objectives.results
        assert "no client" in left.left_out
        assert math.isnan(left.weight)
        assert (right.weight, right.left_out, right.clients) == (rest, "", 3)
    table = seen.history.objectives
    assert list(table.columns) == ["round", "objective", "weight", "loss", "clients", "left_out"]
    assert table["objective"].tolist() == ["left", "right"] * 2
    assert table["weight"].tolist()[1::2] == [rest, rest]
    assert table["left_out"].tolist()[0] == left.left_out
    seen.database.close()


def test_the_rows_of_the_gram_matrix_are_named_by_client_and_objective(tmp_path: Path) -> None:
    seen = Seen(tmp_path / "home", "fsmgda")
    with seen.database.read() as session:
        found = seen.detail(session, 1)
        rows = [f"{part.client_id}/{name}" for part in found.participations for name in part.objectives]
        assert list(found.gram_clients) == rows
        assert len(found.cosines) == len(rows) ** 2
    assert len(seen.history.reply_records) == 6
    seen.database.close()


def test_the_report_of_a_simulation_has_the_figures_of_its_objectives(cmoo: Seen) -> None:
    with cmoo.database.read() as session:
        run = session.scalars(select(models.Run)).one()
        members = overview.clients(session, {}, datetime.now(UTC), after="", count=100)
        data = ShownRun.of(
            overview.run(session, run, spec=True), details.export_rounds(session, run.run_id, 0, 20), members
        )
    made = page(data)
    for title in (
        "The way through the plane of losses",
        "Weights λ of the objectives",
        "Loss of each objective",
        "Conflicts between objectives",
        "The phases of the rounds",
    ):
        assert re.search(rf"<h3>{title}</h3>.{{0,400}}<svg", made, re.DOTALL), title
    # About a model and a sketch of its encoder: the parameters, 4 bytes each, and what a safetensors file adds.
    assert 1 < data.up[0] / (4 * data.run.parameters) < 2.2
