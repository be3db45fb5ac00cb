"""A client written from docs/reference/protocol.md alone: gRPC, `cryptography`, BLAKE3, and stubs made from proto/.

It imports nothing of fedpareto. It joins, renews its certificate, attends, fits a line to its own data by gradient
descent, and hands in updates and evaluations until it has done the rounds that it is asked to. It prints one JSON
object for each event.

    python independent_client.py STUBS ROUNDS SEED < JOIN_STRING
"""

import base64
import hashlib
import json
import os
import queue
import socket
import ssl
import struct
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from blake3 import blake3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import AuthorityInformationAccessOID
from google.rpc import error_details_pb2, status_pb2

sys.path.insert(0, sys.argv[1])

from federation.v1 import common_pb2, enrollment_pb2, enrollment_pb2_grpc, federation_pb2, federation_pb2_grpc

TASK = "line"
TRUTH = np.array([1.5, -2.0, 0.5], dtype=np.float32)  # two slopes and an intercept
CA_PREFIX = "data:application/pkix-cert;base64,"


def tell(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


# --- joining


def read_join(text: str) -> tuple[bytes, bytes, str, str]:
    """CA fingerprint, secret, client id and the first address."""
    prefix, word = text[:8], text[8:]
    assert prefix == "fpjoin1_", prefix
    data = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
    checksum, body = data[:4], data[4:]
    assert hashlib.sha256(body).digest()[:4] == checksum
    client_id, address, *_ = body[64:].decode().split("\n")
    return body[:32], body[32:64], client_id, address


def fetch_ca(address: str, fingerprint: bytes) -> bytes:
    """The CA certificate as PEM, out of the server's certificate."""
    host, port = address.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as connection:
        server = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
    access = server.extensions.get_extension_for_class(x509.AuthorityInformationAccess).value
    for description in access:
        if description.access_method == AuthorityInformationAccessOID.CA_ISSUERS:
            der = base64.b64decode(description.access_location.value.removeprefix(CA_PREFIX))
            if hashlib.sha256(der).digest() == fingerprint:
                return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
    raise SystemExit("the server is not the coordinator of this federation")


def request_for(key: ec.EllipticCurvePrivateKey) -> bytes:
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def connect(address: str, ca: bytes, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> grpc.Channel:
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, as_pem(key), certificate))


# --- envelopes


def digest_of(data: bytes) -> str:
    return "blake3:" + blake3(data).hexdigest()


def sign(context: bytes, manifest: Any, key: ed25519.Ed25519PrivateKey) -> Any:
    data = manifest.SerializeToString()
    return common_pb2.SignedEnvelope(
        manifest=data,
        key_id=blake3(key.public_key().public_bytes_raw()).digest(),
        signature=key.sign(context + b"\0" + data),
    )


def verify(context: bytes, envelope: Any, kind: Any, key: ed25519.Ed25519PublicKey) -> Any:
    assert envelope.key_id == blake3(key.public_bytes_raw()).digest()
    key.verify(envelope.signature, context + b"\0" + envelope.manifest)
    return kind.FromString(envelope.manifest)


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field of the protobuf wire format."""
    length, size = b"", len(data)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def envelope_digest(envelope: Any) -> str:
    return digest_of(field(1, envelope.manifest) + field(2, envelope.key_id) + field(3, envelope.signature))


# --- safetensors


def read_model(data: bytes) -> np.ndarray:
    """The flat vector of a model."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["slopes", "intercept"]
    return np.frombuffer(data[8 + length :], "<f4")


def write_rows(rows: list[tuple[str, np.ndarray]]) -> bytes:
    entries, begin = {}, 0
    for name, row in rows:
        entries[name] = {"dtype": "F32", "shape": [len(row)], "data_offsets": [begin, begin + 4 * len(row)]}
        begin += 4 * len(row)
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + b"".join(row.astype("<f4").tobytes() for _, row in rows)


# --- the work


class Line:
    """This client's data, and least squares on it."""

    def __init__(self, seed: int) -> None:
        self.x = np.random.default_rng(seed).standard_normal((64, 2)).astype(np.float32)
        self.y = self.x @ TRUTH[:2] + TRUTH[2]

    def loss(self, w: np.ndarray) -> float:
        return float(np.mean((self.x @ w[:2] + w[2] - self.y) ** 2))

    def train(self, w: np.ndarray, steps: int, rate: float) -> np.ndarray:
        for _ in range(steps):
            residual = self.x @ w[:2] + w[2] - self.y
            gradient = 2 * np.append(self.x.T @ residual, residual.sum()) / len(self.y)
            w = (w - rate * gradient).astype(np.float32)
        return w


def attend(stub: Any, outbox: "queue.SimpleQueue[Any]", data: Line, nonce: bytes) -> Any:
    offer = federation_pb2.TaskOffer(task=TASK, samples=len(data.y), objectives=["loss"])
    hello = federation_pb2.Hello(software="independent 1", tasks=[offer], device="cpu", nonce=nonce)
    outbox.put(federation_pb2.AttendRequest(hello=hello))
    return stub.Attend(iter(outbox.get, None))


def fetch(stub: Any, digest: str, size: int) -> bytes:
    """A blob, in two calls: the second one goes on where the first one was broken off."""
    first = stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=digest))
    data: bytes = next(first).chunk[: size // 2]
    first.cancel()
    rest = stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=digest, offset=len(data)))
    data += b"".join(response.chunk for response in rest)
    assert len(data) == size
    assert digest_of(data) == digest
    return data


def reply_to(order: Any, base: np.ndarray, data: Line) -> tuple[Any, bytes]:
    """The manifest and the payload."""
    manifest = common_pb2.ReplyManifest(
        federation_id=order.federation_id,
        run_id=order.run_id,
        round=order.round,
        attempt=order.attempt,
        phase=order.phase,
        assignment_id=order.assignment_id,
        client_id=order.client_id,
        base_model=order.base_model,
        spec=order.spec,
        task=order.task,
        rows=order.rows,
        samples=len(data.y),
        software="independent 1",
        metrics={"train/loss": data.loss(base), "train/samples": len(data.y)},
    )
    manifest.created.GetCurrentTime()
    payload = b""
    if order.kind == "train":
        work = common_pb2.TrainWork.FromString(order.work)
        trained = data.train(base, work.steps, work.learning_rate)
        payload = write_rows([(order.rows[0].name, base - trained)])
        manifest.payload, manifest.payload_bytes = digest_of(payload), len(payload)
        manifest.losses["loss"] = data.loss(base)
    return manifest, payload


def hand_in(stub: Any, envelope: Any, payload: bytes) -> Any:
    """The receipt for a reply, which is sent as far as the coordinator's windows allow."""
    windows: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def requests() -> Iterator[Any]:
        yield federation_pb2.SubmitRequest(reply=envelope)
        window = windows.get() if payload else None
        place = window.offset if window is not None else 0
        while window is not None and place < len(payload):
            chunk = payload[place : min(place + (1 << 18), window.limit)]
            if chunk:
                yield federation_pb2.SubmitRequest(chunk=chunk, offset=place)
                place += len(chunk)
            else:
                window = windows.get()

    try:
        for answer in stub.Submit(requests()):
            if answer.WhichOneof("message") == "receipt":
                return answer.receipt
            windows.put(answer.window)
        raise AssertionError("no receipt")
    finally:
        windows.put(None)


def reason_of(error: grpc.RpcError) -> str:
    """The stable reason of a refusal."""
    trailers: Any = error.trailing_metadata()
    details = dict(trailers)["grpc-status-details-bin"]
    for detail in status_pb2.Status.FromString(details).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == "fedpareto":
            return str(info.reason)
    raise AssertionError("no reason")


def main() -> None:
    rounds, data = int(sys.argv[2]), Line(int(sys.argv[3]))
    fingerprint, secret, client_id, enrollment = read_join(sys.stdin.readline().strip())
    ca = fetch_ca(enrollment, fingerprint)
    tls_key, signing_key = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
    csr = request_for(tls_key)
    with grpc.secure_channel(enrollment, grpc.ssl_channel_credentials(ca)) as channel:
        member = enrollment_pb2_grpc.EnrollmentStub(channel).Enroll(
            enrollment_pb2.EnrollRequest(
                secret=secret,
                csr=csr,
                signing_key=signing_key.public_key().public_bytes_raw(),
                proof=signing_key.sign(b"fedpareto/v1/enrollment\0" + secret + csr),
                software="independent 1",
            )
        )
    assert (member.client_id, member.ca_certificate) == (client_id, ca)
    coordinator = ed25519.Ed25519PublicKey.from_public_bytes(member.coordinator_key)
    tell("joined", client_id=client_id, federation_id=member.federation_id)

    next_key = ec.generate_private_key(ec.SECP256R1())
    csr = request_for(next_key)
    with connect(member.addresses[0], ca, tls_key, member.certificate) as channel:
        renewed = federation_pb2_grpc.FederationStub(channel).Renew(
            federation_pb2.RenewRequest(csr=csr, proof=signing_key.sign(b"fedpareto/v1/renewal\0" + csr))
        )
    tell("renewed")

    with connect(member.addresses[0], ca, next_key, renewed.certificate) as channel:
        stub = federation_pb2_grpc.FederationStub(channel)
        try:
            list(stub.FetchBlob(federation_pb2.FetchBlobRequest(digest=digest_of(b"nothing"))))
        except grpc.RpcError as error:
            tell("refused", status=error.code().name, reason=reason_of(error))
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        done = set[str]()
        nonce = os.urandom(32)
        for response in attend(stub, outbox, data, nonce):
            if response.WhichOneof("message") == "welcome":
                time = verify(b"fedpareto/v1/time", response.welcome.time, common_pb2.TimeManifest, coordinator)
                assert (time.federation_id, time.client_id) == (member.federation_id, client_id)
                assert time.nonce == nonce
                tell("attends", federation_id=response.welcome.federation_id)
                continue
            if response.WhichOneof("message") != "assignment":
                continue
            order = verify(b"fedpareto/v1/assignment", response.assignment, common_pb2.AssignmentManifest, coordinator)
            if order.assignment_id in done:
                continue  # an assignment may come twice
            assert (order.federation_id, order.client_id) == (member.federation_id, client_id)
            assert order.task == TASK
            outbox.put(
                federation_pb2.AttendRequest(heartbeat=federation_pb2.Heartbeat(assignment_id=order.assignment_id))
            )
            base = read_model(fetch(stub, order.base_model, order.base_model_bytes))
            manifest, payload = reply_to(order, base, data)
            envelope = sign(b"fedpareto/v1/reply", manifest, signing_key)
            receipts = [hand_in(stub, envelope, payload) for _ in range(2)]  # the second changes nothing
            assert receipts[0] == receipts[1]
            receipt = verify(b"fedpareto/v1/receipt", receipts[0], common_pb2.ReceiptManifest, coordinator)
            assert receipt.envelope == envelope_digest(envelope)
            assert (receipt.assignment_id, receipt.payload) == (order.assignment_id, manifest.payload)
            done.add(order.assignment_id)
            kind = order.kind
            tell(
                "receipt",
                round=order.round,
                kind=kind,
                accepted=receipt.accepted,
                envelope=receipt.envelope,
                loss=data.loss(base),
            )
            if kind == "evaluate" and order.round == rounds - 1:
                outbox.put(None)
                return


if __name__ == "__main__":
    main()
    mine = ("storage", "coordinator", "worker", "verification", "simulation", "experiments", "fedpareto")
    ours = {*mine} & set(sys.modules)
    used = {name for name in sys.modules if name.startswith("federation.")} - {"federation.v1"}
    tell("imports", ours=sorted(ours), federation=sorted(used))
