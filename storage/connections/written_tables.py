"""The tables that the transactions of this process have changed, by which it knows whether a row may be used again."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import CompoundSelect, Connection, Engine, Select, Update, event
from sqlalchemy.sql.dml import Delete, Insert

_ANY = ""  # counts for every table


class WrittenTables:
    """Counts, for each table, the transactions that may have changed it. Transactions come one at a time.

    A statement of text counts for every table, since nobody reads here which ones it names.

    Args:
        engine: with which the transactions write.
    """

    def __init__(self, engine: Engine) -> None:
        self._counts: Counter[str] = Counter()
        self._now = set[str]()  # tables of the transaction under way
        event.listen(engine, "before_execute", self._note)

    def count(self, tables: Sequence[str]) -> int:
        """How many transactions may have changed one of these tables, each table counted by itself."""
        return sum(self._counts[name] for name in (*tables, _ANY))

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A transaction; its tables are counted when it has ended, also if nobody knows whether it was committed."""
        try:
            yield
        finally:
            written, self._now = self._now, set()
            self._counts.update(written)

    def _note(self, _connection: Connection, statement: Any, *_: object) -> None:
        if isinstance(statement, Insert | Update | Delete):
            self._now.add(getattr(statement.table, "name", _ANY))
        elif not isinstance(statement, Select | CompoundSelect):
            self._now.add(_ANY)
