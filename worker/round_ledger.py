"""The ledger of private rounds: the sessions that count, and what an owner who requires them evaluates in the clear.

It holds over all runs and is never erased: what a session has shown of the data stays shown. Every entry is on the disk
before the reply that it is about leaves this machine.
"""

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from federation.work.site import SessionEntry, SessionLedger
from worker.home import DiskFull, HomeError, sync_directory

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY, run TEXT NOT NULL, task TEXT NOT NULL, base_model TEXT NOT NULL, work TEXT NOT NULL,
    unmasked INTEGER NOT NULL
) WITHOUT ROWID;
"""
_COLUMNS = "session, run, task, base_model, work, unmasked"


class RoundLedger(SessionLedger):
    """The ledger of a worker, which is made when it is missing. Any thread may call, other processes may read.

    `added` is called with the task after each session that is new.

    Raises:
        HomeError: the file is damaged.
    """

    def __init__(self, path: Path, added: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._path, self._added = path, added
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_directory(path.parent)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with self._using() as connection:
            connection.execute("PRAGMA synchronous = EXTRA")  # on the disk when a statement returns
            connection.executescript(_TABLES)

    def tasks(self) -> list[str]:
        """The tasks that have been in sessions."""
        with self._using() as connection:
            return [task for (task,) in connection.execute("SELECT DISTINCT task FROM sessions ORDER BY task")]

    def entries(self, tasks: Collection[str]) -> Sequence[SessionEntry]:
        """Those of some tasks."""
        with self._using() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM sessions").fetchall()  # noqa: S608 - a constant
        return [
            SessionEntry(session, run, task, base, work, bool(unmasked))
            for session, run, task, base, work, unmasked in rows
            if task in tasks
        ]

    def add(self, entry: SessionEntry) -> None:
        """Records one durably; a second time changes nothing. Raises OSError if the disk does not take it."""
        values = (entry.session, entry.run_id, entry.task, entry.base_model, entry.work, entry.unmasked)
        with self._using() as connection:
            new = connection.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?)", values).rowcount
        if new and self._added is not None:
            self._added(entry.task)

    def unmask(self, session: str) -> None:
        """Records durably that UNMASK was answered in a session. Raises OSError if the disk does not take it."""
        with self._using() as connection:
            connection.execute("UPDATE sessions SET unmasked = 1 WHERE session = ?", (session,))

    def close(self) -> None:
        """Closes the file."""
        with self.lock:
            self._connection.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            with self.lock:
                yield self._connection
        except sqlite3.OperationalError as error:  # a full disk, one that cannot be read or written
            raise DiskFull(f"{self._path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise HomeError(
                f"{self._path} is damaged ({error}): it counts the private rounds of this site, so put back a copy of "
                "it; without one, move it away and lower the limits in policy.toml by what was used"
            ) from error
