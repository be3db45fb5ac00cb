"""Members that a coordinator knows: their rows are read once, and again after each change; nothing goes on past one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from coordinator.members import membership
from coordinator.members.access.known_members import TABLES, KnownMember, KnownMembers
from federation.record import log_entries
from federation.v1.federation_pb2 import FetchBlobRequest
from federation.v1.federation_pb2_grpc import FederationStub
from storage.database import Database
from storage.models import AuditEntry, Certificate, Client, Rotation
from storage.states import ClientState
from tests.coordinator.rounds.counting import counted
from tests.running import SECONDS, refused
from tests.stage import Player, Stage
from tests.storage.scene import NOON

MEMBER = KnownMember(b"certificate", ClientState.ACTIVE, b"k" * 32, "")


def alone(database: Database) -> bool:
    return not database.serves_many


def own(stage: Stage) -> Database:
    return stage.served.coordinator.record.database


def knock(player: Player) -> None:
    """A call that reads no blob."""
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        list(player.member.stub.FetchBlob(FetchBlobRequest(digest="none"), timeout=SECONDS))


def reads(stage: Stage, call: Callable[[], object]) -> int:
    """How often the caller's row is read during a call."""
    with counted(own(stage)) as counts:
        call()
    return counts.statements["coordinator.members.access.control.Access._check"]


CHANGES: dict[str, Callable[[Session], object]] = {
    "a member's row": lambda session: session.execute(update(Client).values(copied=None)),
    "a certificate": lambda session: session.execute(update(Certificate).values(revoked=None)),
    "a rotation": lambda session: session.add(Rotation(client_id="ann", number=0, rotation=b"", at=NOON)),
}


def test_what_was_noted_is_found_until_a_transaction_changes_a_table_of_members(database: Database) -> None:
    for change in (CHANGES["a member's row"], CHANGES["a certificate"]):
        known = KnownMembers(database)
        known.note("serial", MEMBER, known.changes())
        assert known.find("serial") == (MEMBER if alone(database) else None)
        with database.begin() as session:
            session.execute(select(Client))
            session.add(AuditEntry(at=NOON, actor="a", action="b", digest="", times=1))
        assert known.find("serial") == (MEMBER if alone(database) else None)
        with database.begin() as session:
            change(session)
        assert known.find("serial") is None


def test_what_was_read_before_a_change_is_not_noted_after_it(database: Database) -> None:
    known = KnownMembers(database)
    before = known.changes()
    with database.begin() as session:
        CHANGES["a member's row"](session)
    known.note("serial", MEMBER, before)
    assert known.find("serial") is None


def test_a_transaction_that_fails_counts_as_a_change_since_its_commit_may_have_succeeded(database: Database) -> None:
    known = KnownMembers(database)
    known.note("serial", MEMBER, known.changes())

    def fail() -> None:
        with database.begin() as session:
            CHANGES["a certificate"](session)
            raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        fail()
    assert known.find("serial") is None


def test_each_table_of_members_counts(database: Database) -> None:
    assert set(TABLES) == {Client.__tablename__, Certificate.__tablename__, Rotation.__tablename__}


def test_a_members_row_is_read_once_and_again_after_each_change(stage: Stage) -> None:
    ann = stage.player("ann")
    knock(ann)
    once = 0 if alone(own(stage)) else 1
    assert reads(stage, lambda: knock(ann)) == once
    tag = partial(membership.describe, client_id="ann", tags=["x"], contact=None, by="test", now=NOON)
    for change in (CHANGES["a member's row"], tag):
        with own(stage).begin() as session:
            change(session)
        assert reads(stage, lambda: knock(ann)) == 1
        assert reads(stage, lambda: knock(ann)) == once


def test_the_end_of_a_certificate_is_compared_on_each_call(stage: Stage) -> None:
    ann = stage.player("ann")
    knock(ann)
    with stage.clock.moved(timedelta(days=3650)), refused("UNAUTHENTICATED", "certificate-expired"):
        list(FederationStub(ann.member.channel).FetchBlob(FetchBlobRequest(digest="none"), timeout=SECONDS))
    knock(ann)


class Revoked:
    """Revokes a member before or after one of the coordinator's transactions; `points` counts these places."""

    def __init__(self, stage: Stage, name: str, at: int) -> None:
        self.database, self.name, self.at, self.points, self.busy = own(stage), name, at, 0, False

    def point(self) -> None:
        if self.busy or not threading.current_thread().name.startswith(("service", "access", "MainThread")):
            return
        self.points += 1
        if self.points == self.at:
            self.busy = True
            with self.database.begin() as session:
                membership.revoke(session, self.name, "", by="test", now=NOON)
            self.busy = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While it lasts, the transactions are such places."""

        def within(transaction: Any) -> Any:
            @contextmanager
            def watched(database: Database) -> Iterator[Session]:
                if database is not self.database:
                    with transaction(database) as session:
                        yield session
                    return
                self.point()
                with transaction(database) as session:
                    yield session
                self.point()

            return watched

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Database, "begin", within(Database.begin))
            patch.setattr(Database, "read", within(Database.read))
            self.point()
            yield


@pytest.mark.full
def test_a_member_that_is_revoked_at_any_point_of_its_submission_has_no_reply_recorded_afterwards(stage: Stage) -> None:
    ended, at = set[str](), 1
    while True:
        name = f"gone-{at}"
        run, (player,) = stage.begin(name, more="selection.minimum = 1\nevaluate.every = 0")
        order = player.order()
        revocation = Revoked(stage, name, at)
        with revocation():
            try:
                ended.add("accepted" if player.submit(order).accepted else "refused")
            except grpc.RpcError:
                ended.add("refused")
        entries = stage.served.entries(
            AuditEntry.action.in_([log_entries.ACCEPTED, membership.CLIENT_REVOKED])
            & ((AuditEntry.subject == order.assignment_id) | (AuditEntry.subject == name))
        )
        actions = [entry.action for entry in sorted(entries, key=lambda entry: entry.entry_id)]
        stage.stop_run(run)
        if revocation.points < at:
            break
        assert actions in (
            [membership.CLIENT_REVOKED],
            [log_entries.ACCEPTED, membership.CLIENT_REVOKED],
        ), (at, actions)
        at += 1
    assert ended == {"accepted", "refused"}
    assert at > 3
