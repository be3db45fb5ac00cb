from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from storage import audit
from storage.database import Database
from storage.models import AuditEntry

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def refuse(
    database: Database, seconds: float, *, actor: str = "peer a", reason: str = "deadline", text: str = ""
) -> None:
    with database.begin() as session:
        audit.record(
            session, at=NOON + timedelta(seconds=seconds), actor=actor, action="Submit", outcome=reason, detail=text
        )


def entries(database: Database) -> list[AuditEntry]:
    with database.read() as session:
        return list(session.scalars(select(AuditEntry).order_by(AuditEntry.entry_id)))


def test_an_entry_is_kept_as_it_was_recorded(database: Database) -> None:
    with database.begin() as session:
        audit.record(session, at=NOON, actor="coordinator", action="run.completed", subject="r1", detail="in 3 s")
    [entry] = entries(database)
    assert (entry.at, entry.actor, entry.action, entry.subject) == (NOON, "coordinator", "run.completed", "r1")
    assert (entry.outcome, entry.detail, entry.times) == ("", "in 3 s", 1)


def test_repeated_refusals_within_a_minute_are_one_row_as_the_first_had_it(database: Database) -> None:
    for second in (0, 20, 59):
        refuse(database, second, text=f"at {second}")
    [entry] = entries(database)
    assert (entry.times, entry.at, entry.detail) == (3, NOON, "at 0")


def test_the_minute_begins_with_the_first_refusal_and_then_a_new_row_begins(database: Database) -> None:
    for second in (0, 40, 60, 80, 119, 120):
        refuse(database, second)
    assert [entry.times for entry in entries(database)] == [2, 3, 1]


def test_refusals_of_another_actor_or_for_another_reason_are_rows_of_their_own(database: Database) -> None:
    refuse(database, 0)
    refuse(database, 1, actor="peer b")
    refuse(database, 2, reason="signature")
    refuse(database, 3)
    assert [entry.times for entry in entries(database)] == [2, 1, 1]


def test_refusals_within_one_transaction_are_merged_too(database: Database) -> None:
    with database.begin() as session:
        for _ in range(5):
            audit.record(session, at=NOON, actor="a", action="Submit", outcome="deadline")
    assert [entry.times for entry in entries(database)] == [5]


def test_what_went_well_is_never_merged(database: Database) -> None:
    with database.begin() as session:
        for _ in range(3):
            audit.record(session, at=NOON, actor="a", action="Submit")
    assert [entry.times for entry in entries(database)] == [1, 1, 1]


@pytest.mark.parametrize("text", ["x" * 5000, "\0" * 300, "a\nb\r\x1b[31mc", "\ud800", "\u202etxt", "é😀" * 2000, ""])
def test_hostile_text_of_any_length_is_recorded_readable_and_merged_with_itself(database: Database, text: str) -> None:
    for _ in range(2):
        with database.begin() as session:
            audit.record(session, at=NOON, actor=text, action=text, subject=text, outcome=text or "no", detail=text)
    [entry] = entries(database)
    assert entry.times == 2
    assert [len(entry.actor), len(entry.action), len(entry.subject), len(entry.outcome)] == [
        min(len(text), 200),
        min(len(text), 80),
        min(len(text), 200),
        min(len(text or "no"), 80),
    ]
    assert entry.detail.isprintable()
    assert len(entry.detail) == min(len(text), 2000)


def test_a_line_break_cannot_forge_a_second_line(database: Database) -> None:
    refuse(database, 0, text="refused\n2026 coordinator: all is well\x1b[0m")
    assert entries(database)[0].detail == "refused 2026 coordinator: all is well\ufffd[0m"
