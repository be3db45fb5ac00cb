"""The audit log as it is stored: entries in their canonical form, and their places in the log."""

import hashlib
import json
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from federation.record.log_entries import FIRST, LogEntry
from federation.record.merkle import Tree, tree_root
from storage import audit
from storage.database import Database
from storage.models import AuditEntry
from tests.paths import VECTORS
from tests.storage.scene import NOON

KEY = bytes(range(32))  # tags entries
KNOWN = json.loads((VECTORS / "audit-log.json").read_text())


def entries(database: Database) -> list[AuditEntry]:
    with database.read() as session:
        return list(session.scalars(select(AuditEntry).order_by(AuditEntry.entry_id)))


def test_an_entry_is_kept_as_it_was_recorded_without_a_place_at_first(database: Database) -> None:
    told = "blake3:" + "0" * 64
    with database.begin() as session:
        audit.record(
            session, at=NOON, actor="coordinator", action="run.completed", subject="r1", detail="in 3 s", digest=told
        )
    [entry] = entries(database)
    assert (entry.at, entry.actor, entry.action, entry.subject) == (NOON, "coordinator", "run.completed", "r1")
    assert (entry.outcome, entry.detail, entry.digest, entry.times) == ("", "in 3 s", told, 1)
    assert (entry.number, entry.leaf) == (None, None)


def test_an_entry_is_there_if_and_only_if_its_fact_is(database: Database) -> None:
    with database.begin() as session:
        audit.record(session, at=NOON, actor="a", action="lost")
        session.flush()
        session.rollback()
    with database.begin() as session:
        audit.record(session, at=NOON, actor="a", action="kept")
    assert [entry.action for entry in entries(database)] == ["kept"]


def test_entries_get_places_without_gaps_in_the_order_of_their_rows(database: Database) -> None:
    with database.begin() as session:
        for number in range(5):
            audit.record(session, at=NOON + timedelta(seconds=number), actor="a", action=f"act-{number}")
    with database.begin() as session:
        assert audit.any_unchained(session)
        first = [entry for entry, _ in audit.unchained(session, 3)]
        assert [entry.action for entry in first] == ["act-0", "act-1", "act-2"]
        audit.chain(session, [(entry.entry_id, place, bytes([place]) * 32) for place, entry in enumerate(first)])
    with database.read() as session:
        assert (audit.size(session), len(audit.unchained(session, 10))) == (3, 2)
        assert audit.chained_leaves(session, 1, 9) == [b"\1" * 32, b"\2" * 32]


@pytest.mark.parametrize("text", ["x" * 5000, "\0" * 300, "a\nb\r\x1b[31mc", "\ud800", "\u202etxt", "é😀" * 2000, ""])
def test_hostile_text_of_any_length_is_recorded_readable_and_has_a_leaf(database: Database, text: str) -> None:
    database.entry_key = KEY
    given: dict[str, Any] = dict.fromkeys(("actor", "action", "subject", "detail"), text) | {"outcome": text or "no"}
    with database.begin() as session:
        audit.record(session, at=NOON, **given)
    [entry] = entries(database)
    limits = {"actor": 200, "action": 80, "subject": 200, "outcome": 80, "detail": 2000}
    assert {name: len(getattr(entry, name)) for name in given} == {
        name: min(len(given[name]), limit) for name, limit in limits.items()
    }
    assert entry.detail.isprintable()
    with database.read() as session:
        [(read, mac)] = audit.unchained(session, 10)
    assert len(read.leaf(FIRST)) == 32
    assert audit.has_mac(read, mac, KEY)  # the MAC was made before the database had cleaned the text
    assert not audit.has_mac(replace(read, detail=f"{read.detail}."), mac, KEY)


def test_a_line_break_cannot_forge_a_second_line(database: Database) -> None:
    with database.begin() as session:
        forged = "refused\n2026 coordinator: all is well\x1b[0m"
        audit.record(session, at=NOON, actor="peer a", action="Submit", outcome="deadline", detail=forged)
    assert entries(database)[0].detail == "refused 2026 coordinator: all is well\ufffd[0m"


def vector(known: dict[str, Any]) -> LogEntry:
    values = {name: value for name, value in known.items() if name not in ("bytes", "leaf", "root")}
    return LogEntry(**{**values, "at": datetime.fromisoformat(known["at"])})


def test_the_canonical_bytes_leaves_and_proofs_are_those_of_the_test_vectors() -> None:
    previous, leaves = FIRST, list[bytes]()
    for known in KNOWN["entries"]:
        entry = vector(known)
        assert entry.encode(previous).hex() == known["bytes"]
        # By arithmetic that shares no line with the code's.
        since = datetime.fromisoformat(known["at"]) - datetime(1970, 1, 1, tzinfo=UTC)
        data = b"fedpareto/v1/entry\0" + previous
        for number in (known["number"], known["entry_id"], round(since.total_seconds() * 10**6), known["times"]):
            data += number.to_bytes(8, "big")
        for name in ("actor", "action", "subject", "outcome", "detail", "digest"):
            data += struct.pack(">I", len(known[name].encode())) + known[name].encode()
        assert data.hex() == known["bytes"]
        previous = hashlib.sha256(b"\0" + data).digest()
        leaves.append(previous)
        assert (entry.leaf(leaves[-2] if leaves[1:] else FIRST).hex(), tree_root(leaves).hex()) == (
            known["leaf"],
            known["root"],
        )
    tree = Tree(lambda start, stop: leaves[start:stop])
    for leaf in leaves:
        tree.append(leaf)
    for known in KNOWN["consistency"]:
        assert [node.hex() for node in tree.consistency(known["first"], known["second"])] == known["proof"]


@pytest.mark.parametrize("column", LogEntry.__slots__)
def test_a_leaf_binds_every_column(column: str) -> None:
    entry = vector(KNOWN["entries"][1])
    other: Any = {int: 9, str: "b", datetime: NOON}[type(getattr(entry, column))]
    assert replace(entry, **{column: other}).leaf(FIRST) != entry.leaf(FIRST)
    columns = {column.name for column in AuditEntry.__table__.columns} - {"leaf", "tag"}
    assert columns == set(LogEntry.__slots__), "a column that no leaf binds"
