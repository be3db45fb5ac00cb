"""The payloads of rounds that leave the last ones of their run."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event

from coordinator.rounds.replies import past_payloads
from coordinator.rounds.replies.past_payloads import BATCH, GRACE, PastPayloads
from storage import retention
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.models import Run
from storage.states import RoundState
from tests.storage.kept_rounds import Federation
from tests.storage.scene import date_back

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)


class Kept(Federation):
    """A federation that keeps the last two rounds, one round a minute."""

    def play(self, run_id: str, numbers: range, **of_each: Any) -> None:
        for number in numbers:
            self.round(run_id, number, at=self.end_of(number).timestamp(), **of_each)

    @staticmethod
    def end_of(number: int) -> datetime:
        return BEGIN + timedelta(minutes=number)

    def updates(self) -> set[str]:
        """What is left of the updates."""
        return {contents for contents in self.contents() if " update " in contents or " refused " in contents}

    @contextmanager
    def statements(self) -> Iterator[list[tuple[str, Any]]]:
        """The statements that are sent, with their parameters."""
        sent: list[tuple[str, Any]] = []

        def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
            sent.append((statement, parameters))

        event.listen(Engine, "before_cursor_execute", note)
        try:
            yield sent
        finally:
            event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def kept(database: Database, blobs: DirectoryStore) -> Kept:
    return Kept(database, blobs)


def removes(kept: Kept) -> PastPayloads:
    return PastPayloads(kept.database, kept.blobs, 2)


def words(run_id: str, *numbers: int) -> set[str]:
    return {f"{run_id} {word} {number}" for number in numbers for word in ("update", "refused")}


def test_payloads_go_ten_minutes_after_their_round_and_those_of_the_first_best_and_last_stay(kept: Kept) -> None:
    kept.run("r")
    for number, accuracy in enumerate((0.1, 0.2, 0.9, 0.3, 0.4, 0.5)):
        kept.play("r", range(number, number + 1), metrics={"accuracy/mean": accuracy})
    past = removes(kept)
    past.remove(kept.end_of(1) + GRACE - timedelta(seconds=1))
    assert kept.updates() == words("r", *range(6))
    past.remove(kept.end_of(1) + GRACE + timedelta(seconds=1))
    assert kept.updates() == words("r", 0, 2, 3, 4, 5)
    past.remove(kept.end_of(60))
    assert kept.updates() == words("r", 0, 2, 4, 5)
    kept.play("r", range(6, 7), metrics={"accuracy/mean": 1.0})  # a better one: the best round so far leaves
    past.remove(kept.end_of(61))
    assert kept.updates() == words("r", 0, 5, 6)
    assert "r model 4" in kept.contents(), "models are left to the collection"


def test_a_round_that_goes_on_is_counted_among_the_last_and_keeps_what_it_got(kept: Kept) -> None:
    kept.run("r")
    kept.play("r", range(4))
    kept.round("r", 4, RoundState.OPEN, at=kept.end_of(4).timestamp())
    removes(kept).remove(kept.end_of(60))
    assert kept.updates() == words("r", 0, 3, 4)


def test_an_update_stays_that_a_retained_row_of_any_kind_names(kept: Kept) -> None:
    kept.run("r")
    kept.run("s", rounds=4)
    names = "r model 0", "s gram 0", "s update 2", "remembered"
    for number, update in enumerate(("r update 0", *names, "s update 1", "r update 6", "r update 7")):
        kept.play("r", range(number, number + 1), update=update)
    with kept.database.begin() as session:
        session.get_one(Run, "r").state_data = {"blobs": [kept.store("remembered")]}
    for name in (*names, "s update 1"):
        date_back(kept.blobs, kept.blobs.put(name.encode()), BEGIN.timestamp())
    removes(kept).remove(kept.end_of(60))
    assert set(names) <= kept.contents()
    assert "s update 1" not in kept.contents(), "neither run retains that round"


def test_an_update_that_is_stored_again_or_claimed_stays(kept: Kept) -> None:
    kept.run("r")
    kept.play("r", range(6))
    late = kept.end_of(60)
    for number in (1, 2):
        date_back(
            kept.blobs,
            kept.blobs.put(f"r update {number}".encode()),
            (late - GRACE).timestamp() + (1 if number == 1 else -1),
        )
    removes(kept).remove(late)
    assert kept.updates() == words("r", 0, 4, 5) | {"r update 1"}


def test_what_left_while_no_coordinator_ran_goes_after_the_start_in_batches(kept: Kept) -> None:
    kept.run("r")
    kept.play("r", range(BATCH + 5))
    past, late = removes(kept), kept.end_of(120)
    assert past.remove(late).deleted == 2 * BATCH
    assert past.remove(late).deleted == 2 * 2
    assert past.remove(late).deleted == 0
    assert kept.updates() == words("r", 0, BATCH + 3, BATCH + 4)


def test_a_batch_has_a_bounded_number_of_payloads(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_payloads, "MOST", 5)
    monkeypatch.setattr(retention, "_AT_A_TIME", 3)
    kept.run("r")
    kept.play("r", range(7))
    past, late = removes(kept), kept.end_of(120)
    assert [past.remove(late).deleted for _ in range(3)] == [4, 4, 0]
    assert kept.updates() == words("r", 0, 5, 6)


def test_only_the_rounds_that_leave_are_looked_at(kept: Kept) -> None:
    if kept.database.engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL's plans depend on the number of rows")
    kept.run("r")
    kept.play("r", range(8))
    past = removes(kept)
    past.remove(kept.end_of(60))
    kept.play("r", range(8, 9))
    with kept.statements() as sent:
        assert past.remove(kept.end_of(70)).deleted == 2
    with kept.database.engine.connect() as connection:
        plans = [
            str(row.detail)
            for statement, parameters in sent
            if statement.startswith("SELECT")
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    assert len(plans) > 8
    large = ("rounds", "phases", "assignments", "replies", "inputs", "models")
    assert not [plan for plan in plans if plan.startswith(tuple(f"SCAN {name}" for name in large))], plans
