"""Two coordinators and runs that measure models or describe data: one conducts, the other takes over within a round."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from federation.digests import digest
from federation.spec.run_spec import with_models
from federation.v1.admin_pb2 import MeasuredModel
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope
from federation.vectors import to_bytes
from storage.models import Run
from storage.states import PhaseState, RunState
from tests.coordinator.cluster.scene import two_players
from tests.coordinator.members.scene import problems
from tests.described import document, drawn, tell
from tests.few import few_of
from tests.running import Running, wait_for
from tests.stage import LAYOUT, Player, Stage
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.scene import verified

MODEL = to_bytes(LAYOUT, np.full(LAYOUT.size, 0.5, np.float32))
KINDS = ["evaluate", "statistics"]
POINTS = ["before a reply", "between two replies", "after the last reply"]


def submitted(stage: Stage, kind: str, task: str) -> str:
    if kind == "statistics":
        return stage.submit(document(task, "selection.minimum = 2\n"))
    text = f'name = "{task}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["test"]\nselection.minimum = 2\n'
    header = MeasuredModel(digest=digest(MODEL), size=len(MODEL))
    return stage.submit(with_models(text.encode(), [digest(MODEL)]), model=MODEL, models=[header], further=[])


def taken(stage: Stage, run: str) -> None:
    """Another coordinator has had the run since, as after its conductor slept past its lease, and has died."""
    with stage.served.database.begin() as session:
        row = session.get_one(Run, run, with_for_update=True)
        row.epoch, row.conductor, row.lease_until = row.epoch + 1, "0" * 32, row.created


def replied(kind: str, player: Player, number: int) -> None:
    if kind == "statistics":
        assert tell(player, drawn(number)).accepted
    else:
        player.answer()


@pytest.mark.parametrize("point", few_of(POINTS, "between two replies"))
@pytest.mark.parametrize("kind", few_of(KINDS, "evaluate"))
def test_a_coordinator_that_takes_a_run_over_within_its_measuring_round_asks_nobody_twice(
    first: Stage, second: Running, tmp_path: Path, kind: str, point: str
) -> None:
    names = [f"{name}-{kind}-{point.replace(' ', '-')}" for name in ("ann", "ben")]
    task, ann, ben = two_players(first, second, *names)
    run = submitted(first, kind, task)
    steps: list[Callable[[], object]] = [lambda: replied(kind, ann, 1), lambda: replied(kind, ben, 2)]
    place = POINTS.index(point)
    wait_for(lambda: first.phases(run), "the question")
    for step in steps[:place]:
        step()
    taken(first, run)
    for step in steps[place:]:
        step()
    first.wait_state(run, RunState.COMPLETED)
    (phase,) = first.phases(run)
    assert phase.state is PhaseState.CLOSED
    assert set(first.replies(run)) == set(names)
    (told,) = verified(first, run, tmp_path)
    assert told.words.startswith("2 members ")
    assert verify_independently(tmp_path / "run.fedpareto").missing == []
    assert [problem for problem in problems(first) if run in problem] == []


@pytest.mark.parametrize("kind", few_of(KINDS, "statistics"))
def test_a_member_whose_answer_is_lost_hands_in_the_same_reply_at_the_other_coordinator_and_counts_once(
    first: Stage, second: Running, tmp_path: Path, kind: str
) -> None:
    names = [f"{name}-{kind}-lost" for name in ("ann", "ben")]
    task, ann, ben = two_players(first, second, *names)
    run = submitted(first, kind, task)
    sent = list[tuple[SignedEnvelope, bytes]]()
    submit = ann.member.submit

    def noted(envelope: SignedEnvelope, payload: bytes = b"") -> ReceiptManifest:
        sent.append((envelope, payload))
        return submit(envelope, payload)

    ann.member.submit = noted  # type: ignore[method-assign,assignment]
    replied(kind, ann, 1)
    (stored,) = first.replies(run).values()
    with ann.member.files.channel(address=second.address) as channel:
        again = type(ann.member)(ann.member.files)
        again.stub = type(ann.member.stub)(channel)
        receipt = again.submit(*sent[0])
    assert receipt.accepted
    assert receipt.envelope == stored.envelope_digest
    replied(kind, ben, 2)
    first.wait_state(run, RunState.COMPLETED)
    assert len(verified(first, run, tmp_path)) == 1
    assert set(first.replies(run)) == set(names)
