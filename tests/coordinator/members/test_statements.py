"""What the coordinator signs for its workers besides work: the time, revocations."""

from datetime import UTC, datetime, timedelta
from typing import TypeVar

import grpc
import pytest

from federation.line.channels import refusal_from_rpc_error, signed_detail
from federation.trust.envelope import verify
from federation.trust.identity import parse_peer
from federation.v1.common_pb2 import ReceiptManifest, RevocationManifest, SignedEnvelope, TimeManifest
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, FetchBlobRequest, Hello
from tests.coordinator.members.scene import attends, renewed
from tests.harness import Member
from tests.running import SECONDS, refused
from tests.stage import Stage

T = TypeVar("T", ReceiptManifest, RevocationManifest, TimeManifest)


def opened(envelope: SignedEnvelope | None, kind: type[T], member: Member) -> T:
    assert envelope is not None
    return verify(envelope, kind, member.files.coordinator.chain.present)


def welcomed(member: Member, nonce: bytes) -> AttendResponse:
    hello = AttendRequest(hello=Hello(software="test", nonce=nonce))
    call = member.stub.Attend(iter([hello]), timeout=SECONDS)
    response = next(call)
    call.cancel()
    assert isinstance(response, AttendResponse)
    return response


def test_the_welcome_carries_the_time_signed_for_this_client_and_its_nonce(stage: Stage) -> None:
    member = stage.player("timed").member
    welcome = welcomed(member, b"0123456789abcdef").welcome
    time = opened(welcome.time, TimeManifest, member)
    assert (time.federation_id, time.client_id, time.nonce) == ("test", "timed", b"0123456789abcdef")
    assert abs(time.now.ToDatetime(tzinfo=UTC) - datetime.now(UTC)).total_seconds() < SECONDS
    assert not welcome.HasField("restored")


def test_a_nonce_is_no_place_for_luggage(stage: Stage) -> None:
    with refused("INVALID_ARGUMENT", "hello"):
        welcomed(stage.player("timed").member, bytes(65))


def test_a_revoked_client_gets_the_signed_reason_on_its_stream_and_on_every_later_call(stage: Stage) -> None:
    player = stage.player("revoked")
    player.attend()
    assert player.stream is not None
    stage.revoke("revoked", "left the consortium")
    with pytest.raises(grpc.RpcError) as caught:
        list(player.member.stub.FetchBlob(FetchBlobRequest(digest="blake3:" + "0" * 64), timeout=SECONDS))
    for error in (player.stream.next(), caught.value):
        assert isinstance(error, grpc.RpcError)
        assert refusal_from_rpc_error(error).reason == "certificate-revoked"
        manifest = opened(signed_detail(error), RevocationManifest, player.member)
        assert (manifest.federation_id, manifest.client_id) == ("test", "revoked")
        assert (manifest.serial, manifest.reason) == ("", "left the consortium")
        assert manifest.revoked.ToDatetime(tzinfo=UTC).year == datetime.now(UTC).year


def test_a_certificate_that_was_replaced_is_named_in_the_signed_refusal(stage: Stage) -> None:
    old = stage.player("renewing").member
    stage.clock.ahead += timedelta(seconds=2)  # certificates know whole seconds
    new = renewed(old)
    attends(new.files)
    with pytest.raises(grpc.RpcError) as caught:
        welcomed(old, b"")
    manifest = opened(signed_detail(caught.value), RevocationManifest, old)
    assert manifest.serial == parse_peer(old.files.certificate).serial
    stage.player("renewing").member = new
