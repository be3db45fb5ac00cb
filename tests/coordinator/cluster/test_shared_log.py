"""Several coordinators chain one audit log on PostgreSQL: in turns, also when one of them was frozen."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select

from coordinator.audit.checkpoints import LogError
from coordinator.audit.sequencer import Sequencer
from coordinator.fault_state import FaultState
from coordinator.ownership import claim_database
from federation.record.log_entries import LogEntry
from federation.record.merkle import continues
from federation.trust.certificates import make_ca
from federation.trust.keys import new_tls_key
from storage.database import Database
from storage.models import AuditEntry, Checkpoint
from tests.coordinator.audit.scene import KEY, NOON, act, checkpoint, edit, wrong

Make = Callable[[str], Sequencer]
pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def database(database: Database) -> Database:
    """That of a federation."""
    database.entry_key = KEY.entry_key
    claim_database(database, "fed", make_ca(new_tls_key(), "fed", NOON), now=NOON)
    return database


@pytest.fixture
def heard() -> dict[str, list[LogEntry]]:
    """The entries that each coordinator has heard of."""
    return {}


@pytest.fixture
def made(database: Database, tmp_path: Path, heard: dict[str, list[LogEntry]]) -> Make:
    """Makes the sequencer of a coordinator with a directory of its own."""

    def make(name: str) -> Sequencer:
        directory, listener = tmp_path / name, heard.setdefault(name, []).extend
        directory.mkdir(exist_ok=True)
        return Sequencer(database, KEY, directory, faults=FaultState(), clock=lambda: NOON, listener=listener)

    return make


def test_each_coordinator_goes_on_where_another_one_has_stopped(
    database: Database, made: Make, heard: dict[str, list[LogEntry]]
) -> None:
    ann, ben = made("ann"), made("ben")
    for turn in range(6):
        act(database)
        assert [one.sequence(show=turn == 5) for one in ((ann, ben), (ben, ann))[turn % 2]] == [1, 0]
    assert ann.newest == ben.newest
    assert ann.digest(6) == ben.digest(6)
    assert heard["ann"] == heard["ben"]
    assert [entry.number for entry in heard["ann"]] == list(range(6))
    assert wrong(database) == []


def test_a_checkpoint_that_one_coordinator_has_shown_is_kept_by_the_others(database: Database, made: Make) -> None:
    ann, ben = made("ann"), made("ben")
    act(database)
    ann.sequence(show=True)
    shown = ann.head(0)
    for _ in range(2):
        act(database)
        ben.sequence()
    with database.read() as session:
        assert session.scalars(select(Checkpoint.size).order_by(Checkpoint.size)).all() == [1, 3]
    ann.sequence(show=True)
    head = ann.head(1)
    first, second = checkpoint(shown), checkpoint(head)
    assert (first.size, second.size) == (1, 3)
    assert continues(first.size, first.root, second.size, second.root, head.consistency)


def test_a_member_that_comes_from_another_coordinator_gets_the_proof_that_the_log_goes_on(
    database: Database, made: Make
) -> None:
    ann, ben = made("ann"), made("ben")
    act(database)
    ben.sequence(show=True)
    act(database, 4)
    ann.sequence(show=True)
    assert (ben.shown_size, ann.shown_size) == (1, 5)
    kept = checkpoint(ann.head(0))
    head = ben.head(kept.size)
    shown = checkpoint(head)
    assert (head.since, shown.size) == (5, 5)
    assert continues(kept.size, kept.root, shown.size, shown.root, head.consistency)
    act(database)
    for claimed in (6, 7, 2**64 - 1):  # which nobody has shown to the member
        assert (ben.head(claimed).since, ben.shown_size) == (0, 5)


def test_coordinators_that_chain_at_once_leave_no_gap_and_no_fork(database: Database, made: Make) -> None:
    sequencers = [made(name) for name in ("ann", "ben", "cleo")]

    def work(sequencer: Sequencer) -> int:
        count = 0
        for _ in range(15):
            act(database)
            count += sequencer.sequence()
        return count

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(work, sequencers)) == 45
    for sequencer in sequencers:
        assert sequencer.sequence(show=True) == 0
    assert len({sequencer.digest(45) for sequencer in sequencers}) == 1
    with database.read() as session:
        assert session.scalar(select(func.count()).where(AuditEntry.number.is_not(None))) == 45
    assert wrong(database) == []


def test_a_coordinator_that_follows_sees_an_entry_that_was_changed(database: Database, made: Make) -> None:
    ann, ben = made("ann"), made("ben")
    act(database)
    ann.sequence()
    edit(database, "UPDATE audit_log SET actor = 'somebody'")
    with pytest.raises(LogError, match="is not what its leaf was made of"):
        ben.sequence()


def test_a_coordinator_whose_directory_is_newer_than_the_database_does_not_start(
    database: Database, made: Make
) -> None:
    act(database, 2)
    made("ann").sequence(show=True)
    edit(database, "DELETE FROM audit_log WHERE number = 1")  # as after a failover to a copy that had not received all
    edit(database, "DELETE FROM audit_checkpoints")
    with pytest.raises(LogError, match="its directory was signed over 2: entries were removed"):
        made("ann").sequence()
