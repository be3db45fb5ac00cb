"""What a coordinator must refuse of a member: each with its status and reason, and nothing else harmed.

Forged updates and hostile payloads are in `coordinator/services/test_abuse.py`.
"""

import math
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.trust.envelope import seal
from federation.v1.common_pb2 import DeclineManifest
from federation.v1.federation_pb2 import AttendRequest, FetchBlobRequest, Heartbeat, SubmitRequest
from federation.vectors import Layout, Tensor, to_bytes
from storage.models import AuditEntry
from tests.coordinator.rounds.replies.scene import Scene, set_scene
from tests.harness import Member
from tests.running import SECONDS, refused
from tests.stage import Player, Stage

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
    for envelope in (scene.honest.member.seal(scene.manifest(payload)), scene.seal()):
        with refused("PERMISSION_DENIED", "assignment-client"):
            scene.honest.member.submit(envelope, payload)


def test_the_same_update_again_gets_the_same_receipt_and_counts_once(scene: Scene) -> None:
    envelope = scene.seal()
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
        scene.hand_in(scene.seal())
    assert scene.refusals("deadline")


def test_a_payload_that_is_not_what_was_signed_is_refused_and_may_come_again(scene: Scene) -> None:
    envelope, payload = scene.seal(), scene.payload()
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
        scene.mallory.member.submit(scene.seal(), scene.payload(), chunk_bytes=(1 << 20) + 1)
    with pytest.raises(grpc.RpcError) as error:  # beyond what gRPC itself takes in one message
        scene.mallory.member.submit(scene.seal(), bytes(8 << 20), chunk_bytes=8 << 20)
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


def fetched(member: Member, name: str, offset: int = 0) -> bytes:
    request = FetchBlobRequest(digest=name, offset=offset)
    return b"".join(piece.chunk for piece in member.stub.FetchBlob(request, timeout=SECONDS))


def test_a_blob_that_nobody_offered_to_this_client_is_not_given(scene: Scene) -> None:
    model, member = scene.order.base_model, scene.mallory.member
    assert digest(fetched(member, model)) == model
    assert fetched(member, model, len(MODEL) // 2) == MODEL[len(MODEL) // 2 :]
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        fetched(scene.stage.player("stranger").member, model)
    for name in ("blake3:" + "0" * 64, "../../coordinator.db", "", "\0"):
        with refused("PERMISSION_DENIED", "blob-not-offered"):
            fetched(member, name)
    with refused("OUT_OF_RANGE", "offset"):
        fetched(member, model, len(MODEL) + 1)


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


def test_declining_closes_the_assignment_and_only_ones_own(stage: Stage) -> None:
    run, (mallory, honest) = stage.begin("mallory", "honest", more="selection.minimum = 2")
    order, theirs = mallory.order(), honest.order()
    mallory.decline(order, "no-data")
    stage.wait_outcome(run, "mallory", "DECLINED")
    mallory.decline(theirs, "not-mine")
    assert ended(mallory) == ("PERMISSION_DENIED", "assignment-client")
    assert stage.outcomes(run) == {"mallory": ("DECLINED", "no-data"), "honest": ("OPEN", "")}


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
        said = seal(DeclineManifest.FromString(said.manifest), Ed25519PrivateKey.generate())
    scene.mallory.say(decline=said)
    assert ended(scene.mallory) == (status, reason)
    assert scene.outcome == ("OPEN", "")


def test_no_refusal_was_an_internal_error(stage: Stage) -> None:
    assert stage.served.entries(AuditEntry.outcome == "internal") == []
