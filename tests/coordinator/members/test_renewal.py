"""A next certificate: for a new key, proved by both old ones; the old one ends when the member attends with the new."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.trust.certificates import CLIENT_LIFETIME, load_certificate, make_csr
from federation.trust.keys import new_tls_key, private_key_pem, replace_private
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import prove_renewal
from federation.v1.federation_pb2 import RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from storage.models import Certificate
from tests.coordinator.members.scene import attends, certificates, knocks
from tests.running import SECONDS, Running, command, refused
from worker.home import WorkerHome

AGE = timedelta(days=80)  # of the certificates that are to be renewed


def test_the_command_renews_and_the_old_certificate_ends_when_the_new_one_attends(
    served: Running, tmp_path: Path
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    old = served.joined(tmp_path / "h", "hospital", ago=AGE, passphrase=b"correct horse")
    said = command("worker", "renew", "--home", tmp_path / "h", "--passphrase-file", secret).output
    assert "hospital has a new certificate, until " in said
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
