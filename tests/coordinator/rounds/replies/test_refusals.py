"""What a coordinator must refuse of an update: each with its status and reason, recorded, and nothing else harmed.

The coordinator is a real process; the clients are played by hand, over real TLS with real keys.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.digests import digest
from federation.trust.envelope import seal
from federation.v1.admin_pb2 import RunHeader, StopRunRequest, SubmitRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import AssignmentManifest, DeclineManifest, ReplyManifest, Row, SignedEnvelope
from federation.v1.federation_pb2 import AttendRequest, FetchBlobRequest, Heartbeat, SubmitRequest
from federation.vectors import Layout, Tensor, to_bytes, update_layout
from tests.few import few_of
from tests.harness import SECONDS, Attending, Federation, federation, refused, wait_for

SPEC = """
task = "digits"
rounds = 1
seed = 7
[train]
deadline_seconds = {deadline}
[evaluate]
splits = ["test"]
deadline_seconds = {deadline}
[selection]
minimum = {minimum}
quorum = 0.0
"""
CHUNK = 512 << 10
D = 300_000  # 1.2 MB: more than one chunk
LAYOUT = Layout((Tensor("weight", (D // 100, 100)),))


class Scene:
    """A coordinator, two clients, and a run that asks them to train."""

    def __init__(self, fed: Federation) -> None:
        self.fed = fed
        self.alice = fed.enroll("alice")
        self.bob = fed.enroll("bob")
        self.model = to_bytes(LAYOUT, np.zeros(D, np.float32))
        self.operator = AdminStub(fed.administrator())
        self.count = 0
        self.streams: list[Attending] = []

    def begin(self, *, minimum: int = 1, deadline: float = 600.0, attend_bob: bool = False) -> "Act":
        """A fresh run whose training assignment alice (and bob) gets."""
        for stream in self.streams:
            stream.close()
        for state, run in self.fed.query("select state, run_id from runs"):
            if state not in ("COMPLETED", "FAILED", "STOPPED"):
                with suppress(grpc.RpcError):  # what the test before left; it may end by itself
                    self.stop(run)
        self.streams = [self.alice.attend(digits=10)]
        if attend_bob:
            self.streams.append(self.bob.attend(digits=10))
        for stream in self.streams:
            stream.next()  # the welcome: it attends now
        self.count += 1
        text = f'name = "run-{self.count}"\n' + SPEC.format(minimum=minimum, deadline=deadline)
        header = RunHeader(spec=text.encode(), model=digest(self.model), model_bytes=len(self.model))
        chunks = [self.model[start : start + CHUNK] for start in range(0, len(self.model), CHUNK)]
        requests = [SubmitRunRequest(header=header), *(SubmitRunRequest(chunk=chunk) for chunk in chunks)]
        run = self.operator.SubmitRun(iter(requests), timeout=SECONDS).run.run_id
        return Act(self, run, [stream.assignment() for stream in self.streams])

    def stop(self, run: str) -> None:
        self.operator.StopRun(StopRunRequest(run=run), timeout=SECONDS)

    def refusals(self, action: str, reason: str) -> int:
        counted = "select coalesce(sum(times), 0) from audit_log where action = :action and outcome = :reason"
        return int(self.fed.query(counted, action=action, reason=reason)[0][0])


class Act:
    """One run under way, seen by alice."""

    def __init__(self, scene: Scene, run: str, envelopes: list[SignedEnvelope]) -> None:
        self.scene = scene
        self.alice = scene.alice
        self.run, self.envelopes = run, envelopes
        self.order = self.alice.open(envelopes[0])

    def state(self, client: str = "alice") -> tuple[str, str]:
        """State and reason of the client's training assignment."""
        asked = (
            "select a.state, a.reason from assignments a join phases p using (phase_id) join rounds r using (round_id) "
            "where r.run_id = :run and a.client_id = :client and p.number = 0"
        )
        ((state, reason),) = self.scene.fed.query(asked, run=self.run, client=client)
        return state, reason

    @cached_property
    def payload(self) -> bytes:
        return self.alice.payload(self.order)

    def manifest(self, payload: bytes | None = None) -> ReplyManifest:
        return self.alice.manifest(self.order, self.payload if payload is None else payload)

    def signed(self, payload: bytes | None = None, **changes: object) -> SignedEnvelope:
        """An update of alice's, signed by her, with some fields changed."""
        manifest = self.manifest(payload)
        for name, value in changes.items():
            setattr(manifest, name, value)
        return self.alice.seal(manifest)

    def finish(self) -> None:
        """The honest reply still counts, and the run completes: nothing was harmed."""
        assert self.alice.answer(self.envelopes[0]).accepted
        assert self.alice.answer(self.scene.streams[0].assignment()).accepted  # the evaluation
        self.scene.fed.wait_completed(self.run)

    def end(self) -> None:
        self.scene.stop(self.run)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("refusals")) as fed:
        fed.serve()
        yield Scene(fed)


@pytest.fixture
def act(scene: Scene) -> Iterator[Act]:
    """A run that asks alice to train; her honest reply after the test counts."""
    made = scene.begin()
    yield made
    made.finish()


ANOTHER_CONTEXT = {
    "federation_id": "another",
    "run_id": "another",
    "round": 1,
    "phase": 1,
    "client_id": "bob",
    "base_model": "blake3:" + "0" * 64,
    "spec": "blake3:" + "0" * 64,
    "task": "another",
}


@pytest.mark.parametrize("field", few_of(ANOTHER_CONTEXT, "federation_id", "phase"))
def test_an_update_that_names_another_context_is_refused_and_an_honest_one_still_counts(
    scene: Scene, act: Act, field: str
) -> None:
    another: dict[str, Any] = {field: ANOTHER_CONTEXT[field]}
    with refused("INVALID_ARGUMENT", f"mismatch:{field}"):
        act.alice.submit(act.signed(**another), act.payload)
    assert act.state() == ("OPEN", "")
    assert scene.refusals("Submit", f"mismatch:{field}") >= 1


def test_rows_that_the_assignment_does_not_ask_for_are_refused(act: Act) -> None:
    for field, value in (("length", act.order.rows[0].length + 1), ("name", "another"), ("dtype", "F16")):
        manifest = act.manifest()
        setattr(manifest.rows[0], field, value)
        with refused("INVALID_ARGUMENT", "mismatch:rows"):
            act.alice.submit(act.alice.seal(manifest), act.payload)


def test_an_update_without_its_payload_is_refused(act: Act) -> None:
    with refused("INVALID_ARGUMENT", "mismatch:payload"):
        act.alice.submit(act.alice.seal(act.manifest(b"")))


def test_a_broken_signature_is_refused(act: Act) -> None:
    envelope = act.signed()
    envelope.signature = bytes([envelope.signature[0] ^ 1]) + envelope.signature[1:]
    with refused("UNAUTHENTICATED", "signature"):
        act.alice.submit(envelope, act.payload)


def test_a_manifest_changed_after_signing_is_refused(act: Act) -> None:
    envelope = act.signed()
    manifest = ReplyManifest.FromString(envelope.manifest)
    manifest.samples += 1
    envelope.manifest = manifest.SerializeToString()
    with refused("UNAUTHENTICATED", "signature"):
        act.alice.submit(envelope, act.payload)


def test_another_clients_key_does_not_sign_for_this_client(scene: Scene, act: Act) -> None:
    manifest = act.manifest()
    with refused("UNAUTHENTICATED", "key-unknown"):
        act.alice.submit(seal(manifest, scene.bob.files.signing_key), act.payload)
    forged = seal(manifest, scene.bob.files.signing_key)
    forged.key_id = act.alice.seal(manifest).key_id
    with refused("UNAUTHENTICATED", "signature"):
        act.alice.submit(forged, act.payload)


def test_a_client_cannot_fulfil_the_assignment_of_another(scene: Scene, act: Act) -> None:
    with refused("PERMISSION_DENIED", "assignment-client"):
        scene.bob.submit(scene.bob.seal(act.manifest()), act.payload)
    with refused("PERMISSION_DENIED", "assignment-client"):
        scene.bob.submit(act.signed(), act.payload)


@pytest.mark.parametrize("assignment_id", few_of(["0" * 32, "", "\0", "x" * 5000, "' or 1=1 --"], "0" * 32, "x" * 5000))
def test_an_unknown_assignment_is_refused(act: Act, assignment_id: str) -> None:
    with refused("NOT_FOUND", "assignment-unknown"):
        act.alice.submit(act.signed(assignment_id=assignment_id), act.payload)


def test_a_signature_made_for_another_type_of_message_is_worth_nothing(act: Act) -> None:
    with refused("INVALID_ARGUMENT", "manifest"):
        act.alice.submit(SignedEnvelope(manifest=b"\xff\xff\xff", key_id=b"", signature=b""))
    # The coordinator's own signed assignment, sent back as an update.
    with pytest.raises(grpc.RpcError):
        act.alice.submit(act.envelopes[0])


def test_the_same_update_again_gets_the_same_receipt_and_counts_once(scene: Scene) -> None:
    act = scene.begin()
    envelope = act.signed()
    first = act.alice.submit(envelope, act.payload)
    assert first.accepted
    assert act.alice.submit(envelope, act.payload) == first
    assert act.alice.submit(envelope) == first  # without the payload: the receipt is what is asked for
    counted = scene.fed.query("select count(*) from replies where assignment_id = :name", name=act.order.assignment_id)
    assert counted[0][0] == 1
    assert act.alice.answer(scene.streams[0].assignment()).accepted
    scene.fed.wait_completed(act.run)


def test_a_different_update_for_a_fulfilled_assignment_is_refused(scene: Scene) -> None:
    act = scene.begin(attend_bob=True, minimum=2)
    assert act.alice.submit(act.signed(), act.payload).accepted
    other = act.alice.payload(act.order, seed=1)
    with refused("ALREADY_EXISTS", "assignment-fulfilled"):
        act.alice.submit(act.signed(other), other)
    assert scene.bob.answer(act.envelopes[1]).accepted
    act.end()


def test_an_update_after_the_deadline_is_refused(scene: Scene) -> None:
    act = scene.begin(deadline=1.0)
    wait_for(lambda: act.state() == ("EXPIRED", "deadline"), "the deadline")
    with refused("FAILED_PRECONDITION", "deadline"):
        act.alice.submit(act.signed(), act.payload)
    assert scene.refusals("Submit", "deadline") >= 1


def test_an_update_for_a_run_that_was_stopped_is_refused(scene: Scene) -> None:
    act = scene.begin()
    act.end()
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        act.alice.submit(act.signed(), act.payload)


def test_a_payload_that_is_not_what_was_signed_is_refused_and_may_come_again(act: Act) -> None:
    flipped = bytearray(act.payload)
    flipped[-1] ^= 1
    with refused("INVALID_ARGUMENT", "payload-digest"):
        act.alice.submit(act.signed(), bytes(flipped))
    assert act.state() == ("OPEN", "")


def test_a_truncated_payload_is_refused_and_may_come_again(act: Act) -> None:
    with refused("INVALID_ARGUMENT", "payload-length"):
        act.alice.submit(act.signed(), act.payload[:-4])
    with refused("INVALID_ARGUMENT", "payload-length"):
        act.alice.submit(act.signed())


def test_a_payload_longer_than_declared_is_refused(act: Act) -> None:
    with refused("INVALID_ARGUMENT", "payload-length"):
        act.alice.submit(act.signed(), act.payload, b"more")


def test_a_payload_over_the_limit_is_refused_before_it_is_sent(act: Act) -> None:
    with refused("RESOURCE_EXHAUSTED", "limit:payload"):
        act.alice.submit(act.signed(payload_bytes=act.order.max_payload_bytes + 1), act.payload)


def test_a_manifest_over_the_limit_is_refused(act: Act) -> None:
    manifest = act.manifest()
    for i in range(5000):
        manifest.metrics[f"metric-{i:020}"] = 1.0
    with refused("RESOURCE_EXHAUSTED", "limit:manifest"):
        act.alice.submit(act.alice.seal(manifest))


def test_an_oversized_chunk_is_refused(act: Act) -> None:
    with refused("RESOURCE_EXHAUSTED", "limit:chunk"):
        act.alice.submit(act.signed(), act.payload, chunk_bytes=(1 << 20) + 1)
    with pytest.raises(grpc.RpcError) as error:  # beyond what gRPC itself takes in one message
        act.alice.submit(act.signed(), bytes(8 << 20), chunk_bytes=8 << 20)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def bad_payloads(order: AssignmentManifest) -> dict[str, tuple[bytes, str]]:
    layout = update_layout([(row.name, row.length, row.dtype) for row in order.rows])
    good = np.ones(layout.size, np.float32)
    nan, inf = good.copy(), good.copy()
    nan[layout.size // 2] = np.nan
    inf[-1] = -np.inf
    wrong_name = update_layout([("other", layout.size)])
    short = update_layout([("loss", layout.size - 1)])
    return {
        "nan": (to_bytes(layout, nan), "non-finite"),
        "inf": (to_bytes(layout, inf), "non-finite"),
        "zero": (to_bytes(layout, np.zeros_like(good)), "zero"),
        "another name": (to_bytes(wrong_name, good), "layout"),
        "wrong length": (to_bytes(short, good[:-1]), "layout"),
        "wrong dtype": (to_bytes(layout, good).replace(b'"F32"', b'"I32"', 1), "dtype"),
        "not safetensors": (b"\x80\x04\x95 a pickle, say" + bytes(1000), "limit:header"),
        "absurd header": (struct.pack("<Q", 2**62) + bytes(1000), "limit:header"),
        "empty header": (struct.pack("<Q", 0) + bytes(1000), "layout"),
    }


BAD = sorted(bad_payloads(AssignmentManifest(rows=[Row(name="loss", length=9, dtype="F32")])))


@pytest.mark.parametrize("case", few_of(BAD, "nan", "wrong dtype", "absurd header"))
def test_bad_content_is_refused_for_good_recorded_and_leaves_the_honest_clients_alone(scene: Scene, case: str) -> None:
    act = scene.begin(attend_bob=True, minimum=2)
    payload, reason = bad_payloads(act.order)[case]
    envelope = act.signed(payload)
    status = "RESOURCE_EXHAUSTED" if reason.startswith("limit") else "INVALID_ARGUMENT"
    with refused(status, reason):
        act.alice.submit(envelope, payload)
    assert act.state() == ("REFUSED", reason)
    with refused(status, reason):  # the same again: the same answer
        act.alice.submit(envelope, payload)
    stored = "select accepted, payload from replies where payload_bytes = :n and reason = :r order by reply_id desc"
    assert tuple(scene.fed.query(stored, n=len(payload), r=reason)[0]) == (False, "")
    assert not list((scene.fed.home / "blobs").rglob(digest(payload).partition(":")[2][2:] + "*"))
    # Bob's update alone makes the step.
    assert scene.bob.answer(act.envelopes[1]).accepted
    assert scene.alice.answer(scene.streams[0].assignment()).accepted
    assert scene.bob.answer(scene.streams[1].assignment()).accepted
    scene.fed.wait_completed(act.run)
    record = scene.fed.admin("round", act.run, "0")
    parts = {part["client_id"]: part for part in record["participations"]}
    assert parts["alice"]["state"] == "REFUSED"
    assert parts["alice"]["reason"].startswith(reason)
    assert parts["bob"]["weight"] == 1.0


@pytest.mark.parametrize("samples", [0, 2**64 - 1])
def test_an_absurd_sample_count_is_refused(scene: Scene, samples: int) -> None:
    act = scene.begin()
    with refused("RESOURCE_EXHAUSTED", "limit:samples"):
        act.alice.submit(act.signed(samples=samples), act.payload)
    assert act.state() == ("REFUSED", "limit:samples")


def test_a_loss_that_is_no_number_is_refused(scene: Scene) -> None:
    act = scene.begin()
    manifest = act.manifest()
    manifest.losses["loss"] = float("nan")
    with refused("INVALID_ARGUMENT", "non-finite"):
        act.alice.submit(act.alice.seal(manifest), act.payload)


def test_a_blob_that_nobody_offered_to_this_client_is_not_given(scene: Scene, act: Act) -> None:
    fetched = b"".join(piece.chunk for piece in act.alice.stub.FetchBlob(FetchBlobRequest(digest=act.order.base_model)))
    assert digest(fetched) == act.order.base_model
    half = act.alice.stub.FetchBlob(FetchBlobRequest(digest=act.order.base_model, offset=len(fetched) // 2))
    assert b"".join(piece.chunk for piece in half) == fetched[len(fetched) // 2 :]
    stranger = scene.fed.enroll(f"stranger-{scene.count}")
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        list(stranger.stub.FetchBlob(FetchBlobRequest(digest=act.order.base_model)))
    for name in ("blake3:" + "0" * 64, "../../coordinator.db", "", "\0"):
        with refused("PERMISSION_DENIED", "blob-not-offered"):
            list(act.alice.stub.FetchBlob(FetchBlobRequest(digest=name)))
    with refused("OUT_OF_RANGE", "offset"):
        list(act.alice.stub.FetchBlob(FetchBlobRequest(digest=act.order.base_model, offset=len(fetched) + 1)))


def test_a_stream_that_does_not_begin_with_hello_is_refused(scene: Scene) -> None:
    for request in (AttendRequest(), AttendRequest(heartbeat=Heartbeat())):
        with refused("INVALID_ARGUMENT", "hello"):
            list(scene.alice.stub.Attend(iter([request]), timeout=SECONDS))


def test_a_submission_that_does_not_begin_with_the_update_is_refused(scene: Scene) -> None:
    for requests in ([SubmitRequest(chunk=b"x")], [SubmitRequest()], []):
        with refused("INVALID_ARGUMENT", "header"):
            next(scene.alice.stub.Submit(iter(requests), timeout=SECONDS))


def test_a_second_stream_of_the_same_client_ends_the_first(scene: Scene) -> None:
    first = scene.alice.attend(digits=10)
    first.next()
    second = scene.alice.attend(digits=10)
    second.next()
    end = first.end()
    assert (end.status, end.reason) == ("ABORTED", "superseded")
    second.close()


def test_declining_closes_the_assignment_and_only_ones_own(scene: Scene) -> None:
    act = scene.begin(attend_bob=True, minimum=2)
    bobs = scene.bob.open(act.envelopes[1]).assignment_id
    scene.streams[0].say(AttendRequest(decline=act.alice.declined(act.order.assignment_id, "no-data")))
    wait_for(lambda: act.state() == ("DECLINED", "no-data"), "the decline")
    scene.streams[0].say(AttendRequest(decline=act.alice.declined(bobs, "not-mine")))
    end = scene.streams[0].end()
    assert (end.status, end.reason) == ("PERMISSION_DENIED", "assignment-client")
    assert act.state("bob") == ("OPEN", "")
    act.end()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "key-unknown"),
        ({"client_id": "bob"}, "mismatch:client_id"),
        ({"federation_id": "other"}, "mismatch:federation_id"),
        ({"assignment": "blake3:" + "0" * 64}, "mismatch:assignment"),
    ],
)
def test_a_decline_that_its_client_has_not_signed_for_this_assignment_closes_nothing(
    scene: Scene, changes: dict[str, str], reason: str
) -> None:
    act = scene.begin()
    said = act.alice.declined(act.order.assignment_id, "no-data", **changes)
    if not changes:
        said = seal(DeclineManifest.FromString(said.manifest), Ed25519PrivateKey.generate())
    scene.streams[0].say(AttendRequest(decline=said))
    status = "UNAUTHENTICATED" if reason == "key-unknown" else "INVALID_ARGUMENT"
    end = scene.streams[0].end()
    assert (end.status, end.reason) == (status, reason)
    assert act.state() == ("OPEN", "")
    act.end()


def test_an_assignment_is_signed_by_the_coordinator_alone(act: Act) -> None:
    forged = seal(act.order, Ed25519PrivateKey.generate())
    with pytest.raises(Exception, match="key-unknown"):
        act.alice.open(forged)


def test_no_refusal_was_an_internal_error(scene: Scene) -> None:
    assert scene.fed.query("select count(*) from audit_log where outcome = 'internal'")[0][0] == 0
