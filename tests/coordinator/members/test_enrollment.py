import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.members.authority import Authority
from coordinator.members.enrollment import Application, enroll
from coordinator.members.logged_rights import LoggedRights, join_string_digest
from federation.line.channels import refusal_from_rpc_error, server_verified_channel
from federation.refusals import Refusal
from federation.trust.certificates import fingerprint, make_ca
from federation.trust.identity import parse_peer
from federation.trust.join_string import fetch_ca, secret_hash
from federation.trust.keys import new_tls_key
from federation.trust.proofs import prove_possession
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from storage import audit
from storage.database import Database
from storage.models import AuditEntry, Certificate, Client, JoinString
from storage.states import ClientState
from tests.running import SECONDS, Applicant, Clock, Running, refused, running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("enrollment") / "home") as served:
        yield served


@pytest.fixture
def stub(served: Running) -> Iterator[EnrollmentStub]:
    with served.newcomer() as channel:
        yield EnrollmentStub(channel)


def join(stub: EnrollmentStub, request: EnrollRequest) -> EnrollResponse:
    return stub.Enroll(request, timeout=SECONDS)


def client(served: Running, client_id: str) -> Client | None:
    with served.database.read() as session:
        return session.get(Client, client_id)


def test_a_join_string_and_two_keys_make_a_member(served: Running, stub: EnrollmentStub) -> None:
    applicant = Applicant()
    answer = join(stub, applicant.request(served.join_secret("ward-1")))
    assert (answer.federation_id, answer.client_id, answer.approval_pending) == ("test", "ward-1", False)
    assert answer.address == served.address
    assert answer.coordinator_key == served.home.signing_key.public_key().public_bytes_raw()
    identity = parse_peer(answer.certificate)
    assert (identity.kind, identity.name, identity.federation_id) == ("client", "ward-1", "test")
    assert timedelta(days=89) < identity.not_after - served.clock() <= timedelta(days=90)
    certificate = x509.load_pem_x509_certificate(answer.certificate)
    assert certificate.public_key() == applicant.tls_key.public_key()
    certificate.verify_directly_issued_by(served.home.ca)
    member = client(served, "ward-1")
    assert member is not None
    assert member.state is ClientState.ACTIVE
    assert member.signing_key == applicant.signing_key.public_key().public_bytes_raw()
    with served.database.read() as session:
        row = session.get_one(Certificate, identity.serial)
        assert (row.client_id, row.subject, row.revoked) == ("ward-1", identity.uri, None)
        entry = session.query(AuditEntry).filter_by(action="Enroll", subject="ward-1", outcome="").one()
        assert entry.actor in ("peer 127.0.0.1", "peer ::1")


def test_the_subject_of_a_request_decides_nothing(served: Running, stub: EnrollmentStub) -> None:
    applicant = Applicant()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "admin")])
    wanted = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("fedpareto://test/admin/mallory")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name).add_extension(wanted, critical=False)
    applicant.csr = builder.sign(applicant.tls_key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    answer = join(stub, applicant.request(served.join_secret("mallory")))
    assert parse_peer(answer.certificate).uri == "fedpareto://test/client/mallory"


def test_a_join_string_works_once(served: Running, stub: EnrollmentStub) -> None:
    secret = served.join_secret("once")
    join(stub, Applicant().request(secret))
    with refused("UNAUTHENTICATED", "join-string-used") as messages:
        join(stub, Applicant().request(secret))
    assert "once" in messages[0]
    with served.database.read() as session:  # the first use is on record too
        assert session.query(AuditEntry).filter_by(action="Enroll", subject="once", outcome="").count() == 1
    assert served.refusals("Enroll")[-1].outcome == "join-string-used"


def test_a_repeated_request_is_a_second_use(served: Running, stub: EnrollmentStub) -> None:
    request = Applicant().request(served.join_secret("twice"))
    join(stub, request)
    with refused("UNAUTHENTICATED", "join-string-used"):
        join(stub, request)


@pytest.mark.parametrize("secret", [b"", b"x" * 32, b"x" * 31, b"x" * 100_000])
def test_a_wrong_join_string_is_refused(served: Running, stub: EnrollmentStub, secret: bytes) -> None:
    with refused("UNAUTHENTICATED", "join-string-invalid"):
        join(stub, Applicant().request(secret))
    assert any(entry.outcome == "join-string-invalid" for entry in served.refusals("Enroll"))


def test_an_expired_join_string_is_refused(served: Running, stub: EnrollmentStub) -> None:
    secret = served.join_secret("late", lifetime=timedelta(seconds=-1))
    with refused("UNAUTHENTICATED", "join-string-expired"):
        join(stub, Applicant().request(secret))
    assert any(entry.outcome == "join-string-expired" for entry in served.refusals("Enroll"))
    assert client(served, "late") is None


def bad_csrs() -> list[bytes]:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    p384 = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    ed25519 = builder.sign(Ed25519PrivateKey.generate(), None)
    forged = bytearray(Applicant().csr)
    forged[-3] ^= 1
    encoded = [csr.public_bytes(serialization.Encoding.DER) for csr in (p384, ed25519)]
    return [b"", b"nonsense", *encoded, bytes(forged), Applicant().csr + b"\0" * 5000]


def test_a_bad_request_is_refused_and_leaves_the_join_string_as_it_was(served: Running, stub: EnrollmentStub) -> None:
    secret = served.join_secret("careful")
    good = Applicant()
    request = good.request(secret)
    for csr in bad_csrs():
        bad = Applicant()
        bad.csr = csr
        with refused("INVALID_ARGUMENT", "csr"):
            join(stub, bad.request(secret))
    for key in (b"", b"k" * 31, bytes(32)):
        with refused("INVALID_ARGUMENT", "signing-key"):
            join(stub, EnrollRequest(secret=secret, csr=good.csr, signing_key=key, proof=request.proof))
    for proof in (b"", b"p" * 64, prove_possession(good.signing_key, b"x" * 32, good.csr)):
        with refused("INVALID_ARGUMENT", "proof"):
            join(stub, EnrollRequest(secret=secret, csr=good.csr, signing_key=request.signing_key, proof=proof))
    with refused("INVALID_ARGUMENT", "proof"):  # a proof for another request: the key holder did not ask for this one
        join(
            stub,
            EnrollRequest(secret=secret, csr=Applicant().csr, signing_key=request.signing_key, proof=request.proof),
        )
    assert client(served, "careful") is None
    assert join(stub, request).client_id == "careful"


def test_a_signing_key_belongs_to_one_member(served: Running, stub: EnrollmentStub) -> None:
    first, second = Applicant(), Applicant()
    join(stub, first.request(served.join_secret("owner")))
    second.signing_key = first.signing_key
    with refused("INVALID_ARGUMENT", "signing-key"):
        join(stub, second.request(served.join_secret("borrower")))


def test_a_name_is_given_once(served: Running, stub: EnrollmentStub) -> None:
    one, two = served.join_secret("namesake"), served.join_secret("namesake")
    join(stub, Applicant().request(one))
    with refused("ALREADY_EXISTS", "client-exists"):
        join(stub, Applicant().request(two))


def test_of_many_at_once_with_one_join_string_one_wins(served: Running) -> None:
    secret = served.join_secret("race")
    start = threading.Barrier(8)

    def attempt(_: int) -> str:
        applicant = Applicant()
        with served.newcomer() as channel:
            start.wait(SECONDS)
            try:
                return join(EnrollmentStub(channel), applicant.request(secret)).client_id
            except grpc.RpcError as error:
                return refusal_from_rpc_error(error).reason

    with ThreadPoolExecutor(8) as pool:
        outcomes = sorted(pool.map(attempt, range(8)))
    assert outcomes == [*["join-string-used"] * 7, "race"]
    with served.database.read() as session:
        assert session.query(Certificate).filter_by(client_id="race").count() == 1


def test_of_many_transactions_with_one_join_string_one_wins_on_each_back_end(database: Database) -> None:
    key, clock = new_tls_key(), Clock()
    authority = Authority("test", make_ca(key, "test", clock()), key)
    secret, database.entry_key = b"s" * 32, bytes(32)
    with database.begin() as session:
        hours = timedelta(hours=1)
        row = JoinString(client_id="race", created_by="test", created=clock(), expires=clock() + hours)
        row.secret_hash = secret_hash(secret)
        session.add(row)
        logged = join_string_digest(row)
        audit.record(session, at=clock(), actor="test", action=audit.JOIN_CREATED, subject="race", digest=logged)
    with database.read() as session:
        rights = LoggedRights.read(session, bytes(32))
    start = threading.Barrier(6)

    def attempt(_: int) -> str:
        request = Applicant().request(secret)
        application = Application(secret, request.csr, request.signing_key, request.proof, "test")
        start.wait(SECONDS)
        try:
            with database.begin() as session:
                client, _ = enroll(
                    session,
                    application,
                    authority=authority,
                    rights=rights,
                    approval=True,
                    peer="test",
                    now=clock(),
                )
                return client.state.value
        except Refusal as refusal:
            return refusal.reason

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(attempt, range(6))) == ["PENDING", *["join-string-used"] * 5]


def test_where_approval_is_asked_for_a_new_member_waits(tmp_path: Path) -> None:
    with running(tmp_path / "home", approval=True) as served:
        _, answer = served.enroll("patient")
        assert answer.approval_pending
        member = client(served, "patient")
        assert member is not None
        assert member.state is ClientState.PENDING


def test_a_stranger_finds_the_ca_on_the_enrollment_port_by_its_fingerprint(served: Running) -> None:
    ca = fetch_ca(served.enrollment_address, fingerprint(served.home.ca), timeout=SECONDS)
    with server_verified_channel(served.enrollment_address, ca) as channel:
        assert (
            join(EnrollmentStub(channel), Applicant().request(served.join_secret("stranger"))).client_id == "stranger"
        )


def test_bytes_that_are_no_message_are_refused_as_such(served: Running) -> None:
    with served.newcomer() as channel, refused("INVALID_ARGUMENT", "argument"):
        channel.unary_unary("/federation.v1.Enrollment/Enroll")(b"\xff\xff\xff", timeout=SECONDS)
