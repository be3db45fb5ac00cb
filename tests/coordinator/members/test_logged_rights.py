"""Rights that somebody wrote into the database: the audit log does not tell of them, and they give nothing."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import create_engine, inspect, select, text, update
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogError
from coordinator.check import check_home
from coordinator.home import CoordinatorHome
from coordinator.members.administrators import revoke_administrator
from coordinator.members.membership import revoke
from coordinator.server import serving
from federation.digests import digest
from federation.findings import CheckOutcome
from federation.trust.envelope import envelope_digest, key_id, sign
from federation.trust.identity import Action, Role
from federation.trust.join_string import secret_hash
from federation.v1 import admin_pb2 as messages
from federation.v1.admin_pb2_grpc import AdminStub
from storage.database import Database
from storage.models import ActionRequest, Administrator, AuditEntry, Certificate, Client, JoinString, Run
from storage.states import ClientState, RequestState, RunState
from tests.coordinator.members.scene import Officer, client, fetches
from tests.few import few_of
from tests.running import SECONDS, Applicant, Clock, Running, refused, running, wait_for
from tests.stage import Stage, spec

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
OFFICER = ["security-officer", "viewer"]


def forged(key: Ed25519PrivateKey, name: str) -> Administrator:
    """The row of an officer that nobody has issued."""
    public = key.public_key()
    row = {"key_id": key_id(public).hex(), "name": name, "signing_key": public.public_bytes_raw()}
    return Administrator(**row, roles=OFFICER, issued=NOW)


# --- while the coordinator serves


SETTINGS = {"approval": True, "two_officers": ["revoke"]}
BOTH_DATABASES = False


@pytest.fixture
def officer(served: Running) -> Officer:
    return Officer(served, f"o-{served.clock().timestamp():.6f}".replace(".", "-"))


def edit(served: Running, statement: str, **values: object) -> None:
    """Changes the database behind the coordinator's back, when all entries of the log have their place.

    Then the coordinator changes some member itself: it remembers the rows of members until it does.
    """
    served.coordinator.record.sequencer.sequence()
    with served.database.engine.begin() as connection:
        assert connection.execute(text(statement), values).rowcount == 1, statement
    with served.coordinator.record.database.begin() as session:
        session.execute(update(Client).where(Client.client_id == "").values(copied=None))


def revoked(served: Running, officer: Officer) -> None:
    with served.database.begin() as session:
        revoke_administrator(session, officer.name, "left", least=1, by="test", now=served.clock())


def test_an_officer_whose_row_was_inserted_does_not_log_in_and_the_refusal_is_recorded(
    served: Running, officer: Officer
) -> None:
    key = Ed25519PrivateKey.generate()
    with served.database.begin() as session:
        session.add(forged(key, "mallory"))
    officer.name, officer.key = "mallory", key
    with refused("PERMISSION_DENIED", "unlogged") as said:
        officer.login()
    assert "no entry of the audit log tells of the administrator mallory" in said[0]
    recorded = served.refusals("Login")[-1]
    assert (recorded.outcome, "mallory" in recorded.detail) == ("unlogged", True)
    with served.database.begin() as session:
        assert session.scalars(select(Certificate).filter_by(administrator=officer.row)).all() == []
        session.delete(session.get_one(Administrator, officer.row))


def undo_revocation(served: Running, officer: Officer) -> None:
    revoked(served, officer)
    edit(served, "update administrators set ended = null where key_id = :key", key=officer.row)


def undo_end(served: Running, officer: Officer) -> None:
    Officer(served, officer.name)
    edit(served, "update administrators set ended = null where key_id = :key", key=officer.row)


def hide_revocation(served: Running, officer: Officer) -> None:
    """The entry of the log, too, that has its place already and is not the newest."""
    revoked(served, officer)
    Officer(served, f"later-{officer.name}")
    served.coordinator.record.sequencer.sequence()
    edit(served, "delete from audit_log where action = 'admin.revoked' and subject = :name", name=officer.name)
    edit(served, "update administrators set ended = null where key_id = :key", key=officer.row)


def give_role(served: Running, officer: Officer) -> None:
    roles = '["operator", "security-officer", "viewer"]'
    edit(served, "update administrators set roles = :roles where key_id = :key", roles=roles, key=officer.row)


def give_name(served: Running, officer: Officer) -> None:
    edit(served, "update administrators set name = 'admin' where key_id = :key", key=officer.row)
    officer.name = "admin"


def give_key(served: Running, officer: Officer) -> None:
    """The officer's name and roles for another key, in a row that takes the place of the officer's."""
    other = Ed25519PrivateKey.generate()
    with served.database.begin() as session:
        session.add(forged(other, officer.name))
        session.get_one(Administrator, officer.row).ended = NOW
    officer.key = other


@pytest.mark.parametrize("change", [undo_revocation, hide_revocation, undo_end, give_role, give_name, give_key])
def test_an_edited_row_of_an_administrator_gives_no_login(
    served: Running, officer: Officer, change: Callable[[Running, Officer], None]
) -> None:
    change(served, officer)
    with refused("PERMISSION_DENIED", "unlogged"):
        officer.login()


@pytest.mark.parametrize("undo", [undo_revocation, undo_end])
def test_a_certificate_whose_end_was_undone_is_refused(
    served: Running, officer: Officer, undo: Callable[[Running, Officer], None]
) -> None:
    officer.stub.ListClients(messages.ListClientsRequest(), timeout=SECONDS)
    undo(served, officer)
    edit(served, "update certificates set revoked = null where administrator = :key", key=officer.row)
    with refused("PERMISSION_DENIED", "unlogged") as said:
        officer.stub.ListClients(messages.ListClientsRequest(), timeout=SECONDS)
    assert f"the administrator {officer.name} with this certificate" in said[0]


def test_a_member_gains_nothing_by_an_edited_row(served: Running) -> None:
    with served.member("ann") as channel:
        fetches(channel)
        edit(served, "update clients set state = 'ACTIVE' where client_id = 'ann'")  # as if it were approved
        fetches(channel, answer="unlogged")
        edit(served, "update clients set state = 'PENDING' where client_id = 'ann'")
        key = client(served, "ann").signing_key
        edit(served, "update clients set signing_key = :key where client_id = 'ann'", key=bytes(range(32)))
        fetches(channel, answer="unlogged")
        edit(served, "update clients set signing_key = :key where client_id = 'ann'", key=key)
        fetches(channel)
        with served.database.begin() as session:
            revoke(session, "ann", "left", by="test", now=served.clock())
        edit(served, "update clients set state = 'ACTIVE' where client_id = 'ann'")
        edit(served, "update certificates set revoked = null where client_id = 'ann'")
        fetches(channel, answer="unlogged")


def test_a_join_string_that_was_written_into_the_database_makes_no_member(served: Running) -> None:
    now, hour = served.clock(), timedelta(hours=1)
    secret, ended, cancelled = b"i" * 32, served.join_secret("late", -hour), served.join_secret("off")
    with served.database.begin() as session:
        row = JoinString(client_id="intruder", created_by="admin", created=now, expires=now + hour)
        row.secret_hash = secret_hash(secret)
        session.add(row)
    with served.administrator(Role.SECURITY_OFFICER) as channel:
        AdminStub(channel).CancelJoinStrings(messages.CancelJoinStringsRequest(client_id="off"), timeout=SECONDS)
    for key, column, value in ((ended, "expires", now + hour), (cancelled, "cancelled", None)):
        with served.database.begin() as session:
            setattr(session.get_one(JoinString, secret_hash(key)), column, value)
    for key in (secret, ended, cancelled):
        with refused("PERMISSION_DENIED", "unlogged"):
            served.admit(Applicant().request(key))
    added = served.look(lambda session: [session.get(Client, name) for name in ("intruder", "late", "off")])
    assert added == [None] * 3


def test_one_officer_cannot_make_another_one_or_a_refused_request_by_an_edit(served: Running, officer: Officer) -> None:
    served.enroll("target")
    accomplice = Ed25519PrivateKey.generate()
    request = sign(officer.request(Action.REVOKE, "target", officer="second"), accomplice)
    name, now = envelope_digest(request), served.clock()
    with served.database.begin() as session:
        session.add(second := forged(accomplice, "second"))
        session.flush()
        row = ActionRequest(request_id=name, state=RequestState.OPEN, requested_by=second.key_id)
        row.envelope, row.created, row.expires = request.SerializeToString(), now, now + timedelta(hours=1)
        session.add(row)
    with refused("PERMISSION_DENIED", "unlogged"):
        officer.decide(messages.ActionRequest(request_id=name))

    other = Officer(served, f"p{officer.name}")  # whom the inserted request does not keep from the same one
    withheld = other.ask(Action.REVOKE, "target")
    officer.decide(withheld, consent=False)
    undecided = "state = 'OPEN', decided_by = null, decision = null, ended = null"
    edit(served, f"update action_requests set {undecided} where request_id = :id", id=withheld.request_id)
    with refused("PERMISSION_DENIED", "unlogged") as said:
        officer.decide(withheld)
    assert "the audit log tells of its decision" in said[0]
    assert client(served, "target").state is ClientState.PENDING


def test_a_run_whose_specification_was_edited_or_that_was_inserted_pauses(stage: Stage) -> None:
    (ann,) = stage.cast(task := stage.task(), "ann")
    run = stage.submit(spec("edited", task), paused=True)
    longer = spec("edited", task, 9)
    statement = "update runs set spec = :spec, spec_digest = :digest where run_id = :run"
    edit(stage.served, statement, spec=longer, digest=digest(longer), run=run)
    stage.resume(run)
    reason = wait_for(lambda: stage.run(run).reason, "the reason of the pause")
    assert reason.startswith(f"record: runs {run}: spec: no entry of the audit log tells that this run was submitted")

    def insert() -> None:
        row = stage.run(run)
        values = {column.key: getattr(row, column.key) for column in inspect(Run).columns}
        database = Database.open(stage.served.home.database_url)
        with closing(database), database.begin() as session:
            session.add(Run(**{**values, "run_id": "f" * 12, "name": "inserted", "state": RunState.RUNNING}))

    stage.restart(insert)
    assert wait_for(lambda: stage.run("f" * 12).reason, "the pause").startswith("record: runs ffffffffffff: spec: no")
    assert not ann.orders()


# --- at the start, and in a check


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a coordinator that has served: with an officer, a viewer, one revoked, one issued twice."""
    directory = tmp_path_factory.mktemp("made")
    with running(directory / "home", approval=True) as served:
        Officer(served, "viv", Role.VIEWER)
        for name in ("bea", "twice", "twice"):
            Officer(served, name)
        revoked(served, Officer(served, "gone"))
        for name in ("waits", "left"):
            served.enroll(name)
        with served.database.begin() as session:
            revoke(session, "left", "", by="test", now=served.clock())
    return directory / "home"


def insert_row(session: Session) -> None:
    session.add(forged(Ed25519PrivateKey.generate(), "mallory"))


def insert_row_and_entry(session: Session) -> None:
    """With an entry that has no tag."""
    insert_row(session)
    session.add(AuditEntry(at=NOW, actor="coordinator admin", action="admin.issued", subject="mallory"))


def hide_entry(session: Session) -> None:
    """The entry of a revocation becomes another one."""
    session.execute(text("update audit_log set action = 'act' where action = 'admin.revoked'"))
    session.execute(text("update administrators set ended = null where name = 'gone'"))


Statement = str | Callable[[Session], None]
UNKNOWN = "no entry of the log tells of its signing key with these roles"
AT_REST: dict[str, tuple[Statement, str]] = {
    "row inserted": (insert_row, f"administrator mallory: {UNKNOWN}"),
    "row and entry inserted": (insert_row_and_entry, f"administrator mallory: {UNKNOWN}"),
    "name": ("update administrators set name = 'eve' where name = 'bea'", f"administrator eve: {UNKNOWN}"),
    "role": (
        """update administrators set roles = '["security-officer", "viewer"]' where name = 'viv'""",
        f"administrator viv: {UNKNOWN}",
    ),
    "key": ("update administrators set signing_key = cast(key_id as blob) where name = 'bea'", UNKNOWN),
    "id of the key": ("update administrators set key_id = 'x' where name = 'bea'", UNKNOWN),
    "revocation undone": ("update administrators set ended = null where name = 'gone'", "tells of its revocation"),
    "revocation hidden": (hide_entry, "is not what its leaf was made of: 'act'"),
    "older key": ("update administrators set ended = null where name = 'twice'", "the log tells of a newer one"),
    "ended": ("update administrators set ended = issued where name = 'bea'", "does not tell of its revocation"),
    "deleted": ("delete from administrators where name = 'bea'", "administrator bea: the log tells of it, and it is"),
    "approved": ("update clients set state = 'ACTIVE' where client_id = 'waits'", "does not tell of its approval"),
    "back again": ("update clients set state = 'ACTIVE' where client_id = 'left'", "the log tells of its revocation"),
    "member's key": ("update clients set signing_key = cast(key_id as blob) where client_id = 'waits'", "client waits"),
    "member deleted": ("delete from clients where client_id = 'waits'", "client waits: the log tells that it enrolled"),
}


def edited(made: Path, directory: Path, change: Statement) -> Path:
    """A copy of the directory whose database somebody has edited."""
    home = shutil.copytree(made, directory / "home")
    engine = create_engine(CoordinatorHome.load(home).database_url)  # keeps no foreign keys
    with Session(engine) as session:
        if isinstance(change, str):
            assert session.execute(text(change)).rowcount > 0  # type: ignore[attr-defined]
        else:
            change(session)
        session.commit()
    engine.dispose()
    return home


async def start(home: CoordinatorHome) -> None:
    async with serving(home):
        pass


FEW = ("row inserted", "role", "revocation hidden", "approved")


@pytest.mark.parametrize("name", few_of(AT_REST, *FEW))
def test_a_coordinator_does_not_start_with_rights_that_the_log_does_not_tell_of(
    made: Path, tmp_path: Path, name: str
) -> None:
    change, words = AT_REST[name]
    home = edited(made, tmp_path, change)
    with pytest.raises(LogError) as refusal:
        asyncio.run(start(CoordinatorHome.load(home)))
    assert words in str(refusal.value)
    assert "restore the newest backup" in str(refusal.value)
    found = list(check_home(CoordinatorHome.load(home), now=datetime.now(UTC)))
    failed = {item.subject for item in found if item.outcome is CheckOutcome.FAILED}
    assert failed & {"rights", "audit log"}, found


def test_the_directory_that_nobody_edited_is_served(made: Path, tmp_path: Path) -> None:
    home = CoordinatorHome.load(shutil.copytree(made, tmp_path / "home"))
    Running(home, Clock()).stop()
    assert all(item.outcome is CheckOutcome.OK for item in check_home(home, now=datetime.now(UTC)))
