"""The connections to a database: a pool for SQLite, which the process prepares itself, and one for PostgreSQL."""

import json
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

from storage.connections.shared_statements import DRIVER, compiled_statements

MAX_CONNECTIONS = 32  # of a database at a time; with SQLite, those that write and those that read each
BUSY_SECONDS = 30.0  # the longest wait of a SQLite transaction for the one before it


def sqlite_engine(path: Path, durable: bool, *, query_only: bool = False, mode: str = "rw") -> Engine:
    """The engine of a file; with `query_only`, or in the mode "ro", its connections write nothing."""
    reads = query_only or mode == "ro"
    engine = create_engine(
        URL.create(DRIVER, database=str(path)),
        creator=partial(_connect_sqlite, path, mode),
        execution_options={"compiled_cache": compiled_statements()},
        json_serializer=_json,
        pool_size=MAX_CONNECTIONS,
        max_overflow=0,
        pool_use_lifo=True,  # the connection that was used last has its statements and pages at hand
    )
    if mode == "rw":
        event.listen(engine, "connect", partial(_prepare, durable, query_only))
    event.listen(engine, "begin", partial(_begin, reads))
    return engine


def _connect_sqlite(path: Path, mode: str) -> sqlite3.Connection:
    # Never mode=rwc: a removed file is not created again. Never immutable: a coordinator may write meanwhile.
    # isolation_level: `_begin` begins each transaction.
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )


def _prepare(durable: bool, read_only: bool, connection: Any, record: object) -> None:
    _write_ahead(connection)
    connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'OFF'}")
    connection.execute("PRAGMA foreign_keys=ON")
    # Once for each connection: SQLite recompiles all statements of a connection after such a PRAGMA.
    connection.execute(f"PRAGMA query_only={'ON' if read_only else 'OFF'}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Has the file use a write-ahead log; the first connection of all changes the file for this.

    That one reads, then writes. If two connections do so at once, SQLite refuses one of them without the time-out of
    the connection, since each would wait for the other's read to end. The one refused tries again.
    """
    last = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > last:
                raise
        time.sleep(0.01)  # SQLite does not notify of a lock's end


def _begin(read_only: bool, connection: Connection) -> None:
    if read_only:
        # By the driver, which is ten times cheaper: this does not touch the file, so it cannot fail.
        driver: Any = connection.connection.driver_connection
        driver.execute("BEGIN")
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def postgresql_engines(url: URL, idle_seconds: float | None) -> tuple[Engine, Engine]:
    """An engine that writes and one that only reads, each with connections of its own."""
    idle = "" if idle_seconds is None else f"-c idle_in_transaction_session_timeout={round(idle_seconds * 1000)}"
    reader = _postgresql_engine(url, "")
    return _postgresql_engine(url, idle), reader.execution_options(
        isolation_level="REPEATABLE READ", postgresql_readonly=True
    )


def _postgresql_engine(url: URL, options: str) -> Engine:
    return create_engine(
        url,
        # A dead connection, which may carry the lock, is detected within two minutes. A connection attempt ends after
        # 10 seconds, since a caller waits.
        connect_args={
            "connect_timeout": 10,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 5,
            "tcp_user_timeout": 60_000,
        }
        | ({"options": options} if options else {}),
        json_serializer=_json,
        pool_pre_ping=True,
        pool_size=8,
        max_overflow=MAX_CONNECTIONS // 2 - 8,
    )


# NaN and infinity are not JSON: PostgreSQL would refuse them, so they are refused everywhere.
_json = partial(json.dumps, allow_nan=False)
