"""A member whose certificate has ended joins again: under its own name, with its signing key, and with its history."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.members.membership import revoke
from federation.trust.identity import Role
from federation.trust.join_string import JoinStringFields, secret_hash
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from storage.models import Client
from storage.models import JoinString as JoinRow
from storage.states import ClientState
from tests.coordinator.members.scene import attends, certificates, client, knocks
from tests.running import Applicant, Running, command, refused, running
from worker.connection import enroll as enrolling
from worker.home import WorkerHome

LONG_AGO = timedelta(days=100)  # longer than a certificate lasts


def join_again(join: JoinStringFields, home: Path, *options: object, code: int = 0) -> str:
    """What the command says, or why it fails."""
    done = command("worker", "join", "--home", home, *options, text=join.encode() + "\n", code=code)
    return done.output + str(done.exception or "")


def record(served: Running, subject: str) -> list[str]:
    return [entry.action for entry in served.entries(subject=subject, outcome="")]


@pytest.mark.parametrize("lost", [(), ("tls.key", "certificate.pem")])
def test_a_member_joins_again_with_its_signing_key_and_stays_who_it_was(
    served: Running, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    name = f"late-{len(lost)}"
    old = served.joined(tmp_path / "h", name, ago=LONG_AGO, passphrase=b"correct horse")
    with served.database.begin() as session:
        member = session.get_one(Client, name)
        member.state, member.start = ClientState.PENDING, "ab" * 16
    before = client(served, name)
    with refused("UNAVAILABLE", "unreachable"):  # the TLS handshake fails
        knocks(old)
    for file in lost:
        (tmp_path / "h" / file).unlink()
    said = join_again(served.join_string(name), tmp_path / "h", "--passphrase-file", secret)
    assert f"{name} is a member of test" in said
    assert f"fedpareto admin approve {name}" in said, "who waited for approval still does"
    new = MemberFiles.load(tmp_path / "h", b"correct horse")
    assert new.signing_key.public_key() == old.signing_key.public_key()
    assert b"ENCRYPTED" in (tmp_path / "h" / "tls.key").read_bytes()
    assert client(served, name).start == "", "the new directory knows no start of the lost one"
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


def test_a_member_whose_answer_was_lost_joins_again_with_the_same_join_string(
    served: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.joined(tmp_path / "h", "lucky", ago=LONG_AGO)
    join, home, exchange = served.join_string("lucky"), WorkerHome(tmp_path / "h"), enrolling._exchange

    def lost(*given: Any) -> Any:
        exchange(*given)
        raise enrolling.AnswerLost("the connection broke")

    monkeypatch.setattr(enrolling, "_exchange", lost)
    with pytest.raises(enrolling.EnrollmentError, match="run the same command again"):
        enrolling.join_again(home, join)
    monkeypatch.setattr(enrolling, "_exchange", exchange)
    attends(enrolling.join_again(home, join).member)
    assert len(certificates(served, "lucky")) == 2
    assert not home.joining.exists()


def test_without_the_signing_key_nobody_joins_again_and_the_reason_says_what_to_do(
    served: Running, tmp_path: Path
) -> None:
    member = served.joined(tmp_path / "h", "robbed", ago=LONG_AGO)
    join = served.join_string("robbed")
    with refused("ALREADY_EXISTS", "client-exists") as messages:
        served.admit(Applicant().request(join.secret))
    assert "have robbed revoked, and join under a new name" in messages[0]
    assert served.refusals("Enroll")[-1].outcome == "client-exists"
    thief = Applicant()  # who knows the public key
    request = thief.request(join.secret)
    request.signing_key = member.signing_key.public_key().public_bytes_raw()
    with refused("INVALID_ARGUMENT", "proof"):
        served.admit(request)
    assert served.look(lambda session: session.get_one(JoinRow, secret_hash(join.secret)).used) is None
    assert len(certificates(served, "robbed")) == 1
    join_again(join, tmp_path / "h")


def test_a_revoked_member_does_not_join_again(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "gone", ago=LONG_AGO)
    join = served.join_string("gone")
    with served.database.begin() as session:
        revoke(session, "gone", "left", by="test", now=served.clock())
    said = join_again(join, tmp_path / "h", code=1)
    assert "client-state: gone was revoked and cannot join again" in said
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
    said = join_again(elsewhere, tmp_path / "h", code=1)
    assert "holds the membership of ann, and the join string is for bob" in said
    with running(tmp_path / "other", federation_id="other") as other:
        said = join_again(other.join_string("ann"), tmp_path / "h", code=1)
    assert "is of another federation than test" in said
    (tmp_path / "h" / "signing.key").unlink()
    said = join_again(served.join_string("ann"), tmp_path / "h", code=1)
    assert "without the signing key, have ann revoked, and join under a new name" in said
    assert len(certificates(served, "ann")) == 1


def test_a_worker_that_runs_is_not_replaced_behind_its_back(served: Running, tmp_path: Path) -> None:
    served.joined(tmp_path / "h", "busy", ago=LONG_AGO)
    with WorkerHome(tmp_path / "h").lock():
        assert "stop it first" in join_again(served.join_string("busy"), tmp_path / "h", code=1)
