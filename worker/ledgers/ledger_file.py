"""The SQLite files of a worker's home, under one rule: a change is on the disk when its statement returns.

It then survives `kill -9` and a loss of power. Nothing else in the worker opens SQLite.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from federation.durable_files import sync_directory
from worker import software
from worker.home import DiskFull, FileLocked, WorkerHome, WorkerHomeError

Migrations = Sequence[Sequence[str]]
"""The statements of each version of a file's tables, from version 1. A released version never changes."""

BUSY_SECONDS = 5.0  # how long a statement waits for another process that has locked the file
# Deleted values are overwritten, in the file and in its journal.
SETTINGS = ("journal_mode = TRUNCATE", "synchronous = EXTRA", "secure_delete = ON")
_COLUMNS = """
SELECT tables.name, columns.name, columns.type, columns."notnull", columns.pk
FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns
WHERE tables.type = 'table' AND tables.name NOT LIKE 'sqlite_%' ORDER BY tables.name, columns.cid
"""


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str) -> Iterator[None]:
    """A transaction, DEFERRED or IMMEDIATE; nothing of it stays if it fails."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class LedgerFile:
    """A SQLite file of mode 0600, made when it is missing. Any thread and any process may use it.

    Its `user_version` is the version of its tables. A file of an older version is migrated when it is opened, in one
    transaction: nothing has changed if the process dies in it. A worker that runs with the older version is not
    disturbed: other processes migrate nothing until it has ended.

    Args:
        path: of the file; its directory is synced.
        migrations: what makes each version of its tables from the one before.
        advice: what the owner does when the file is damaged, for messages.

    Raises:
        WorkerHomeError: the file is damaged, or a newer or an unreleased version of fedpareto made it.
        FileLocked: another process has locked it, or a worker of an older version runs with it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, migrations: Migrations, advice: str) -> None:
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
                self._migrate(connection, migrations)
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    @contextmanager
    def reading(cls, path: Path, migrations: Migrations, advice: str) -> Iterator[sqlite3.Connection | None]:
        """A connection that cannot write, None if there is no file: it makes and migrates nothing.

        Raises:
            WorkerHomeError: the file is damaged, or another version of fedpareto made it.
            OSError: the file cannot be read now.
        """
        if not path.exists():
            yield None
            return
        file = cls.__new__(cls)
        file._path, file._advice, file._lock = path, advice, threading.RLock()
        try:
            file._connection = sqlite3.connect(
                # Not mode=ro: it could not roll back what a worker that was killed has begun, and so not read the file.
                f"{path.absolute().as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
            )
        except sqlite3.OperationalError as error:
            raise OSError(f"{path} cannot be read: {error}") from error
        try:
            with closing(file._connection), file.using() as connection:
                connection.execute("PRAGMA query_only = ON")
                if (version := file._checked_version(connection, migrations)) != len(migrations):
                    raise WorkerHomeError(
                        f"{path} has tables of version {version}: start the worker, which brings them up"
                    )
                yield connection
        except DiskFull as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_READONLY:
                raise
            raise OSError(
                f"{path} cannot be read: a process was killed in the middle of a change, which only a process that may "
                f"write into {path.parent} can take back: start the worker"
            ) from error

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

    @contextmanager
    def together(self) -> Iterator[sqlite3.Connection]:
        """As `using`, with all statements in one transaction: nothing of it stays if one fails."""
        with self.using() as connection, _transaction(connection, "IMMEDIATE"):
            yield connection

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

    def _migrate(self, connection: sqlite3.Connection, migrations: Migrations) -> None:
        """Brings the tables to the newest version, or raises WorkerHomeError and leaves the file as it is."""
        with _transaction(connection, "DEFERRED"):
            version = self._checked_version(connection, migrations)
        if version == len(migrations):
            return
        # Section 3, rule 1: a running worker of the older version could not count its next session.
        if version and WorkerHome(self._path.parent).locked_by_another():
            raise FileLocked(
                f"{self._path} is in use by a worker of an older version than {software()}, which has to change its "
                "tables: stop that worker, and start it with this version; until then, use the older version"
            )
        with _transaction(connection, "IMMEDIATE"):
            # Read again: another process may have migrated it meanwhile.
            for statements in migrations[self._checked_version(connection, migrations) :]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")

    def _checked_version(self, connection: sqlite3.Connection, migrations: Migrations) -> int:
        """The version of the tables, 0 in an empty file. Raises WorkerHomeError if this program does not know them.

        It is the version that the file names, or a later one whose tables it has: between two releases, one number has
        stood for both.
        """
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        present = connection.execute(_COLUMNS).fetchall()
        with closing(sqlite3.connect(":memory:")) as scratch:
            for number, statements in enumerate(((), *migrations)):
                for statement in statements:
                    scratch.execute(statement)
                known = number == version or number > version > 0
                if known and present == scratch.execute(_COLUMNS).fetchall():
                    return number
        # Section 3, rule 1: a ledger of another version, read as an empty one, would count from 0.
        maker = "a newer version" if version > len(migrations) else "an unreleased version"
        raise WorkerHomeError(
            f"{self._path} has tables that {software()} does not know: {maker} of fedpareto made it. Use that "
            f"version, or else: {self._advice}"
        )
