"""Attacks of a member with a valid certificate and its own keys: the exact answer, the record, and the others' round.

docs/reference/security.md says which test mounts which attack; here are those that have no file of their own.
"""

import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.refusals import Refusal
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.certificates import pem
from federation.trust.envelope import CONTEXTS, envelope_digest, key_id, sign, verify
from federation.trust.keys import load_tls_key, private_key_pem
from federation.v1.common_pb2 import ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.v1.federation_pb2 import FetchBlobRequest, SubmitRequest
from federation.v1.federation_pb2_grpc import FederationStub
from federation.vectors import to_bytes, update_layout
from storage.models import AuditEntry, Reply
from storage.states import RunState
from tests.coordinator.rounds.replies.scene import Scene, set_scene
from tests.federation.transport.slow_line import slow_line
from tests.few import few_of
from tests.harness import Handing, Member
from tests.running import SECONDS, refused, wait_for
from tests.stage import LAYOUT, Stage, answer, reply, spec, vector
from tests.storage.scene import blob_file

ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group of Ed25519 (RFC 8032, 5.1)


@pytest.fixture
def scene(stage: Stage) -> Scene:
    return set_scene(stage)


def altered(scene: Scene, **fields: bytes) -> SignedEnvelope:
    """An honest update with other bytes in some fields of its envelope."""
    envelope = scene.sign()
    for name, value in fields.items():
        setattr(envelope, name, value)
    return envelope


def resigned(scene: Scene, context: bytes) -> SignedEnvelope:
    """An honest update under a signature that mallory's key made in another context."""
    return altered(scene, signature=scene.mallory.member.files.signing_key.sign(context + scene.sign().manifest))


def malleable(scene: Scene) -> SignedEnvelope:
    """The same signature with S + L in place of S, which a careless verifier takes for another signature."""
    signature = scene.sign().signature
    s = int.from_bytes(signature[32:], "little") + ORDER
    return altered(scene, signature=signature[:32] + s.to_bytes(32, "little"))


def reordered(scene: Scene) -> SignedEnvelope:
    """The same fields with the same values, in another order: bytes that nobody signed."""
    envelope = scene.sign()
    whole, others = (ReplyManifest.FromString(envelope.manifest) for _ in range(2))
    others.ClearField("federation_id")
    manifest = others.SerializeToString() + ReplyManifest(federation_id=whole.federation_id).SerializeToString()
    assert ReplyManifest.FromString(manifest) == whole
    assert manifest != envelope.manifest
    return altered(scene, manifest=manifest)


def with_unknown_field(scene: Scene) -> SignedEnvelope:
    return altered(scene, manifest=scene.sign().manifest + b"\xa2\x06\x01x")


def after_signing(scene: Scene) -> SignedEnvelope:
    return altered(scene, manifest=scene.manifest(scene.payload(), samples=11).SerializeToString())


def with_many_metrics(scene: Scene) -> SignedEnvelope:
    manifest = scene.manifest(scene.payload())
    manifest.metrics.update({f"metric-{number:020}": 1.0 for number in range(5000)})
    return scene.mallory.member.sign(manifest)


def with_row(scene: Scene, **changes: object) -> SignedEnvelope:
    """With a row that the assignment does not ask for."""
    manifest = scene.manifest(scene.payload())
    for name, value in changes.items():
        setattr(manifest.rows[0], name, value)
    return scene.mallory.member.sign(manifest)


def others_key(scene: Scene) -> SignedEnvelope:
    """Signed with the honest member's key, as if that had leaked."""
    return sign(scene.manifest(scene.payload()), scene.honest.member.files.signing_key)


def others_signature(scene: Scene) -> SignedEnvelope:
    return altered(scene, signature=others_key(scene).signature)


def nobodys_key(scene: Scene) -> SignedEnvelope:
    return sign(scene.manifest(scene.payload()), Ed25519PrivateKey.generate())


def coordinators_key(scene: Scene) -> SignedEnvelope:
    return altered(scene, key_id=key_id(scene.stage.served.home.signing_key.public_key()))


def of_another(scene: Scene) -> SignedEnvelope:
    return scene.sign(assignment_id=scene.theirs.assignment_id)


FORGED: dict[str, tuple[Callable[[Scene], SignedEnvelope], str, str]] = {
    "signed as a receipt": (lambda s: resigned(s, CONTEXTS[ReceiptManifest] + b"\0"), "UNAUTHENTICATED", "signature"),
    "signed without a context": (lambda s: resigned(s, b""), "UNAUTHENTICATED", "signature"),
    "S + L": (malleable, "UNAUTHENTICATED", "signature"),
    "samples changed after signing": (after_signing, "UNAUTHENTICATED", "signature"),
    "the signature of another member": (others_signature, "UNAUTHENTICATED", "signature"),
    "fields in another order": (reordered, "UNAUTHENTICATED", "signature"),
    "an unknown field that nobody signed": (with_unknown_field, "UNAUTHENTICATED", "signature"),
    "no key id": (lambda s: altered(s, key_id=b""), "UNAUTHENTICATED", "key-unknown"),
    "the coordinator's key id": (coordinators_key, "UNAUTHENTICATED", "key-unknown"),
    "another member's key": (others_key, "UNAUTHENTICATED", "key-unknown"),
    "a key of nobody's": (nobodys_key, "UNAUTHENTICATED", "key-unknown"),
    "bytes that are no message": (lambda s: SignedEnvelope(manifest=b"\xff\xff\xff"), "INVALID_ARGUMENT", "manifest"),
    "the coordinator's own assignment": (lambda s: s.signed, "INVALID_ARGUMENT", "manifest"),
    "the assignment of another member": (of_another, "PERMISSION_DENIED", "assignment-client"),
    "in the name of another member": (lambda s: s.sign(client_id="honest"), "INVALID_ARGUMENT", "mismatch:client_id"),
    "of the next round": (lambda s: s.sign(round=s.order.round + 1), "INVALID_ARGUMENT", "mismatch:round"),
    "of another run": (lambda s: s.sign(run_id="0" * 32), "INVALID_ARGUMENT", "mismatch:run_id"),
    "of another federation": (lambda s: s.sign(federation_id="north"), "INVALID_ARGUMENT", "mismatch:federation_id"),
    "from another model": (lambda s: s.sign(base_model=digest(b"")), "INVALID_ARGUMENT", "mismatch:base_model"),
    "a longer row": (lambda s: with_row(s, length=s.order.rows[0].length + 1), "INVALID_ARGUMENT", "mismatch:rows"),
    "a row of another name": (lambda s: with_row(s, name="another"), "INVALID_ARGUMENT", "mismatch:rows"),
    "a row of another type": (lambda s: with_row(s, dtype="F16"), "INVALID_ARGUMENT", "mismatch:rows"),
    "without its payload": (lambda s: s.sign(payload="", payload_bytes=0), "INVALID_ARGUMENT", "mismatch:payload"),
    "larger than its model": (lambda s: s.sign(payload_bytes=1 << 40), "RESOURCE_EXHAUSTED", "limit:payload"),
    "with 5000 metrics": (with_many_metrics, "RESOURCE_EXHAUSTED", "limit:manifest"),
    **{
        f"of the assignment {name[:12]!r}": (partial(Scene.sign, assignment_id=name), "NOT_FOUND", "assignment-unknown")
        for name in ("0" * 32, "", "\0", "x" * 5000, "' or 1=1 --")
    },
}
FEW = ("S + L", "samples changed after signing", "the assignment of another member", "larger than its model")


@pytest.mark.parametrize("attack", few_of(FORGED, *FEW))
def test_a_forged_update_is_refused_and_recorded_and_the_honest_round_goes_on(scene: Scene, attack: str) -> None:
    forge, status, reason = FORGED[attack]
    before = scene.refusals(reason)
    with refused(status, reason):  # before a byte of the payload
        scene.offer(forge(scene))
    assert scene.refusals(reason) == before + 1
    assert scene.outcome[0] == "OPEN"
    scene.finish()


def finite(value: float) -> Callable[[Scene], bytes]:
    def made(scene: Scene) -> bytes:
        update = np.ones(LAYOUT.size, np.float32)
        update[3] = value
        return scene.payload(update)

    return made


def raw(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(40)


def named(name: str, less: int = 0) -> Callable[[Scene], bytes]:
    """A payload of one row of ones, with this name, and shorter than what was asked for."""
    size = LAYOUT.size - less
    return lambda scene: to_bytes(update_layout([(name, size)]), np.ones(size, np.float32))


OVERLAPPING = (
    b'{"loss":{"dtype":"F32","shape":[45],"data_offsets":[0,180]},'
    b'"more":{"dtype":"F32","shape":[1],"data_offsets":[176,180]}}'
)
NEGATIVE = b'{"loss":{"dtype":"F32","shape":[45],"data_offsets":[-180,0]}}'
ENDLESS = struct.pack("<Q", 2**62) + bytes(200)
HOSTILE: dict[str, tuple[Callable[[Scene], bytes], str, str]] = {
    "NaN": (finite(np.nan), "INVALID_ARGUMENT", "non-finite"),
    "an infinity": (finite(-np.inf), "INVALID_ARGUMENT", "non-finite"),
    "nothing but zeros": (lambda s: s.payload(np.zeros(LAYOUT.size, np.float32)), "INVALID_ARGUMENT", "zero"),
    "a pickle": (lambda s: b"\x80\x04\x95" + bytes(200), "RESOURCE_EXHAUSTED", "limit:header"),
    "an endless header": (lambda s: ENDLESS, "RESOURCE_EXHAUSTED", "limit:header"),
    "an empty header": (lambda s: bytes(200), "INVALID_ARGUMENT", "layout"),
    "a row of another name": (named("other"), "INVALID_ARGUMENT", "layout"),
    "a row of another length": (named("loss", 1), "INVALID_ARGUMENT", "layout"),
    "tensors that overlap": (lambda s: raw(OVERLAPPING), "INVALID_ARGUMENT", "layout"),
    "a negative offset": (lambda s: raw(NEGATIVE), "INVALID_ARGUMENT", "layout"),
    "another type": (lambda s: s.payload().replace(b'"F32"', b'"F64"'), "INVALID_ARGUMENT", "dtype"),
}


@pytest.mark.parametrize("attack", few_of(HOSTILE, "NaN", "an endless header", "tensors that overlap"))
def test_a_hostile_payload_is_refused_for_good_and_recorded_and_the_honest_round_goes_on(
    scene: Scene, attack: str
) -> None:
    make, status, reason = HOSTILE[attack]
    payload = make(scene)
    envelope = scene.mallory.member.sign(scene.manifest(payload))
    for _ in range(2):  # the same again gets the same answer
        with refused(status, reason):
            scene.hand_in(envelope, payload)
    assert scene.refusals(reason)
    served = scene.stage.served
    (kept,) = scene.stage.look(lambda s: s.query(Reply).filter_by(assignment_id=scene.order.assignment_id).all())
    assert (kept.accepted, kept.payload, kept.reason) == (False, "", reason)
    assert not blob_file(scene.stage.blobs, digest(payload)).exists()
    (entry,) = served.entries(AuditEntry.outcome != "", subject=scene.order.assignment_id)
    assert (entry.actor, entry.action, entry.outcome) == (scene.actor, "reply.refused", reason)
    assert entry.digest == envelope_digest(envelope)
    assert scene.outcome == ("REFUSED", reason)
    scene.finish()
    assert scene.stage.replies(scene.run)[scene.honest.name].weight == 1.0
    assert scene.mallory.name not in scene.stage.replies(scene.run)


def test_no_byte_of_an_envelope_can_be_flipped(scene: Scene) -> None:
    envelope, key = scene.sign(), scene.mallory.member.files.signing_key.public_key()
    assert verify(envelope, ReplyManifest, key)
    for name in ("manifest", "key_id", "signature"):
        data = getattr(envelope, name)
        for at in range(len(data)):
            damaged = SignedEnvelope()
            damaged.CopyFrom(envelope)
            setattr(damaged, name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(Refusal) as caught:
                verify(damaged, ReplyManifest, key)
            assert caught.value.reason == ("key-unknown" if name == "key_id" else "signature")
    scene.finish()


def test_the_reply_of_an_earlier_run_counts_in_no_later_one(scene: Scene) -> None:
    envelope = scene.sign()
    first = scene.hand_in(envelope)
    scene.finish()
    later = set_scene(scene.stage)
    assert scene.hand_in(envelope) == first  # its own receipt again
    assert later.stage.outcomes(later.run)["mallory"][0] == "OPEN"
    moved = later.sign(run_id=scene.run)
    with refused("INVALID_ARGUMENT", "mismatch:run_id"):
        later.hand_in(moved)
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        later.stage.stop_run(later.run)
        later.hand_in(later.sign())
    assert later.refusals("assignment-closed")
    assert set(scene.stage.replies(scene.run)) == {"honest", "mallory"}


def test_a_bit_that_is_flipped_on_the_line_ends_the_connection_and_harms_nothing(scene: Scene) -> None:
    served = scene.stage.served
    request = FetchBlobRequest(digest=scene.order.base_model)
    with slow_line(served.coordinator.federation_port) as line:
        member = Member(replace(scene.mallory.member.files, addresses=(f"localhost:{line.port}",)))
        with member.channel:
            assert next(member.stub.FetchBlob(request, timeout=SECONDS)).chunk  # the line as such works
            line.damage = line.up.carried + 200
            with pytest.raises(grpc.RpcError) as caught:
                member.submit(scene.sign(), scene.payload())
            # If the coordinator notices first, it answers that the upload has ended before its header.
            assert refusal_from_rpc_error(caught.value).reason in ("unreachable", "header")
            assert scene.outcome[0] == "OPEN"

            def again() -> bool:
                with suppress(grpc.RpcError):
                    return member.submit(scene.sign(), scene.payload()).accepted
                return False

            wait_for(again, "the reply to be taken over a new connection")
    scene.finish()


def test_an_upload_that_a_member_breaks_off_is_in_nobodys_way(scene: Scene) -> None:
    stage = scene.stage
    half = [SubmitRequest(reply=scene.sign()), SubmitRequest(chunk=scene.payload()[:40])]
    call = Handing(scene.mallory.member.stub, half, goes_on=True)
    # Not before its first bytes have arrived: an upload without any is not kept.
    wait_for(lambda: [upload.size for upload in stage.blobs.partial_uploads()] == [40], "the upload to begin")
    call.call.cancel()
    run, others = stage.begin("ann", "ben", more="selection.minimum = 2")
    stage.play(run, *others)  # their updates, and their evaluations, which have no payload
    stage.wait_state(run, RunState.COMPLETED)
    assert stage.evaluations(run)
    assert [upload.size for upload in stage.blobs.partial_uploads()] == [40]
    scene.finish()


@pytest.mark.full
def test_rounds_of_others_go_on_while_a_member_mounts_every_attack_again_and_again(scene: Scene) -> None:
    stage, over = scene.stage, threading.Event()
    answers: Counter[str] = Counter()
    before = {reason: scene.refusals(reason) for _, _, reason in FORGED.values()}

    def storm() -> None:
        while not over.is_set():
            for forge, _, _ in FORGED.values():
                try:
                    scene.offer(forge(scene))
                except grpc.RpcError as error:
                    answers[refusal_from_rpc_error(error).reason] += 1

    task, others = stage.crew("ann", "ben")
    with ThreadPoolExecutor(1) as pool:
        storming = pool.submit(storm)
        try:
            run = stage.submit(spec(f"meanwhile-{stage.count}", task, rounds=5, more="selection.minimum = 2"))
            stage.complete(run, *others)
            wait_for(lambda: answers.total() >= 3 * len(FORGED), "attacks")
        finally:
            over.set()
        storming.result(SECONDS)
    for number in range(5):
        assert set(stage.replies(run, number)) == {"ann", "ben"}
    assert answers.keys() <= before.keys() | {"limit:rate"}
    assert all(scene.refusals(reason) - count == answers[reason] for reason, count in before.items())
    scene.finish()


def test_very_much_metadata_is_refused_and_the_honest_round_goes_on(scene: Scene) -> None:
    stub = scene.mallory.member.stub
    many = tuple((f"name-{number}", "x" * 100) for number in range(10_000))
    with pytest.raises(grpc.RpcError, check=lambda error: error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED):
        next(stub.FetchBlob(FetchBlobRequest(digest=scene.order.base_model), metadata=many, timeout=SECONDS))
    assert next(stub.FetchBlob(FetchBlobRequest(digest=scene.order.base_model), timeout=SECONDS)).chunk
    scene.finish()


# --- certificates in the wrong place


def test_a_member_cannot_pose_as_the_coordinator_with_its_own_certificate(scene: Scene, tmp_path: Path) -> None:
    files = scene.mallory.member.files
    chain, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    chain.write_bytes(files.certificate)
    key.write_bytes(private_key_pem(files.tls_key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(SECONDS)
        heard: list[bytes] = []

        def pose() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                heard.append(secured.recv(1))

        posing = pool.submit(pose)
        address = f"localhost:{listener.getsockname()[1]}"
        files = replace(scene.honest.member.files, addresses=(address,))
        with files.channel() as channel, refused("UNAVAILABLE", "unreachable") as messages:
            next(FederationStub(channel).FetchBlob(FetchBlobRequest(), timeout=SECONDS))
        assert "did not prove that it is this federation's coordinator" in messages[0]
        posing.result(SECONDS)
    assert not any(heard)  # not a byte of the call
    scene.finish()


def test_the_coordinators_certificate_opens_no_door(scene: Scene) -> None:
    home = scene.stage.served.home
    key, certificate = load_tls_key(home.directory / "server.key"), pem(home.server)
    files = replace(scene.mallory.member.files, tls_key=key, certificate=certificate)
    with files.channel() as channel, refused("UNAVAILABLE", "unreachable"):
        next(FederationStub(channel).FetchBlob(FetchBlobRequest(), timeout=SECONDS))
    scene.finish()


# --- attacks on the rule


def model_of(stage: Stage, algorithm: str, *, scale: float = 1.0, loss: float = 2.0) -> str:
    """The model after one round in which mallory scales its update and its loss."""
    more = "selection.minimum = 3"
    run, (mallory, *others) = stage.begin("mallory", "honest", "third", algorithm=algorithm, more=more)
    answer(*others)
    order = mallory.order()
    mallory.reply(order, vector("mallory", order) * np.float32(scale), losses={"loss": loss})
    stage.play(run, mallory, *others)
    told = stage.replies(run)["mallory"]
    assert told.norm == pytest.approx(scale * np.linalg.norm(vector("mallory", order).astype(np.float64)), rel=1e-6)
    return stage.wait_state(run, RunState.COMPLETED).model


def test_a_scaled_update_moves_nothing_under_fedmgda_plus_and_its_norm_is_on_record(stage: Stage) -> None:
    honest = model_of(stage, "fedmgda+")
    for scale in (2.0**20, 2.0**36):
        assert model_of(stage, "fedmgda+", scale=scale) == honest
    assert model_of(stage, "fedavg", scale=2.0**20) != model_of(stage, "fedavg")


@pytest.mark.full
def test_an_inflated_loss_moves_nothing_under_fedmgda_plus(stage: Stage) -> None:
    assert model_of(stage, "fedmgda+", loss=1e6) == model_of(stage, "fedmgda+")
    assert model_of(stage, "q-fedavg", loss=1e6) != model_of(stage, "q-fedavg")


@pytest.mark.parametrize(("algorithm", "moves"), [("fedmgda", False), ("fedmgda+", True)])
def test_a_member_that_opposes_the_others_stops_a_rule_without_a_box_and_is_seen(
    stage: Stage, algorithm: str, moves: bool
) -> None:
    more = "selection.minimum = 3" + ("\nalgorithm.epsilon = 0.05" if moves else "")
    run, (mallory, *others) = stage.begin("mallory", "honest", "third", algorithm=algorithm, more=more)
    orders = {player: player.order() for player in others}
    reply(orders)
    order = mallory.order()
    mallory.reply(order, -np.mean([vector(player.name, orders[player]) for player in others], axis=0))
    stage.play(run, mallory, *others)
    metrics: Mapping[str, float] = stage.rounds(run)[0].metrics
    assert metrics["stationary"] == (not moves)
    assert (stage.wait_state(run, RunState.COMPLETED).model != order.base_model) == moves
    if moves:
        return
    assert stage.rounds(run)[0].reason == "stationary"
    assert stage.replies(run)["mallory"].weight == pytest.approx(0.5, abs=1e-3)
