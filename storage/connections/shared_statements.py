"""Compiled SQL statements, shared by all SQLite engines of a process.

SQLAlchemy keeps compiled statements by the dialect of their engine, and compiles all of them again for each new engine.
A statement depends on the class of its dialect alone, so dialects of one class are equal here.
"""

from collections.abc import MutableMapping
from functools import cache
from typing import Any

from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Compiled
from sqlalchemy.util import LRUCache

DRIVER = "sqlite+fedpareto"  # of the URLs of engines
_STATEMENTS = 1000  # that are kept; a coordinator has about 300


class SharedSQLite(SQLiteDialect_pysqlite):
    """SQLite, with statements that all engines of the process share."""

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


registry.register(DRIVER.replace("+", "."), __name__, SharedSQLite.__name__)


@cache
def compiled_statements() -> MutableMapping[Any, Compiled]:
    """The compiled statements of this process; for several threads."""
    return LRUCache(_STATEMENTS)
