"""A coordinator that a test scripts: real TLS, real signatures, and any misbehaviour towards a worker."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_tls_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coordinator.audit.checkpoints import LogKey
from coordinator.members.access.rpc_messages import status_details
from federation.digests import digest
from federation.record.merkle import Tree, leaf_hash
from federation.refusals import Refusal
from federation.transport.channels import STATUS_KEY
from federation.trust.certificates import csr_public_key, fingerprint, issue_certificate, make_ca, pem
from federation.trust.envelope import envelope_digest, sign, verify
from federation.trust.identity import client_uri, coordinator_uri
from federation.trust.join_string import JoinStringFields
from federation.trust.key_chain import CoordinatorKeys
from federation.trust.keys import private_key_pem
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import proves_possession
from federation.v1 import common_pb2 as common
from federation.v1 import federation_pb2 as wire
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from federation.v1.enrollment_pb2_grpc import EnrollmentServicer, add_EnrollmentServicer_to_server
from federation.v1.federation_pb2_grpc import FederationServicer, add_FederationServicer_to_server
from federation.vectors import Layout
from tests.harness import CONTEXT, copied, wait_for
from tests.works import set_work

FEDERATION = "test-federation"
NEWER = b"\x9a\x06\x01x"  # a message with a field 99
DAY = timedelta(days=1)
CLIENT = "hospital-a"


def assignment(layout: Layout, model: bytes, number: int = 0, **changes: Any) -> common.AssignmentManifest:
    """An assignment to train digits for one step, with the given fields changed."""
    manifest = common.AssignmentManifest(
        federation_id=FEDERATION,
        run_id="run-1",
        round=number,
        assignment_id=f"assignment-{number}",
        client_id=CLIENT,
        base_model=digest(model),
        base_model_bytes=len(model),
        spec=digest(b"spec"),
        task="digits",
        rows=[common.Row(name="loss", dtype="F32", length=layout.size)],
        max_payload_bytes=len(model) + 1000,
        seed=7,
    )
    set_work(manifest, common.TrainWork(steps=1, batch_size=10, learning_rate=0.1))
    manifest.deadline.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    for name, value in changes.items():
        setattr(manifest, name, value)
    return manifest


class HungUp(Exception):
    """Ends a call as a broken connection would."""


@dataclass
class Submission:
    """What a worker handed in."""

    envelope: common.SignedEnvelope
    manifest: common.ReplyManifest
    payload: bytes


class ScriptedLog:
    """An audit log of entries that are nothing but their leaves, which a test may change."""

    def __init__(self, signing_key: Ed25519PrivateKey) -> None:
        self.key = LogKey(federation_id=FEDERATION, key=Ed25519PrivateKey.generate())
        self.certified = self.key.certified(signing_key)
        self.leaves = [leaf_hash(b"0")]

    def grow(self, count: int, word: bytes = b"entry") -> None:
        self.leaves += [leaf_hash(b"%s %d" % (word, len(self.leaves))) for _ in range(count)]

    def tree(self) -> Tree:
        tree = Tree(lambda start, stop: self.leaves[start:stop])
        for leaf in self.leaves:
            tree.append(leaf)
        return tree

    def head(self, since: int) -> common.LogHead:
        """The checkpoint of the whole log, as an honest coordinator shows it."""
        tree = self.tree()
        head = common.LogHead(checkpoint=self.key.sign(tree.size, tree.root(), datetime.now(UTC)))
        if 0 < since <= tree.size:
            head.since = since
            head.consistency.extend(tree.consistency(since, tree.size))
        return head


@dataclass(eq=False)
class ScriptedCoordinator(FederationServicer, EnrollmentServicer):
    """Answers as the test says; honest where the test says nothing."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    initial_model: str = digest(b"model")  # of runs that ask
    open: list[common.SignedEnvelope] = field(default_factory=list)  # sent on every attendance, as the real one does
    hellos: list[wire.Hello] = field(default_factory=list)
    heartbeats: list[wire.Heartbeat] = field(default_factory=list)
    declines: list[common.DeclineManifest] = field(default_factory=list)
    consents: list[common.ConsentManifest] = field(default_factory=list)
    left: list[wire.SessionsLeft] = field(default_factory=list)
    fetches: list[int] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    federation_id: str = FEDERATION
    ahead: timedelta = timedelta()  # of the real time
    # What returns None sends the time as it is, changed or not.
    change_time: Callable[[common.TimeManifest], common.SignedEnvelope | None] | None = None
    restored: common.SignedEnvelope | None = None
    rotations: list[common.KeyRotation] = field(default_factory=list)  # of its signing key
    addresses: list[str] = field(default_factory=list)  # that a welcome tells
    give_model: Callable[[wire.GetModelRequest], wire.GetModelResponse] | None = None
    # A list of refusals to give before the honest answer.
    attend_refusals: list[Refusal] = field(default_factory=list)
    withdrawals: list[common.SignedEnvelope] = field(default_factory=list)
    leave_refusals: list[Refusal] = field(default_factory=list)
    knows_leaving: bool = True  # unlike one of version 0.1.0
    started: bytes = b""  # the start on record of another home; empty for none
    submitted_starts: list[bytes] = field(default_factory=list)  # beside the replies
    submit_refusals: list[Refusal | HungUp] = field(default_factory=list)
    serve_blob: Callable[[bytes, int], Iterator[bytes]] | None = None
    receipt: Callable[[Submission, common.ReceiptManifest], common.SignedEnvelope] | None = None
    receipt_log: Callable[[int], common.LogHead] | None = None  # sent with a receipt to a log of this size
    hold_submissions: threading.Event | None = None
    window_bytes: int = 1 << 20
    newer: bool = False  # it says what workers of this version do not know, too, and breaks the first upload off
    held: bytes = b""  # of the upload that broke off
    chunks: list[tuple[int, int]] = field(default_factory=list)  # offset and length of each that came
    enrollment_refusal: Refusal | None = None
    change_enrollment: Callable[[EnrollResponse], None] | None = None

    def __post_init__(self) -> None:
        now = datetime.now(UTC)
        self.signing_key = Ed25519PrivateKey.generate()
        self.log = ScriptedLog(self.signing_key)
        self._ca_key = generate_tls_key(SECP256R1())
        self.ca = make_ca(self._ca_key, FEDERATION, now)
        self._outboxes: list[queue.SimpleQueue[wire.AttendResponse | Refusal]] = []
        self._server: grpc.Server | None = None
        self.federation_port = self.enrollment_port = 0

    # the process

    def start(self) -> None:
        key = generate_tls_key(SECP256R1())
        certificate = self._certificate(key.public_key(), coordinator_uri(FEDERATION), hosts=["127.0.0.1"])
        chain = [(private_key_pem(key), certificate)]
        mutual = grpc.ssl_server_credentials(chain, pem(self.ca), require_client_auth=True)
        server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        add_FederationServicer_to_server(self, server)
        add_EnrollmentServicer_to_server(self, server)
        self.federation_port = server.add_secure_port(f"127.0.0.1:{self.federation_port}", mutual)
        self.enrollment_port = server.add_secure_port(
            f"127.0.0.1:{self.enrollment_port}", grpc.ssl_server_credentials(chain)
        )
        server.start()
        self._server = server

    @property
    def address(self) -> str:
        """The address for members."""
        return f"127.0.0.1:{self.federation_port}"

    def further(self) -> "ScriptedCoordinator":
        """A further coordinator, with the same keys and log, which is not started."""
        other = type(self)()
        other.ca, other._ca_key, other.signing_key, other.log = self.ca, self._ca_key, self.signing_key, self.log
        return other

    def stop(self) -> None:
        for outbox in self._outboxes:
            outbox.put(Refusal("stopping", "the coordinator stops"))
        if self._server is not None:
            self._server.stop(None).wait()

    def member(self, *, lifetime: timedelta = DAY) -> MemberFiles:
        """A membership, as enrollment makes it."""
        key = generate_tls_key(SECP256R1())
        return MemberFiles(
            federation_id=FEDERATION,
            client_id=CLIENT,
            addresses=(self.address,),
            ca=pem(self.ca),
            certificate=self._certificate(key.public_key(), client_uri(FEDERATION, CLIENT), lifetime),
            tls_key=key,
            signing_key=Ed25519PrivateKey.generate(),
            coordinator=CoordinatorKeys(FEDERATION, self.signing_key.public_key()),
        )

    def join(self) -> JoinStringFields:
        return JoinStringFields((f"127.0.0.1:{self.enrollment_port}",), fingerprint(self.ca), bytes(range(32)), CLIENT)

    def _certificate(
        self, key: EllipticCurvePublicKey, uri: str, lifetime: timedelta = DAY, hosts: Sequence[str] = ()
    ) -> bytes:
        names: dict[str, Any] = {"federation_id": FEDERATION, "common_name": CLIENT, "uris": [uri], "hosts": hosts}
        valid: dict[str, Any] = {"now": datetime.now(UTC), "lifetime": lifetime}
        return pem(issue_certificate(ca=self.ca, ca_key=self._ca_key, public_key=key, **names, **valid))

    # work

    def assignment(self, layout: Layout, model: bytes, number: int = 0, **changes: Any) -> common.AssignmentManifest:
        """An assignment to train digits for one step, with the given fields changed; its model is here."""
        self.blobs[digest(model)] = model
        return assignment(layout, model, number, **changes)

    def assign(
        self, manifest: common.AssignmentManifest, key: Ed25519PrivateKey | None = None
    ) -> common.SignedEnvelope:
        envelope = sign(manifest, key or self.signing_key)
        self.give(envelope)
        return envelope

    def give(self, envelope: common.SignedEnvelope) -> None:
        self.open.append(envelope)
        self._say(wire.AttendResponse(assignment=envelope))

    def ask(self, document: bytes, run_id: str = "run-1", **changes: str) -> common.RunManifest:
        """A run with this specification asks the worker to take part."""
        self.blobs[digest(document)] = document
        fields: dict[str, Any] = {"federation_id": FEDERATION, "name": "trial", "task": "digits"}
        fields |= {"initial_model": self.initial_model, "submitted_by": "alice", **changes}
        manifest = common.RunManifest(run_id=run_id, spec=digest(document), **fields)
        self._say(wire.AttendResponse(run=sign(manifest, self.signing_key)))
        return manifest

    def cancel(self, assignment_id: str, *, key: Ed25519PrivateKey | None = None, **changes: Any) -> None:
        fields = {"federation_id": FEDERATION, "client_id": CLIENT, "reason": "run-ended", **changes}
        manifest = common.CancelManifest(assignment_id=assignment_id, **fields)
        if key is None and not changes.keys() - {"reason", "session"}:
            self.open.clear()
        self._say(wire.AttendResponse(cancel=sign(manifest, key or self.signing_key)))

    def end_stream(self, refusal: Refusal) -> None:
        wait_for(lambda: bool(self._outboxes), "an attendance")
        self._outboxes[-1].put(refusal)

    def _say(self, response: wire.AttendResponse) -> None:
        for outbox in self._outboxes:
            outbox.put(response)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def time(self, hello: wire.Hello) -> common.SignedEnvelope:
        """The signed time, changed as the test says."""
        manifest = common.TimeManifest(federation_id=FEDERATION, client_id=CLIENT, nonce=hello.nonce)
        manifest.now.FromDatetime(self.now())
        changed = self.change_time(manifest) if self.change_time else None
        return sign(manifest, self.signing_key) if changed is None else changed

    # the services

    def Enroll(self, request: EnrollRequest, context: grpc.ServicerContext) -> EnrollResponse:  # noqa: N802
        if self.enrollment_refusal is not None:
            _abort(context, self.enrollment_refusal)
        key = Ed25519PublicKey.from_public_bytes(request.signing_key)
        assert request.secret == self.join().secret
        assert proves_possession(key, request.proof, request.secret, request.csr)
        response = EnrollResponse(
            federation_id=FEDERATION,
            client_id=CLIENT,
            certificate=self._certificate(csr_public_key(request.csr), client_uri(FEDERATION, CLIENT)),
            ca_certificate=pem(self.ca),
            coordinator_key=self.signing_key.public_key().public_bytes_raw(),
            addresses=[self.address],
        )
        if self.change_enrollment is not None:
            self.change_enrollment(response)
        return response

    def Attend(self, request_iterator: Any, context: grpc.ServicerContext) -> Iterator[wire.AttendResponse]:  # noqa: N802
        self.hellos.append(next(request_iterator).hello)
        if self.attend_refusals:
            _abort(context, self.attend_refusals.pop(0))
        if self.started and self.started not in (self.hellos[-1].start, *self.hellos[-1].earlier_starts):
            yield wire.AttendResponse(home_copied=wire.HomeCopied(start=self.started))
            _abort(context, Refusal("home-copied", "another home has started"))
        outbox: queue.SimpleQueue[wire.AttendResponse | Refusal] = queue.SimpleQueue()
        for envelope in self.open:
            outbox.put(wire.AttendResponse(assignment=envelope))
        self._outboxes.append(outbox)
        context.add_callback(lambda: outbox.put(Refusal("stopping", "the stream is gone")))
        threading.Thread(target=self._listen, args=(request_iterator,), daemon=True).start()
        welcome = wire.Welcome(federation_id=self.federation_id, heartbeat_seconds=0.2, restored=self.restored)
        welcome.addresses.extend(self.addresses)
        welcome.rotations.extend(self.rotations)
        welcome.time.CopyFrom(self.time(self.hellos[-1]))
        welcome.log_key.CopyFrom(self.log.certified)
        welcome.log.CopyFrom(self.log.head(self.hellos[-1].log_size))
        try:
            yield wire.AttendResponse(welcome=welcome)
            if self.newer:
                yield wire.AttendResponse.FromString(NEWER)
            while isinstance(message := outbox.get(), wire.AttendResponse):
                yield message
        finally:  # also where the worker ends the stream, and gRPC closes this generator
            self._outboxes.remove(outbox)
        _abort(context, message)

    def _listen(self, requests: Any) -> None:
        try:
            for request in requests:
                if request.WhichOneof("message") == "heartbeat":
                    self.heartbeats.append(request.heartbeat)
                elif request.WhichOneof("message") == "consent":
                    self.consents.append(common.ConsentManifest.FromString(request.consent.manifest))
                elif request.WhichOneof("message") == "sessions_left":
                    self.left.append(request.sessions_left)
                else:
                    self.declines.append(common.DeclineManifest.FromString(request.decline.manifest))
        except Exception:
            return  # the stream is gone

    def FetchBlob(self, request: Any, context: grpc.ServicerContext) -> Iterator[wire.FetchBlobResponse]:  # noqa: N802
        self.fetches.append(request.offset)
        blob = self.blobs[request.digest]
        pieces = self.serve_blob(blob, request.offset) if self.serve_blob else iter([blob[request.offset :]])
        try:
            for piece in pieces:
                yield wire.FetchBlobResponse(chunk=piece)
        except HungUp:
            context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")

    def GetModel(self, request: Any, context: grpc.ServicerContext) -> wire.GetModelResponse:  # noqa: N802
        assert self.give_model is not None
        return self.give_model(request)

    def Leave(self, request: Any, context: grpc.ServicerContext) -> wire.LeaveResponse:  # noqa: N802
        if not self.knows_leaving:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.leave_refusals:
            _abort(context, self.leave_refusals.pop(0))
        self.withdrawals.append(request.withdrawal)
        gone = Refusal("client-left", "it has left", signed=request.withdrawal.SerializeToString())
        for outbox in self._outboxes:
            outbox.put(gone)
        response = wire.LeaveResponse()
        response.left.FromDatetime(self.now())
        return response

    def Submit(self, request_iterator: Any, context: grpc.ServicerContext) -> Iterator[wire.SubmitResponse]:  # noqa: N802
        first = next(request_iterator)
        envelope = first.reply
        self.submitted_starts.append(first.start)
        size, payload = common.ReplyManifest.FromString(envelope.manifest).payload_bytes, self.held
        limit = len(payload) + self.window_bytes
        if self.newer:
            yield wire.SubmitResponse.FromString(NEWER)
        if size:
            yield wire.SubmitResponse(window=wire.Window(offset=len(payload), limit=limit))
        for request in request_iterator:
            self.chunks.append((request.offset, len(request.chunk)))
            payload += request.chunk
            if self.newer and not self.held:
                self.held = payload
                context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")
            if len(payload) == limit < size:
                limit += self.window_bytes
                yield wire.SubmitResponse(window=wire.Window(offset=len(payload), limit=limit))
        submission = Submission(envelope, common.ReplyManifest.FromString(envelope.manifest), payload)
        self.submissions.append(submission)
        if self.hold_submissions is not None:
            self.hold_submissions.wait(60)
        if self.submit_refusals:
            refusal = self.submit_refusals.pop(0)
            if isinstance(refusal, HungUp):
                context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")
            _abort(context, refusal)
        receipt = self.honest_receipt(submission)
        signed = self.receipt(submission, receipt) if self.receipt else sign(receipt, self.signing_key)
        self.open = [
            other
            for other in self.open
            if common.AssignmentManifest.FromString(other.manifest).assignment_id != submission.manifest.assignment_id
        ]
        log = self.receipt_log(first.log_size) if self.receipt_log else None
        yield wire.SubmitResponse(receipt=signed, log=log)

    def honest_receipt(self, submission: Submission) -> common.ReceiptManifest:
        manifest = submission.manifest
        repeated = copied(manifest, *CONTEXT, "payload")
        return common.ReceiptManifest(envelope=envelope_digest(submission.envelope), accepted=True, **repeated)


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    context.set_trailing_metadata(((STATUS_KEY, status_details(refusal)),))
    context.abort(grpc.StatusCode[refusal.status], refusal.message)
    raise AssertionError("abort returned")


@contextmanager
def scripted() -> Iterator[ScriptedCoordinator]:
    coordinator = ScriptedCoordinator()  # type: ignore[abstract]  # nobody makes its other calls
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()


def opened(submission: Submission, member: MemberFiles) -> common.ReplyManifest:
    """The manifest, verified with the member's key."""
    return verify(submission.envelope, common.ReplyManifest, member.signing_key.public_key())


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []
