"""The SQLite files of a worker's home, under one rule: a change is on the disk when its statement returns.

It then survives `kill -9` and a loss of power. Nothing else in the worker opens SQLite.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from federation.durable_files import sync_directory
from worker import software
from worker.home import DiskFull, FileLocked, WorkerHomeError

BUSY_SECONDS = 5.0  # how long a statement waits for another process that has locked the file
# Deleted values are overwritten, in the file and in its journal.
SETTINGS = ("journal_mode = TRUNCATE", "synchronous = EXTRA", "secure_delete = ON")
_COLUMNS = """
SELECT tables.name, columns.name, columns.type, columns."notnull", columns.pk
FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns
WHERE tables.type = 'table' AND tables.name NOT LIKE 'sqlite_%' ORDER BY tables.name, columns.cid
"""


class LedgerFile:
    """A SQLite file of mode 0600, made when it is missing. Any thread and any process may use it.

    Args:
        path: of the file; its directory is synced.
        tables: the statements that make its tables, where they are missing.
        advice: what the owner does when the file is damaged, for messages.

    Raises:
        WorkerHomeError: the file is damaged, or another version of fedpareto made it.
        FileLocked: another process has locked it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, tables: str, advice: str) -> None:
        self._path = path
        self._advice = advice
        self._lock = threading.RLock()
        if not path.exists():
            # Only a missing file is opened here: to close a SQLite file drops the locks that this process has in it.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_directory(path.parent)
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            with self.using() as connection:
                for setting in SETTINGS:
                    connection.execute(f"PRAGMA {setting}")
                # Section 3, rule 1: compared before tables are made: a ledger of another version, read as an empty one,
                # would count from 0.
                self._check_has(tables)
                connection.executescript(tables)
        except BaseException:
            self._connection.close()
            raise

    @contextmanager
    def using(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time; each statement is a transaction of its own.

        Raises:
            WorkerHomeError: the file is damaged.
            FileLocked: another process has locked it.
            DiskFull: the disk cannot be written or read.
        """
        with self._lock:
            try:
                yield self._connection
            except sqlite3.ProgrammingError:  # the file was closed
                raise
            except sqlite3.DatabaseError as error:
                raise self._explained(error) from error

    def damaged(self, error: object) -> WorkerHomeError:
        """The error of a file whose content cannot be right."""
        return WorkerHomeError(f"{self._path} is damaged ({error}): {self._advice}")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def _explained(self, error: sqlite3.DatabaseError) -> Exception:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return FileLocked(
                f"{self._path} is locked by another process, probably another fedpareto command, a backup or a viewer "
                f"of SQLite files: wait until it has ended, or end it; `fuser {self._path}` shows its number"
            )
        if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
            return DiskFull(f"{self._path} cannot be written: {error}")
        return self.damaged(error)

    def _check_has(self, tables: str) -> None:
        """Compares the tables of the file, if it has any, with those that this version makes."""
        present = self._connection.execute(_COLUMNS).fetchall()
        with closing(sqlite3.connect(":memory:")) as scratch:
            scratch.executescript(tables)
            expected = scratch.execute(_COLUMNS).fetchall()
        if present and present != expected:
            raise WorkerHomeError(
                f"{self._path} has other tables than {software()} makes: another version of fedpareto made it. Use "
                f"that version, or else: {self._advice}"
            )
