"""A client that signs two different replies to one assignment: both envelopes are kept, with an audit entry."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.intake import Admission, Intake
from coordinator.rounds.transitions import end_assignment
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from storage.models import Assignment, AuditEntry, Reply
from storage.states import AssignmentState
from tests.running import SECONDS, refused
from tests.stage import LAYOUT, LONG, Player, Stage


def answered(stage: Stage) -> tuple[str, Player, AssignmentManifest]:
    """A run whose one reply so far is ann's; ben is waited for."""
    run, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    order = ann.order()
    ann.reply(order)
    ben.kept = ben.orders()
    return run, ann, order


def different(number: int) -> np.ndarray:
    return np.full(LAYOUT.size, number + 1.0, np.float32)


def entries(stage: Stage, assignment_id: str, action: str = "reply.equivocation") -> list[AuditEntry]:
    return stage.served.entries(action=action, subject=assignment_id)


def recorded(stage: Stage, order: AssignmentManifest) -> list[Reply]:
    """What is on record of replies to an assignment."""
    rows = select(Reply).where(Reply.assignment_id == order.assignment_id)
    return stage.look(lambda session: list(session.scalars(rows)))


def test_two_different_replies_to_one_assignment_are_both_kept_as_evidence(stage: Stage) -> None:
    run, ann, order = answered(stage)
    for _ in range(2):  # the same second reply twice is one piece of evidence
        with refused("ALREADY_EXISTS", "assignment-fulfilled"):
            ann.submit(order, different(0))
    stage.play(run, ann, stage.players["ben"])
    listed = stage._admin.ListReplies(admin.ListRepliesRequest(run=run, client_id="ann"), timeout=SECONDS)
    first, second, *_ = [update for page in listed for update in page.replies if update.phase == 0]
    assert (first.accepted, first.reason) == (True, "")
    assert (second.accepted, second.reason) == (False, "assignment-fulfilled")
    assert first.assignment_id == second.assignment_id == order.assignment_id
    assert first.envelope_digest != second.envelope_digest == envelope_digest(second.envelope)
    assert [(check.kind, check.reason) for check in second.envelopes] == [("reply", "")]
    (entry,) = entries(stage, order.assignment_id)
    assert entry.actor == "fedpareto://test/client/ann"
    assert [found.outcome for found in entries(stage, order.assignment_id, "reply.accepted")] == [""]
    assert first.envelope_digest in entry.detail
    assert second.envelope_digest in entry.detail
    # The first one made the step, alone.
    assert stage.replies(run)["ann"].weight == 0.5


def test_the_evidence_of_one_assignment_is_bounded(stage: Stage) -> None:
    _, ann, order = answered(stage)
    for number in range(5):
        with refused("ALREADY_EXISTS", "assignment-fulfilled"):
            ann.submit(order, different(number))
    assert len(recorded(stage, order)) == 1 + 3
    assert len(entries(stage, order.assignment_id)) == 3


def test_what_the_client_has_not_signed_is_no_evidence_against_it(stage: Stage) -> None:
    _, ann, order = answered(stage)
    forged, payload = ann.member.signed(order)
    forged.signature = bytes(64)
    elsewhere = ann.member.manifest(order, payload)
    elsewhere.round += 1
    for envelope in (forged, ann.member.seal(elsewhere)):
        with refused("ALREADY_EXISTS", "assignment-fulfilled"):
            ann.member.submit(envelope, payload)
    assert not entries(stage, order.assignment_id)
    (own,) = recorded(stage, order)
    assert ann.member.submit(
        SignedEnvelope.FromString(own.envelope), payload
    ).accepted  # the very same one gets its receipt again


# --- replies that are admitted at the same time; the intake is called without gRPC


def intake_of(stage: Stage, changed: Callable[[str], None] = lambda _: None) -> Intake:
    database, signing = stage.served.database, stage.served.home.signing
    told: dict[str, Any] = {"changed": changed, "replied": changed}
    return Intake(database, signing, clock=stage.clock, signatures=SignatureMemory(), **told)


def admitted(stage: Stage, player: Player, order: AssignmentManifest, *seeds: int) -> tuple[Intake, list[Admission]]:
    """An intake that has admitted a reply for each seed."""
    intake = intake_of(stage)
    found = []
    for seed in seeds:
        envelope, payload = player.member.signed(order, seed)
        stage.blobs.put(payload)
        admission = intake.admit(player.name, envelope)
        assert isinstance(admission, Admission)
        found.append(admission)
    return intake, found


def test_of_two_replies_that_were_admitted_the_first_counts_and_the_second_is_evidence(stage: Stage) -> None:
    _, (ann,) = stage.begin("ann", algorithm="fedavg")
    order = ann.order()
    intake, (first, again, second) = admitted(stage, ann, order, 0, 0, 1)
    receipt = intake.record(first, None)
    assert intake.record(again, None) == receipt
    with pytest.raises(Refusal, match="assignment-fulfilled"):
        intake.record(second, None)
    (entry,) = entries(stage, order.assignment_id)
    assert second.digest in entry.detail


def test_a_reply_that_was_admitted_before_its_run_was_stopped_is_refused_and_no_evidence(stage: Stage) -> None:
    run, (ann,) = stage.begin("ann", algorithm="fedavg")
    order = ann.order()
    intake, (admission,) = admitted(stage, ann, order, 0)
    stage.stop_run(run)
    with pytest.raises(Refusal, match="assignment-closed"):
        intake.record(admission, None)
    assert recorded(stage, order) == []


def test_a_reply_that_was_admitted_before_the_deadline_comes_too_late_after_it(stage: Stage) -> None:
    _, (ann,) = stage.begin("ann", algorithm="fedavg")
    intake, (admission,) = admitted(stage, ann, ann.order(), 0)
    admission.must_be_in_time(admission.deadline)
    with pytest.raises(Refusal, match=r"^deadline"):
        admission.must_be_in_time(admission.deadline + timedelta(microseconds=1))
    stage.clock.ahead += LONG  # the conductor has not looked yet: the assignment is open
    with pytest.raises(Refusal, match=r"^deadline"):
        intake.record(admission, None)


def test_a_reply_of_a_client_that_was_absent_too_long_is_not_called_late(stage: Stage) -> None:
    _, (ann,) = stage.begin("ann", algorithm="fedavg")
    intake, (admission,) = admitted(stage, ann, ann.order(), 0)
    with stage.served.database.begin() as session:
        assignment = session.get_one(Assignment, admission.manifest.assignment_id)
        end_assignment(assignment, AssignmentState.EXPIRED, stage.clock(), "absent")
    with pytest.raises(Refusal, match=r"^assignment-closed: .* is EXPIRED: absent"):
        intake.record(admission, None)


def test_the_conductor_is_told_of_declines_once(stage: Stage) -> None:
    run, (ann, _) = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    order = ann.order()
    told: list[str] = []
    for _ in range(2):
        intake_of(stage, told.append).decline("ann", ann.member.declined(order.assignment_id, "busy"))
    assert told == [run]


@pytest.mark.parametrize(("size", "reason"), [(64 * 1024, "manifest"), (64 * 1024 + 1, "limit:manifest")])
def test_an_envelope_has_at_most_64_kibibytes(stage: Stage, size: int, reason: str) -> None:
    envelope = SignedEnvelope(manifest=b"\xff" * (size - 4))
    assert envelope.ByteSize() == size
    with pytest.raises(Refusal, match=f"^{reason}"):
        intake_of(stage).admit("ann", envelope)
