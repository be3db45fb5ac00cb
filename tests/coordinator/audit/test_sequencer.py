"""The sequencer of the audit log, on both databases: places, checkpoints, crashes, and a log that was changed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.audit.checkpoints import LogError, LogKey, newest_signed, note, noted
from coordinator.audit.sequencer import UNTOLD_SECONDS, Sequencer
from coordinator.fault_state import FaultState
from federation.record import log_entries
from federation.record.merkle import continues
from storage import audit
from storage.database import Database
from tests.coordinator.audit.scene import KEY, NOON, act, checkpoint, edit, wrong
from tests.running import wait_for

Make = Callable[[], Sequencer]


@pytest.fixture
def made(database: Database, tmp_path: Path) -> Make:
    """Makes a sequencer, as a process that begins does."""
    database.entry_key = KEY.entry_key
    return lambda: Sequencer(database, KEY, tmp_path, faults=FaultState(), clock=lambda: NOON)


def begun(database: Database, made: Make, count: int = 2) -> Sequencer:
    """A sequencer that has shown so many entries more."""
    sequencer = made()
    act(database, count)
    sequencer.sequence(show=True)
    return sequencer


def column(database: Database, query: str) -> list[Any]:
    with database.read() as session:
        return list(session.scalars(text(query)))


def numbers(database: Database) -> list[int | None]:
    return column(database, "select number from audit_log order by entry_id")


def test_entries_are_chained_and_signed_and_each_checkpoint_continues_those_before(
    database: Database, made: Make
) -> None:
    sequencer, shown = made(), []
    for count in (1, 300, 7, 400):
        act(database, count)
        assert sequencer.sequence(show=True) == count
        shown.append(checkpoint(sequencer.head(0)))
    assert [one.size for one in shown] == [1, 301, 308, 708]
    assert numbers(database) == list(range(708))
    for before in shown:
        head = sequencer.head(before.size)
        now = checkpoint(head)
        assert head.since == before.size
        assert continues(before.size, before.root, now.size, now.root, head.consistency)
    assert sequencer.shown_size == 708
    for unknown in (0, 709):
        assert (sequencer.head(unknown).since, checkpoint(sequencer.head(unknown)).size) == (0, 708)


def test_members_get_a_step_at_once_and_other_entries_within_a_minute(database: Database, made: Make) -> None:
    sequencer = made()
    act(database)
    sequencer.sequence()  # nothing was shown for a minute
    assert checkpoint(sequencer.head(0)).size == 1
    for _ in range(3):
        act(database)
        sequencer.sequence()
    assert checkpoint(sequencer.head(0)).size == 1
    assert KEY.open(sequencer.newest).size == 4
    act(database, action=log_entries.STEPPED)
    sequencer.sequence()
    assert checkpoint(sequencer.head(0)).size == 5
    act(database)
    sequencer.sequence()
    sequencer.sequence(show=True)
    assert checkpoint(sequencer.head(5)).size == 6
    assert column(database, "select size from audit_checkpoints order by size") == [1, 5, 6]


def test_what_a_dead_process_recorded_or_chained_is_gone_on_with(database: Database, made: Make) -> None:
    begun(database, made, 3)
    act(database, 2)
    made().sequence()  # dies after a batch
    act(database, 2)  # and this one before
    sequencer = made()
    assert sequencer.sequence(show=True) == 2
    assert numbers(database) == list(range(7))
    assert checkpoint(sequencer.head(3)).size == 7


def test_a_batch_that_is_not_committed_is_forgotten(
    database: Database, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequencer = begun(database, made, 3)
    act(database, 2)

    def fail(*_: object) -> None:
        raise OperationalError("insert", {}, RuntimeError("the connection broke"))

    with monkeypatch.context() as patch:
        patch.setattr(audit, "chain", fail)
        with pytest.raises(OperationalError):
            sequencer.sequence(show=True)
    assert checkpoint(sequencer.head(0)).size == 3
    assert sequencer.sequence(show=True) == 2
    again = made()
    again.sequence()
    assert checkpoint(again.head(0)) == checkpoint(sequencer.head(0))


def test_a_transaction_that_is_open_meanwhile_is_chained_later_and_one_that_is_rolled_back_leaves_no_gap(
    database: Database, made: Make
) -> None:
    if database.engine.dialect.name == "sqlite":
        pytest.skip("one writer at a time")
    sequencer, written, go = made(), threading.Event(), threading.Event()

    def slow(undo: bool) -> None:
        with database.begin() as session:
            audit.record(session, at=NOON, actor="a", action="slow")
            session.flush()
            written.set()
            go.wait(60)
            if undo:
                session.rollback()

    threads = [threading.Thread(target=slow, args=(undo,)) for undo in (False, True)]
    for thread in threads:
        written.clear()
        thread.start()
        assert written.wait(60)
    act(database, 2)
    assert sequencer.sequence(show=True) == 2
    go.set()
    for thread in threads:
        thread.join()
    assert sequencer.sequence(show=True) == 1
    assert numbers(database) == [2, 0, 1]
    made().sequence()


def test_the_thread_reads_nothing_until_it_is_told_and_finds_what_other_processes_record_a_little_later(
    database: Database, made: Make
) -> None:
    log = made()
    log.sequence()
    assert log._may_wait() is database.serves_many
    with database.begin() as session:
        audit.record(session, at=NOON, actor="a", action="b")
    assert log._may_wait()
    assert log.sequence() == 1
    assert log._may_wait() is database.serves_many
    log._looked -= UNTOLD_SECONDS
    assert log._may_wait()


def test_the_thread_chains_by_itself_and_signs_the_rest_when_it_stops(database: Database, made: Make) -> None:
    act(database)
    sequencer = made()
    sequencer.start()
    act(database, 4)
    wait_for(lambda: None not in numbers(database), "the entries to have places")
    assert numbers(database) == list(range(5))
    act(database, 2)
    sequencer.stop()
    assert checkpoint(sequencer.head(0)).size == 7


EDITS = {
    "delete from audit_log where number >= 4": "the database has 4 entries .* signed over 6: entries were removed",
    "delete from audit_log where number = 2": "the last entry is number 5, and 5 are there: some were removed",
    "update audit_log set leaf = (select leaf from audit_log where number = 0) where number = 1": "are not those",
    """insert into audit_log (entry_id, at, actor, action, subject, outcome, detail, digest, times, number, leaf)
    select 99, at, actor, action, subject, outcome, detail, digest, times, 6, leaf from audit_log where number = 5""": (
        "1 entries were inserted after the last one that was signed"
    ),
}


@pytest.mark.parametrize("statement", EDITS)
def test_a_coordinator_does_not_go_on_with_a_log_that_is_not_what_it_signed(
    database: Database, made: Make, statement: str
) -> None:
    begun(database, made, 6)
    edit(database, statement)
    with pytest.raises(LogError, match=EDITS[statement]):
        made().sequence()


INSERTED = """insert into audit_log (at, actor, action, subject, outcome, detail, digest, times, tag)
select at, actor, {action}, subject, outcome, detail, digest, times, {tag} from audit_log where entry_id = {row}"""


def found(database: Database) -> list[str]:
    """The actions of the entries that have a place in the log."""
    return column(database, "select action from audit_log where number is not null order by number")


@pytest.mark.parametrize(
    ("name", "statements"),
    {
        "inserted without a tag": [INSERTED.format(action="'client.approved'", tag="null", row=1)],
        "inserted with the tag of another": [
            "update audit_log set tag = null where entry_id = 1",
            INSERTED.format(action="'client.approved'", tag="TAG", row=1),
        ],
        "changed": ["update audit_log set actor = 'eve' where entry_id = 3"],
        "tag removed": ["update audit_log set tag = null where entry_id = 3"],
        "tag changed": ["update audit_log set tag = (select leaf from audit_log where number = 0) where entry_id = 3"],
    }.items(),
)
def test_what_somebody_else_writes_without_a_place_never_gets_one(
    database: Database, made: Make, name: str, statements: list[str]
) -> None:
    sequencer = begun(database, made)
    act(database, 1, "third")
    tag = column(database, "select tag from audit_log where entry_id = 1")[0].hex()
    literal = f"x'{tag}'" if database.engine.dialect.name == "sqlite" else f"decode('{tag}', 'hex')"
    for statement in statements:
        edit(database, statement.replace("TAG", literal))
    sequencer.sequence(show=True)
    act(database, 1, "last")
    sequencer.sequence(show=True)
    inserted = name.startswith("inserted")
    assert found(database) == ["act", "act", *(["third"] if inserted else []), audit.TAMPERED, "last"]
    with database.read() as session:
        [told] = [one.entry for one in audit.chained(session, 0, 10) if one.entry.action == audit.TAMPERED]
        assert not audit.any_unchained(session)
    assert told.subject == ("row 4" if inserted else "row 3")
    assert told.detail.startswith("'client.approved' by 'a' about '' at " if inserted else "'third' by '")
    problems = wrong(database, sequencer.newest)
    assert problems == (["entry 0 was changed: its MAC is not that of what it tells"] if "of another" in name else [])


def test_a_copy_of_an_entry_gets_no_place(database: Database, made: Make) -> None:
    sequencer = begun(database, made)
    again = INSERTED.format(action="action", tag="tag", row=1)
    with pytest.raises(IntegrityError):  # tags are unique
        edit(database, again)
    with database.read() as session:
        [(entry, mac)] = [(one.entry, one.mac) for one in audit.chained(session, 0, 1)]
    assert audit.has_mac(entry, mac, KEY.entry_key)
    # A process with the directory recorded the same twice: the MACs differ.
    act(database, 1)
    assert sequencer.sequence() == 1
    assert found(database) == ["act"] * 3


def test_a_copy_is_found_where_tags_are_not_unique_any_more(database: Database, made: Make) -> None:
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite drops no constraint of a table")
    sequencer = begun(database, made)
    with database.engine.begin() as connection:
        connection.execute(text("alter table audit_log drop constraint uq_audit_log_tag"))
    for _ in range(2):
        edit(database, INSERTED.format(action="action", tag="tag", row=1))
    sequencer.sequence(show=True)
    assert found(database) == ["act", "act", audit.TAMPERED, audit.TAMPERED]


def test_a_database_with_its_checkpoints_from_a_backup_is_older_than_what_the_directory_notes(
    database: Database, made: Make, tmp_path: Path
) -> None:
    begun(database, made, 3)
    begun(database, made, 3)
    edit(database, "delete from audit_log where number >= 3")
    edit(database, "delete from audit_checkpoints where size > 3")
    with pytest.raises(LogError, match=r"checkpoint in its directory was signed over 6"):
        made().sequence()
    with database.read() as session:
        note(tmp_path, newest_signed(session))  # as `coordinator restored` does
    sequencer = made()
    act(database)
    sequencer.sequence(show=True)
    assert checkpoint(sequencer.head(3)).size == 4


def test_a_checkpoint_of_another_key_or_federation_is_none(database: Database, made: Make, tmp_path: Path) -> None:
    begun(database, made, 1)
    assert noted(tmp_path) is not None
    other = LogKey(federation_id="fed", key=Ed25519PrivateKey.generate())
    elsewhere = LogKey(federation_id="other", key=KEY.key)
    for key, why in ((other, "not signed by the log's key"), (elsewhere, "of the federation 'other'")):
        note(tmp_path, key.sign(1, bytes(32), NOON).SerializeToString())
        with pytest.raises(LogError, match=why):
            made().sequence()
    note(tmp_path, b"\xff")
    with pytest.raises(LogError, match="no signed envelope"):
        made().sequence()
