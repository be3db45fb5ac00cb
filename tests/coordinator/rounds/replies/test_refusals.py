"""What a coordinator must refuse of a member: each with its status and reason, and nothing else harmed.

Of two different replies that a client signs to one assignment, it keeps both envelopes, with an audit entry. Forged
updates and hostile payloads are in `coordinator/services/test_abuse.py`.
"""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.intake import Admission, Intake, named_assignment
from coordinator.rounds.transitions import end_assignment
from federation.digests import digest
from federation.process.assignment_log import AssignmentFilter
from federation.refusals import Refusal
from federation.trust.envelope import envelope_digest, sign
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest, DeclineManifest, ReplyManifest, SignedEnvelope
from federation.v1.federation_pb2 import AttendRequest, Heartbeat, Hello, SubmitRequest
from federation.vectors import Layout, Tensor, to_bytes
from storage.models import Assignment, AuditEntry, Client, Reply
from storage.states import AssignmentState
from tests.coordinator.rounds.replies.scene import Scene, set_scene
from tests.few import few
from tests.running import SECONDS, refused, wait_for
from tests.stage import LAYOUT, LONG, Player, Stage

LARGE = Layout((Tensor("weight", (3000, 100)),))  # 1.2 MB: more than one chunk
MODEL = to_bytes(LARGE, np.zeros(LARGE.size, np.float32))


@pytest.fixture
def scene(stage: Stage) -> Iterator[Scene]:
    """A round; afterwards an honest reply of mallory's counts, unless its assignment has ended."""
    made = set_scene(stage, model=MODEL)
    yield made
    made.finish()


def test_a_client_cannot_fulfil_the_assignment_of_another(scene: Scene) -> None:
    payload = scene.payload()
    for envelope in (scene.honest.member.sign(scene.manifest(payload)), scene.sign()):
        with refused("PERMISSION_DENIED", "assignment-client"):
            scene.honest.member.submit(envelope, payload)


def test_the_same_update_again_gets_the_same_receipt_and_counts_once(scene: Scene) -> None:
    envelope = scene.sign()
    first = scene.hand_in(envelope)
    assert first.accepted
    assert scene.hand_in(envelope) == first
    assert scene.mallory.member.submit(envelope) == first  # without the payload: the receipt is what is asked for
    assert set(scene.stage.replies(scene.run)) == {"mallory", "honest"}


def test_an_update_after_the_deadline_is_refused(scene: Scene) -> None:
    scene.stage.pass_deadline()
    scene.stage.wait_outcome(scene.run, "mallory", "EXPIRED")
    assert scene.outcome == ("EXPIRED", "deadline")
    with refused("FAILED_PRECONDITION", "deadline"):
        scene.hand_in(scene.sign())
    assert scene.refusals("deadline")


def test_a_payload_that_is_not_what_was_signed_is_refused_and_may_come_again(scene: Scene) -> None:
    envelope, payload = scene.sign(), scene.payload()
    flipped = payload[:-1] + bytes([payload[-1] ^ 1])
    for sent, reason in (
        (flipped, "payload-digest"),
        (payload[:-4], "payload-length"),
        (b"", "payload-length"),
        (payload + b"more", "payload-length"),
    ):
        with refused("INVALID_ARGUMENT", reason):
            scene.hand_in(envelope, sent)
        assert scene.outcome == ("OPEN", "")


def test_an_oversized_chunk_is_refused(scene: Scene) -> None:
    with refused("RESOURCE_EXHAUSTED", "limit:chunk"):
        scene.mallory.member.submit(scene.sign(), scene.payload(), chunk_bytes=(1 << 20) + 1)
    with pytest.raises(grpc.RpcError) as error:  # beyond what gRPC itself takes in one message
        scene.mallory.member.submit(scene.sign(), bytes(8 << 20), chunk_bytes=8 << 20)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"samples": 0}, "RESOURCE_EXHAUSTED", "limit:samples"),
        ({"samples": 2**64 - 1}, "RESOURCE_EXHAUSTED", "limit:samples"),
        ({"losses": {"loss": math.nan}}, "INVALID_ARGUMENT", "non-finite"),
    ],
)
def test_an_absurd_number_is_refused_for_good(scene: Scene, changes: dict[str, Any], status: str, reason: str) -> None:
    with refused(status, reason):
        scene.mallory.submit(scene.order, **changes)
    assert scene.outcome == ("REFUSED", reason)


def test_a_blob_that_nobody_offered_to_this_client_is_not_given(scene: Scene) -> None:
    model, mallory, stranger = scene.order.base_model, scene.mallory, scene.stage.player("stranger")
    assert digest(mallory.fetch(model)) == model
    assert mallory.fetch(model, len(MODEL) // 2) == MODEL[len(MODEL) // 2 :]
    names = ("blake3:" + "0" * 64, "../../coordinator.db", "", "\0")
    for player, name in ((stranger, model), *((mallory, name) for name in names)):
        with refused("PERMISSION_DENIED", "blob-not-offered"):
            player.fetch(name)
    with refused("OUT_OF_RANGE", "offset"):
        mallory.fetch(model, len(MODEL) + 1)


def test_a_stream_that_does_not_begin_with_hello_is_refused(scene: Scene) -> None:
    for request in (AttendRequest(), AttendRequest(heartbeat=Heartbeat())):
        with refused("INVALID_ARGUMENT", "hello"):
            list(scene.mallory.member.stub.Attend(iter([request]), timeout=SECONDS))


def test_a_submission_that_does_not_begin_with_the_update_is_refused(scene: Scene) -> None:
    for requests in ([SubmitRequest(chunk=b"x")], [SubmitRequest()], []):
        with refused("INVALID_ARGUMENT", "header"):
            next(scene.mallory.member.stub.Submit(iter(requests), timeout=SECONDS))


def ended(player: Player) -> tuple[str, str]:
    """Why a member's stream ends; it attends again."""
    assert player.stream is not None
    end = player.stream.end()
    player.attend(**player.tasks)
    return end.status, end.reason


def test_a_second_stream_of_the_same_client_ends_the_first(scene: Scene) -> None:
    second = scene.mallory.member.attend(**scene.mallory.tasks)
    second.next()
    assert ended(scene.mallory) == ("ABORTED", "superseded")
    second.close()


def set_start(stage: Stage, name: str, start: bytes) -> None:
    with stage.served.database.begin() as session:
        session.get_one(Client, name).start = start.hex()


def test_a_reply_of_an_older_start_is_refused_and_recorded_and_the_newer_one_hands_in_its_own(scene: Scene) -> None:
    older, newer, envelope = b"a" * 16, b"b" * 16, scene.sign()
    set_start(scene.stage, "mallory", newer)
    with refused("FAILED_PRECONDITION", "start-ended"):
        list(scene.mallory.member.stub.Submit(iter([SubmitRequest(reply=envelope, start=older)]), timeout=SECONDS))
    assert scene.refusals("start-ended") == 1
    assert scene.outcome == ("OPEN", "")
    set_start(scene.stage, "honest", newer)  # of another member: no matter
    assert scene.hand_in(envelope).accepted  # of a worker that tells no start, as of version 0.1.0
    set_start(scene.stage, "mallory", b"")


def test_declining_closes_the_assignment_and_only_ones_own(stage: Stage) -> None:
    run, (mallory, honest) = stage.begin("mallory", "honest", more="selection.minimum = 2")
    order, theirs = mallory.order(), honest.order()
    mallory.decline(order, "no-data")
    stage.wait_outcome(run, "mallory", "DECLINED")
    mallory.decline(theirs, "not-mine")
    assert ended(mallory) == ("PERMISSION_DENIED", "assignment-client")
    assert stage.outcomes(run) == {"mallory": ("DECLINED", "no-data"), "honest": ("OPEN", "")}


def test_a_message_of_a_kind_that_only_a_newer_worker_knows_is_ignored_and_a_second_hello_ends_the_stream(
    stage: Stage,
) -> None:
    run, (mallory, honest) = stage.begin("mallory", "honest", more="selection.minimum = 2")
    assert mallory.stream is not None
    mallory.stream.say(AttendRequest.FromString(b"\x9a\x06\x01x"))  # field 99
    mallory.decline(mallory.order(), "no-data")
    stage.wait_outcome(run, "mallory", "DECLINED")
    mallory.stream.say(AttendRequest(hello=Hello()))
    assert ended(mallory) == ("INVALID_ARGUMENT", "hello")
    honest.order()


@few("key-unknown", "mismatch:assignment")
@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, "UNAUTHENTICATED", "key-unknown"),
        ({"client_id": "bob"}, "INVALID_ARGUMENT", "mismatch:client_id"),
        ({"federation_id": "other"}, "INVALID_ARGUMENT", "mismatch:federation_id"),
        ({"assignment": "blake3:" + "0" * 64}, "INVALID_ARGUMENT", "mismatch:assignment"),
    ],
)
def test_a_decline_that_its_client_has_not_signed_for_this_assignment_closes_nothing(
    scene: Scene, changes: dict[str, str], status: str, reason: str
) -> None:
    said = scene.mallory.member.declined(scene.order.assignment_id, "no-data", **changes)
    if not changes:
        said = sign(DeclineManifest.FromString(said.manifest), Ed25519PrivateKey.generate())
    scene.mallory.say(decline=said)
    assert ended(scene.mallory) == (status, reason)
    assert scene.outcome == ("OPEN", "")


def test_no_refusal_was_an_internal_error(stage: Stage) -> None:
    assert stage.served.entries(AuditEntry.outcome == "internal") == []


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
    for envelope in (forged, ann.member.sign(elsewhere)):
        with refused("ALREADY_EXISTS", "assignment-fulfilled"):
            ann.member.submit(envelope, payload)
    assert not entries(stage, order.assignment_id)
    (own,) = recorded(stage, order)
    again = ann.member.submit(SignedEnvelope.FromString(own.envelope), payload)
    assert again.accepted  # the very same one gets its receipt again


# --- replies that are admitted at the same time; the intake is called without gRPC


def test_a_reply_whose_upload_a_newer_start_overtakes_does_not_count(stage: Stage) -> None:
    _, order, intake, (first,) = admitted(stage, 0)
    set_start(stage, "ann", b"b" * 16)
    with pytest.raises(Refusal, match="start-ended"):
        intake.record(replace(first, start=b"a" * 16), None)
    assert intake.record(replace(first, start=b"b" * 16), None)
    assert order.assignment_id == first.manifest.assignment_id
    set_start(stage, "ann", b"")


def intake_of(stage: Stage, changed: Callable[[str], None] = lambda _: None) -> Intake:
    database, signing = stage.served.database, stage.served.home.signing
    told: dict[str, Any] = {"changed": changed, "replied": changed, "answered": lambda *_: None}
    return Intake(database, signing, clock=stage.clock, signatures=SignatureMemory(), **told)


def admitted(stage: Stage, *seeds: int) -> tuple[str, AssignmentManifest, Intake, list[Admission]]:
    """A run that has asked ann, and an intake that has admitted a reply of hers for each seed."""
    run, (ann,) = stage.begin("ann", algorithm="fedavg")
    order, intake, found = ann.order(), intake_of(stage), []
    for seed in seeds:
        envelope, payload = ann.member.signed(order, seed)
        stage.blobs.put(payload)
        admission = intake.admit("ann", envelope)
        assert isinstance(admission, Admission)
        found.append(admission)
    return run, order, intake, found


def test_of_two_replies_that_were_admitted_the_first_counts_and_the_second_is_evidence(stage: Stage) -> None:
    _, order, intake, (first, again, second) = admitted(stage, 0, 0, 1)
    receipt = intake.record(first, None)
    assert intake.record(again, None) == receipt
    with pytest.raises(Refusal, match="assignment-fulfilled"):
        intake.record(second, None)
    (entry,) = entries(stage, order.assignment_id)
    assert second.digest in entry.detail


def test_replies_that_are_recorded_in_one_transaction_have_each_their_own_end(stage: Stage) -> None:
    """Of ann's three replies one counts, one is the same, and one is evidence; ben's is refused for its content."""
    if stage.served.database.engine.dialect.name != "sqlite":
        pytest.skip("only SQLite has one writer, whom all replies wait for")
    _, (ann, ben) = stage.begin("ann", "ben", algorithm="fedavg")
    orders = {player: player.order() for player in (ann, ben)}
    intake, given, ends = intake_of(stage), list[tuple[Admission, Refusal | None]](), dict[int, object]()
    for player, seed, problem in (
        (ann, 0, None),
        (ann, 0, None),
        (ann, 1, None),
        (ben, 0, Refusal("statement", "bad")),
    ):
        envelope, payload = player.member.signed(orders[player], seed)
        stage.blobs.put(payload)
        admission = intake.admit(player.name, envelope)
        assert isinstance(admission, Admission)
        given.append((admission, problem))

    def record(place: int) -> None:
        try:
            ends[place] = intake.record(*given[place])
        except Refusal as refusal:
            ends[place] = refusal.reason

    threads = [threading.Thread(target=record, args=(place,)) for place in range(len(given))]
    with stage.served.database.begin():  # no other may write
        for place, thread in enumerate(threads):
            thread.start()
            wait_for(partial(waiting, intake, place + 1), "the reply to wait")
    for thread in threads:
        thread.join()
    assert ends == {0: ends[0], 1: ends[0], 2: "assignment-fulfilled", 3: "statement"}
    assert isinstance(ends[0], SignedEnvelope)
    kept = {(row.accepted, row.reason) for row in recorded(stage, orders[ann])}
    assert kept == {(True, ""), (False, "assignment-fulfilled")}
    assert [(row.accepted, row.reason) for row in recorded(stage, orders[ben])] == [(False, "statement")]


def waiting(intake: Intake, number: int) -> bool:
    """Whether so many replies wait to be recorded."""
    return len(intake._group._waiting) == number


def test_a_reply_that_was_admitted_before_its_run_was_stopped_is_refused_and_no_evidence(stage: Stage) -> None:
    run, order, intake, (admission,) = admitted(stage, 0)
    stage.stop_run(run)
    with pytest.raises(Refusal, match="assignment-closed"):
        intake.record(admission, None)
    assert recorded(stage, order) == []


def test_a_reply_that_was_admitted_before_the_deadline_comes_too_late_after_it(stage: Stage) -> None:
    _, _, intake, (admission,) = admitted(stage, 0)
    admission.check_in_time(admission.deadline)
    with pytest.raises(Refusal, match=r"^deadline"):
        admission.check_in_time(admission.deadline + timedelta(microseconds=1))
    stage.clock.ahead += LONG  # the conductor has not looked yet: the assignment is open
    with pytest.raises(Refusal, match=r"^deadline"):
        intake.record(admission, None)


def test_a_reply_of_a_client_that_was_absent_too_long_is_not_called_late(stage: Stage) -> None:
    _, _, intake, (admission,) = admitted(stage, 0)
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


@pytest.mark.parametrize("says", ["reply", "decline"])
def test_the_line_of_a_failure_that_nobody_foresaw_has_the_id_of_the_assignment(
    stage: Stage, caplog: pytest.LogCaptureFixture, says: str
) -> None:
    _, (player,) = stage.begin("ann", more="selection.minimum = 1")
    order = player.order()
    with stage.served.database.begin() as session:
        session.get_one(Assignment, order.assignment_id).envelope = b"\xff"  # the row is damaged

    def ids() -> list[str]:
        words = "Submit by" if says == "reply" else "the stream of ann failed"
        return [vars(record)["assignment_id"] for record in caplog.records if words in record.message]

    with caplog.filtering(AssignmentFilter()):
        if says == "reply":
            with pytest.raises(grpc.RpcError, match="INTERNAL"):
                player.submit(order)
        else:
            player.decline(order, "no-data")
        assert wait_for(ids, "the line") == [order.assignment_id]


def test_only_an_id_that_could_be_one_stands_in_lines_of_the_log() -> None:
    envelope = SignedEnvelope(manifest=ReplyManifest(assignment_id="x\n" * 16).SerializeToString())
    assert named_assignment(envelope, ReplyManifest) == ""
    assert named_assignment(SignedEnvelope(manifest=b"\xff"), ReplyManifest) == ""
