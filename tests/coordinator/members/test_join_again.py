"""A member whose certificate has ended joins again: under its own name, with its signing key, and with its history."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from typer.testing import CliRunner, Result

from coordinator.members.membership import revoke
from federation.trust.identity import Role
from federation.trust.join_string import JoinStringFields, secret_hash
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from fedpareto.cli.main import app
from storage.models import AuditEntry, Client
from storage.models import JoinString as JoinRow
from storage.states import ClientState
from tests.coordinator.members.test_renewal import attends, certificates, knocks
from tests.running import SECONDS, Applicant, Running, refused, running
from worker.home import WorkerHome

LONG_AGO = timedelta(days=100)  # longer than a certificate lasts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("again") / "home") as served:
        yield served


def join_again(join: JoinStringFields, home: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["worker", "join", "--home", str(home), *options], input=join.encode() + "\n")


def client(served: Running, name: str) -> Client:
    with served.database.read() as session:
        return session.get_one(Client, name)


def record(served: Running, subject: str) -> list[str]:
    with served.database.read() as session:
        entries = select(AuditEntry.action).where(AuditEntry.subject == subject, AuditEntry.outcome == "")
        return list(session.scalars(entries.order_by(AuditEntry.entry_id)))


@pytest.mark.parametrize("lost", [(), ("tls.key", "certificate.pem")])
def test_a_member_joins_again_with_its_signing_key_and_stays_who_it_was(
    served: Running, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    name = f"late-{len(lost)}"
    old = served.joined(tmp_path / "h", name, ago=LONG_AGO, passphrase=b"correct horse")
    with served.database.begin() as session:
        session.get_one(Client, name).state = ClientState.PENDING
    before = client(served, name)
    with refused("UNAVAILABLE", "unreachable"):  # the TLS handshake fails
        knocks(old)
    for file in lost:
        (tmp_path / "h" / file).unlink()
    result = join_again(served.join_string(name), tmp_path / "h", "--passphrase-file", str(secret))
    assert result.exit_code == 0, result.output
    assert f"{name} is a member of test" in result.output
    assert f"fedpareto admin approve {name}" in result.output, "who waited for approval still does"
    new = MemberFiles.load(tmp_path / "h", b"correct horse")
    assert new.signing_key.public_key() == old.signing_key.public_key()
    assert b"ENCRYPTED" in (tmp_path / "h" / "tls.key").read_bytes()
    attends(new)
    first, second = certificates(served, name)
    assert (first.revoked is None, second.revoked) == (False, None)
    after = client(served, name)
    for field in ("state", "signing_key", "key_id", "enrolled"):
        assert getattr(after, field) == getattr(before, field)
    assert record(served, name) == [
        *("join-string.created", "Enroll"),
        *("join-string.created", "client.joined-again", "certificate.retired"),
    ]


def test_without_the_signing_key_nobody_joins_again_and_the_reason_says_what_to_do(
    served: Running, tmp_path: Path
) -> None:
    member = served.joined(tmp_path / "h", "robbed", ago=LONG_AGO)
    join = served.join_string("robbed")
    with served.newcomer() as channel, refused("ALREADY_EXISTS", "client-exists") as messages:
        EnrollmentStub(channel).Enroll(Applicant().request(join.secret), timeout=SECONDS)
    assert "have robbed revoked, and join under a new name" in messages[0]
    assert served.refusals("Enroll")[-1].outcome == "client-exists"
    thief = Applicant()  # who knows the public key
    request = thief.request(join.secret)
    request.signing_key = member.signing_key.public_key().public_bytes_raw()
    with served.newcomer() as channel, refused("INVALID_ARGUMENT", "proof"):
        EnrollmentStub(channel).Enroll(request, timeout=SECONDS)
    with served.database.read() as session:
        assert session.get_one(JoinRow, secret_hash(join.secret)).used is None
    assert len(certificates(served, "robbed")) == 1
    assert join_again(join, tmp_path / "h").exit_code == 0


def test_a_signing_key_joins_again_under_its_own_name_only(served: Running, tmp_path: Path) -> None:
    applicant, _ = served.enroll("owner")
    served.enroll("other")
    with served.newcomer() as channel, refused("INVALID_ARGUMENT", "signing-key"):
        EnrollmentStub(channel).Enroll(applicant.request(served.join_secret("other")), timeout=SECONDS)


def test_a_revoked_member_does_not_join_again(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "gone", ago=LONG_AGO)
    join = served.join_string("gone")
    with served.database.begin() as session:
        revoke(session, "gone", "left", by="test", now=served.clock())
    result = join_again(join, tmp_path / "h")
    assert result.exit_code == 1
    assert "client-state: gone was revoked and cannot join again" in str(result.exception)
    assert served.refusals("Enroll")[-1].outcome == "client-state"
    assert record(served, "gone") == ["join-string.created", "Enroll", "join-string.created", "client.revoked"]


def test_a_join_string_for_a_member_is_made_on_purpose_and_not_for_a_revoked_one(served: Running) -> None:
    served.enroll("member")
    served.enroll("revoked")
    with served.database.begin() as session:
        revoke(session, "revoked", "", by="test", now=served.clock())
    with served.administrator(Role.SECURITY_OFFICER) as channel:
        stub = AdminStub(channel)
        with refused("ALREADY_EXISTS", "client-exists") as messages:
            stub.CreateJoinString(CreateJoinStringRequest(client_id="member"))
        assert "join-string --again" in messages[0]
        with refused("NOT_FOUND", "client-unknown"):
            stub.CreateJoinString(CreateJoinStringRequest(client_id="nobody", again=True))
        with refused("FAILED_PRECONDITION", "client-state"):
            stub.CreateJoinString(CreateJoinStringRequest(client_id="revoked", again=True))
        made = stub.CreateJoinString(CreateJoinStringRequest(client_id="member", again=True))
    assert JoinStringFields.decode(made.join_string).client_id == "member"
    assert record(served, "member")[-1] == "join-string.created"


def test_a_directory_is_that_of_the_name_and_federation_in_the_join_string(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "ann", ago=LONG_AGO)
    elsewhere = served.join_string("bob")
    result = join_again(elsewhere, tmp_path / "h")
    assert "holds the membership of ann, and the join string is for bob" in str(result.exception)
    with running(tmp_path / "other", federation_id="other") as other:
        result = join_again(other.join_string("ann"), tmp_path / "h")
    assert "is of another federation than test" in str(result.exception)
    (tmp_path / "h" / "signing.key").unlink()
    result = join_again(served.join_string("ann"), tmp_path / "h")
    assert "without the signing key, have ann revoked, and join under a new name" in str(result.exception)
    assert len(certificates(served, "ann")) == 1


def test_a_worker_that_runs_is_not_replaced_behind_its_back(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "busy", ago=LONG_AGO)
    with WorkerHome(tmp_path / "h").lock():
        result = join_again(served.join_string("busy"), tmp_path / "h")
    assert "stop it first" in str(result.exception)
