"""Verification of the audit log: every entry, every leaf and every checkpoint is computed anew."""

import struct
from collections.abc import Iterator, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogError, LogKey
from federation.record.log_entries import FIRST
from federation.record.merkle import Tree
from storage import audit
from storage.audit import ChainedEntry
from storage.models import Checkpoint

_AT_A_TIME = 500  # entries


def log_problems(session: Session, key: LogKey, newest: bytes) -> Iterator[str | int]:
    """Describes the problems of the log in the database; after each part, yields the number of entries so far.

    Args:
        session: a snapshot.
        key: of the log.
        newest: the newest checkpoint that the coordinator has signed, from outside the database; empty if none.
    """
    signed: dict[int, bytes] = {}
    for name, size, data in _checkpoints(session, key, newest):
        try:
            manifest = key.open(data)
        except LogError as error:
            yield f"{name}: {error}"
            continue
        if manifest.size != size:
            yield f"{name}: it was signed over {manifest.size} entries"
        signed[manifest.size] = manifest.root
    yield from _Walk(signed, key.entry_key).problems(session)


def _checkpoints(session: Session, key: LogKey, newest: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Each checkpoint: its name in a message, the number of entries that it is recorded for, and its envelope."""
    rows = select(Checkpoint.size, Checkpoint.envelope).order_by(Checkpoint.size)
    for size, data in session.execute(rows.execution_options(yield_per=_AT_A_TIME)):
        yield f"the checkpoint of {size} entries", size, data
    if newest:
        yield "the newest checkpoint", key.open(newest).size, newest


class _Walk:
    """Verifies the entries from the first to the last."""

    def __init__(self, signed: dict[int, bytes], key: bytes) -> None:
        self._signed = signed  # roots, by the number of entries
        self._key = key  # of the MACs
        self._tree = Tree(lambda start, stop: ())  # only its newest root is used
        self._previous: bytes | None = FIRST  # the leaf of the entry before; None if that is not known
        self._next = 0  # the number of the next entry
        self._whole = True  # False once the roots cannot be those that were signed
        self._good = 0  # the size of the last checkpoint that fits

    def problems(self, session: Session) -> Iterator[str | int]:
        while True:
            entries = _read(session, self._next)
            for entry in entries:
                yield from self._entry_problems(entry)
            yield self._next
            if not entries:
                break
        last = max(self._signed, default=0)
        if self._next < last:
            yield f"{_span(self._next, last)} removed: the newest checkpoint covers {last} entries"
        elif self._next > last:
            yield f"{_span(last, self._next)} inserted: no checkpoint covers what comes after {last} entries"

    def _entry_problems(self, entry: ChainedEntry | int) -> Iterator[str]:
        number = entry if isinstance(entry, int) else entry.entry.number
        if number > self._next:
            yield f"{_span(self._next, number)} removed"
            self._previous, self._whole = None, False
        self._next = number + 1
        if isinstance(entry, int):
            yield f"entry {number} was changed: its row cannot be read"
            self._previous, self._whole = None, False
            return
        try:
            fits = self._previous is None or entry.entry.leaf(self._previous) == entry.leaf
        except (ArithmeticError, AttributeError, TypeError, ValueError, struct.error):
            fits = False
        if not fits:
            row = entry.entry
            yield (
                f"entry {number} was changed or moved, or the entry before it was: {row.action!r} by {row.actor!r} "
                f"at {row.at} is not what its leaf was made of"
            )
        elif not audit.has_mac(entry.entry, entry.mac, self._key):
            yield f"entry {number} was changed: its MAC is not that of what it tells"
        self._previous = entry.leaf
        self._tree.append(entry.leaf)
        root = self._signed.get(self._next)
        if root is not None and self._whole:
            self._whole = self._tree.root() == root
            if self._whole:
                self._good = self._next
            else:
                yield (
                    f"an entry from {self._good} to {number} was changed, removed, inserted or moved: the checkpoint "
                    f"of {self._next} entries was signed over others"
                )


def _read(session: Session, start: int) -> Sequence[ChainedEntry | int]:
    """The next entries. An entry whose row cannot be read is given by its number alone."""
    try:
        return audit.chained(session, start, _AT_A_TIME)
    except (AttributeError, TypeError, ValueError):
        pass
    entries: list[ChainedEntry | int] = []
    for number in audit.numbers(session, start, _AT_A_TIME):
        try:
            entries += audit.chained(session, number, 1)
        except (AttributeError, TypeError, ValueError):
            entries.append(number)
    return entries


def _span(start: int, stop: int) -> str:
    return f"entry {start} was" if stop == start + 1 else f"entries {start} to {stop - 1} were"
