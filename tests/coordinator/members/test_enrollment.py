"""Certificates of members: the first one for a join string, the next one for a new key, proved by both old ones."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.members.authority import Authority
from coordinator.members.enrollment import Application, enroll
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.membership import revoke
from federation.refusals import Refusal
from federation.transport.channels import server_verified_channel
from federation.trust.certificates import CLIENT_LIFETIME, fingerprint, load_certificate, make_ca, make_csr
from federation.trust.identity import parse_peer
from federation.trust.join_string import fetch_ca
from federation.trust.keys import IdentityError, new_tls_key, private_key_pem, replace_private
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import prove_possession, prove_renewal
from federation.v1.enrollment_pb2 import EnrollRequest, EnrollResponse
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from storage.database import Database
from storage.models import Certificate, Client
from storage.states import ClientState
from tests.coordinator.members.scene import AGE, attends, certificates, client, knocks
from tests.running import SECONDS, Applicant, Clock, Running, add_join_string, command, refused, running
from worker.connection import enroll as enrolling
from worker.home import WorkerHome


def absent(served: Running, name: str) -> bool:
    return served.look(lambda session: session.get(Client, name)) is None


def test_a_join_string_and_two_keys_make_a_member(served: Running) -> None:
    applicant = Applicant()
    answer = served.admit(applicant.request(served.join_secret("ward-1")))
    assert (answer.federation_id, answer.client_id, answer.approval_pending) == ("test", "ward-1", False)
    assert list(answer.addresses) == [served.address]
    assert answer.coordinator_key == served.home.signing_key.public_key().public_bytes_raw()
    identity = parse_peer(answer.certificate)
    assert (identity.kind, identity.name, identity.federation_id) == ("client", "ward-1", "test")
    assert timedelta(days=89) < identity.not_after - served.clock() <= timedelta(days=90)
    certificate = x509.load_pem_x509_certificate(answer.certificate)
    assert certificate.public_key() == applicant.tls_key.public_key()
    certificate.verify_directly_issued_by(served.home.ca)
    member = client(served, "ward-1")
    assert member.state is ClientState.ACTIVE
    assert member.signing_key == applicant.signing_key.public_key().public_bytes_raw()
    (row,) = certificates(served, "ward-1")
    assert (row.serial, row.subject, row.revoked) == (identity.serial, identity.uri, None)
    (entry,) = served.entries(action="Enroll", subject="ward-1", outcome="")
    assert entry.actor in ("peer 127.0.0.1", "peer ::1")


def test_the_subject_of_a_request_decides_nothing(served: Running) -> None:
    applicant = Applicant()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "admin")])
    wanted = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("fedpareto://test/admin/mallory")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name).add_extension(wanted, critical=False)
    applicant.csr = builder.sign(applicant.tls_key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    answer = served.admit(applicant.request(served.join_secret("mallory")))
    assert parse_peer(answer.certificate).uri == "fedpareto://test/client/mallory"


def test_a_join_string_works_once_and_the_same_keys_get_the_same_answer_again(served: Running) -> None:
    secret = served.join_secret("once")
    applicant = Applicant()
    request = applicant.request(secret)
    first = served.admit(request)
    assert served.admit(request) == first  # the answer may have been lost
    other, tls_key, signing_key = Applicant(), Applicant(), Applicant()
    tls_key.signing_key, signing_key.tls_key, signing_key.csr = (
        applicant.signing_key,
        applicant.tls_key,
        applicant.csr,
    )
    unproven = Applicant().request(secret)
    unproven.csr, unproven.signing_key = request.csr, request.signing_key
    for again in (other.request(secret), tls_key.request(secret), signing_key.request(secret), unproven):
        with refused("UNAUTHENTICATED", "join-string-used") as messages:
            served.admit(again)
        assert "once" in messages[0]
    assert len(served.entries(action="Enroll", subject="once", outcome="")) == 1  # the first use is on record too
    assert served.refusals("Enroll")[-1].outcome == "join-string-used"
    with served.database.begin() as session:
        revoke(session, "once", "it left", by="operator", now=served.clock())
    with refused("UNAUTHENTICATED", "join-string-used"):
        served.admit(request)


class LosesTheAnswer:
    """Calls the coordinator, and then the connection breaks."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = EnrollmentStub(channel)

    def Enroll(self, request: EnrollRequest, timeout: float) -> EnrollResponse:  # noqa: N802
        self._stub.Enroll(request, timeout=timeout)
        raise grpc.RpcError("the connection broke")


def test_a_newcomer_whose_answer_was_lost_joins_with_the_same_join_string_and_its_name_is_not_burned(
    served: Running, tmp_path: Path
) -> None:
    join, home = served.join_string("unlucky"), WorkerHome(tmp_path / "member")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrolling, "EnrollmentStub", LosesTheAnswer)
        with pytest.raises(enrolling.EnrollmentError, match=r"keys are kept in .*run the same command again"):
            enrolling.enroll(home, join, passphrase=b"secret")
    assert not home.directory.exists()
    (kept,) = tmp_path.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["signing.key", "tls.key"]
    assert b"ENCRYPTED" in (kept / "signing.key").read_bytes()
    for wrong in (b"another", None):
        with pytest.raises((enrolling.EnrollmentError, IdentityError), match="passphrase"):
            enrolling.enroll(home, join, passphrase=wrong)
    served.admit(Applicant().request(served.join_secret("bystander")))
    enrolled = enrolling.enroll(home, join, passphrase=b"secret")
    assert [path.name for path in tmp_path.iterdir()] == ["member"]
    assert enrolled.member.signing_key.public_key().public_bytes_raw() == client(served, "unlucky").signing_key
    attends(MemberFiles.load(home.directory, b"secret"))
    assert len(certificates(served, "unlucky")) == 1


def test_keys_whose_outcome_is_unknown_stay_also_when_a_later_call_is_refused(served: Running, tmp_path: Path) -> None:
    join, home = served.join_string("patient"), WorkerHome(tmp_path / "member")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrolling, "EnrollmentStub", LosesTheAnswer)
        with pytest.raises(enrolling.EnrollmentError):
            enrolling.enroll(home, join)
    with pytest.raises(enrolling.EnrollmentError, match=r"join-string-invalid.* keys are kept in "):
        enrolling.enroll(home, replace(join, secret=bytes(32)))
    again = served.join_string("patient")  # as `admin join-string --again` makes it
    assert enrolling.enroll(home, again).member.client_id == "patient"
    assert [path.name for path in tmp_path.iterdir()] == ["member"]


@pytest.mark.parametrize("secret", [b"", b"x" * 32, b"x" * 31, b"x" * 100_000])
def test_a_wrong_join_string_is_refused(served: Running, secret: bytes) -> None:
    with refused("UNAUTHENTICATED", "join-string-invalid"):
        served.admit(Applicant().request(secret))
    assert any(entry.outcome == "join-string-invalid" for entry in served.refusals("Enroll"))


def test_an_expired_join_string_is_refused(served: Running) -> None:
    secret = served.join_secret("late", lifetime=timedelta(seconds=-1))
    with refused("UNAUTHENTICATED", "join-string-expired"):
        served.admit(Applicant().request(secret))
    assert any(entry.outcome == "join-string-expired" for entry in served.refusals("Enroll"))
    assert absent(served, "late")


def bad_csrs() -> list[bytes]:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    p384 = builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())
    ed25519 = builder.sign(Ed25519PrivateKey.generate(), None)
    forged = bytearray(Applicant().csr)
    forged[-3] ^= 1
    encoded = [csr.public_bytes(serialization.Encoding.DER) for csr in (p384, ed25519)]
    return [b"", b"nonsense", *encoded, bytes(forged), Applicant().csr + b"\0" * 5000]


def test_a_bad_request_is_refused_and_leaves_the_join_string_as_it_was(served: Running) -> None:
    secret = served.join_secret("careful")
    good = Applicant()
    request = good.request(secret)
    for csr in bad_csrs():
        bad = Applicant()
        bad.csr = csr
        with refused("INVALID_ARGUMENT", "csr"):
            served.admit(bad.request(secret))
    for key in (b"", b"k" * 31, bytes(32)):
        with refused("INVALID_ARGUMENT", "signing-key"):
            served.admit(EnrollRequest(secret=secret, csr=good.csr, signing_key=key, proof=request.proof))
    for proof in (b"", b"p" * 64, prove_possession(good.signing_key, b"x" * 32, good.csr)):
        with refused("INVALID_ARGUMENT", "proof"):
            served.admit(EnrollRequest(secret=secret, csr=good.csr, signing_key=request.signing_key, proof=proof))
    with refused("INVALID_ARGUMENT", "proof"):  # a proof for another request: the key holder did not ask for this one
        other = Applicant().csr
        served.admit(EnrollRequest(secret=secret, csr=other, signing_key=request.signing_key, proof=request.proof))
    assert absent(served, "careful")
    assert served.admit(request).client_id == "careful"


def test_a_signing_key_belongs_to_one_member(served: Running) -> None:
    applicant, _ = served.enroll("owner")
    served.enroll("other")
    for name in ("borrower", "other"):  # that is new, and that would join again
        with refused("INVALID_ARGUMENT", "signing-key"):
            served.admit(applicant.request(served.join_secret(name)))


def test_of_many_transactions_with_one_join_string_one_wins_on_each_back_end(database: Database) -> None:
    key, clock = new_tls_key(), Clock()
    authority = Authority("test", make_ca(key, "test", clock()), key)
    secret, database.entry_key = b"s" * 32, bytes(32)
    with database.begin() as session:
        add_join_string(session, secret, "race", now=clock())
    with database.read() as session:
        rights = LoggedRights.read(session, bytes(32))
    start = threading.Barrier(6)

    def attempt(_: int) -> str:
        request = Applicant().request(secret)
        application = Application(secret, request.csr, request.signing_key, request.proof, "test")
        start.wait(SECONDS)
        try:
            with database.begin() as session:
                given: dict[str, Any] = {"authority": authority, "rights": rights, "approval": True, "peer": "test"}
                row = enroll(session, application, now=clock(), **given)[0]
                return row.state.value
        except Refusal as refusal:
            return refusal.reason

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(attempt, range(6))) == ["PENDING", *["join-string-used"] * 5]


def test_where_approval_is_asked_for_a_new_member_waits(tmp_path: Path) -> None:
    with running(tmp_path / "home", approval=True) as served:
        _, answer = served.enroll("patient")
        assert answer.approval_pending
        assert client(served, "patient").state is ClientState.PENDING


def test_a_stranger_finds_the_ca_on_the_enrollment_port_by_its_fingerprint(served: Running) -> None:
    ca = fetch_ca(served.enrollment_address, fingerprint(served.home.ca), timeout=SECONDS)
    with server_verified_channel(served.enrollment_address, ca) as channel:
        request = Applicant().request(served.join_secret("stranger"))
        assert EnrollmentStub(channel).Enroll(request, timeout=SECONDS).client_id == "stranger"


def test_the_command_renews_and_the_old_certificate_ends_when_the_new_one_attends(
    served: Running, tmp_path: Path
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    old = served.joined(tmp_path / "h", "hospital", ago=AGE, passphrase=b"correct horse")
    said = command("worker", "renew", "--home", tmp_path / "h", "--passphrase-file", secret).output
    assert "hospital has a new certificate, until " in said
    (tmp_path / "h" / "worker.toml").write_text('format = 1\npassphrase_file = "../passphrase"\n')
    assert "no restore waits for you" in command("worker", "restored", "--home", tmp_path / "h").output
    new = MemberFiles.load(tmp_path / "h", b"correct horse")
    assert new.tls_key.public_key() != old.tls_key.public_key()
    assert new.not_after > datetime.now(UTC) + CLIENT_LIFETIME - timedelta(minutes=10)
    assert (new.client_id, new.signing_key.public_key()) == ("hospital", old.signing_key.public_key())
    assert b"ENCRYPTED" in (tmp_path / "h" / "tls.key").read_bytes()
    for member in (old, new, old):  # nobody is locked out by an answer that got lost
        with refused("PERMISSION_DENIED", "blob-not-offered"):
            knocks(member)
    attends(old)
    assert [row.revoked for row in certificates(served, "hospital")] == [None, None]
    attends(new)
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        knocks(old)
    attends(new)
    retired, present = certificates(served, "hospital")
    assert retired.revoked is not None
    assert present.revoked is None
    record = [(entry.action, entry.detail) for entry in served.entries(actor=present.subject, outcome="")]
    assert record == [("Renew", f"certificate {present.serial}"), ("certificate.retired", retired.serial)]


@pytest.mark.parametrize("reason", ["proof", "csr"])
def test_a_stolen_tls_key_renews_nothing_and_neither_does_a_request_that_is_none(
    served: Running, tmp_path: Path, reason: str
) -> None:
    member = served.joined(tmp_path / "h", f"robbed-{reason}", ago=AGE)
    csr = make_csr(new_tls_key()) if reason == "proof" else b"no request"
    thief = Ed25519PrivateKey.generate()
    with member.channel() as channel, refused("INVALID_ARGUMENT", reason):
        request = RenewRequest(csr=csr, proof=prove_renewal(thief, csr))
        FederationStub(channel).Renew(request, timeout=SECONDS)
    assert len(certificates(served, member.client_id)) == 1


def test_a_running_worker_is_not_renewed_behind_its_back(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "busy", ago=AGE)
    with WorkerHome(tmp_path / "h").lock():
        done = command("worker", "renew", "--home", tmp_path / "h", code=1)
    assert "stop it first" in str(done.exception)
    assert len(certificates(served, "busy")) == 1


def test_a_revoked_member_renews_nothing(served: Running, tmp_path: Path) -> None:
    member = served.joined(tmp_path / "h", "gone", ago=AGE)
    with served.database.begin() as session:
        session.get_one(Certificate, certificates(served, "gone")[0].serial).revoked = datetime.now(UTC)
    before = (tmp_path / "h" / "certificate.pem").read_bytes()
    done = command("worker", "renew", "--home", tmp_path / "h", code=1)
    assert "did not renew the certificate of gone: certificate-revoked" in str(done.exception)
    assert (tmp_path / "h" / "certificate.pem").read_bytes() == before == member.certificate


@pytest.mark.parametrize("written", [(), ("tls.key",), ("tls.key", "certificate.pem")])
def test_key_and_certificate_change_together_wherever_the_machine_dies(
    served: Running, tmp_path: Path, written: tuple[str, ...]
) -> None:
    old = served.joined(tmp_path / "h", f"crash-{len(written)}", ago=AGE)
    applicant, answer = served.enroll(f"other-{len(written)}")
    files = {"tls.key": private_key_pem(applicant.tls_key), "certificate.pem": answer.certificate}
    journal = json.dumps({name: data.decode() for name, data in files.items()})
    replace_private(tmp_path / "h" / "replacing.json", journal.encode())
    for name in written:
        replace_private(tmp_path / "h" / name, files[name])
    for _ in range(2):
        found = MemberFiles.load(tmp_path / "h")
        assert found.certificate == answer.certificate != old.certificate
        assert load_certificate(found.certificate).public_key() == found.tls_key.public_key()
    assert not (tmp_path / "h" / "replacing.json").exists()
