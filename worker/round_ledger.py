"""The ledger of private rounds: the sessions that count, and the models that were evaluated in the clear.

It holds over all runs and is never erased: what a session has shown of the data stays shown. Every entry is on the disk
before the reply that it is about leaves this machine.
"""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from federation.work.base import WorkError
from federation.work.site import SessionEntry, SessionLedger
from worker.home import HomeError, sync_directory

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY, run TEXT NOT NULL, task TEXT NOT NULL, base_model TEXT NOT NULL,
    evaluation INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluated (
    task TEXT, model TEXT, run TEXT NOT NULL, asked TEXT NOT NULL, PRIMARY KEY (task, model)
) WITHOUT ROWID;
"""


class RoundLedger(SessionLedger):
    """The ledger of a worker, which is made when it is missing. Any thread may call, other processes may read.

    `added` is called with the task after each session that is new.

    Raises:
        HomeError: the file is damaged.
    """

    def __init__(self, path: Path, added: Callable[[str], None] | None = None) -> None:
        self._path, self._added = path, added
        self._lock = threading.RLock()
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

    def entries(self, task: str) -> Sequence[SessionEntry]:
        """Those of a task."""
        with self._using() as connection:
            rows = connection.execute(
                "SELECT session, run, task, base_model, evaluation FROM sessions WHERE task = ?", (task,)
            ).fetchall()
        return [SessionEntry(session, run, name, base, bool(kind)) for session, run, name, base, kind in rows]

    def add(self, entry: SessionEntry) -> None:
        """Records one durably; a second time changes nothing. Raises OSError if the disk does not take it."""
        values = (entry.session, entry.run_id, entry.task, entry.base_model, entry.evaluation)
        with self._using() as connection:
            new = connection.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?)", values).rowcount
        if new and self._added is not None:
            self._added(entry.task)

    def evaluate(self, *, task: str, run_id: str, model: str, asked: str) -> None:
        """Records that a model is evaluated in the clear, if it may be. `asked` is the digest of the question.

        Each model may be evaluated once: only the same question may come again. It must be the base model of a session
        of training in which this member took part, or, in each run with such a session, a single other one. That is
        meant for the last model, which begins no session; a worker cannot know which one is the last.

        Raises:
            WorkError: it may not be evaluated.
            OSError: the disk does not take it.
        """
        with self._lock:
            trained = [entry for entry in self.entries(task) if not entry.evaluation]
            bases = {entry.base_model for entry in trained}
            with self._using() as connection:
                rows = connection.execute("SELECT model, run, asked FROM evaluated WHERE task = ?", (task,)).fetchall()
            before = next((question for other, _, question in rows if other == model), asked)
            if before != asked:
                raise _declined("this model was evaluated in the clear before, in answer to another question")
            if model not in bases:
                if run_id not in {entry.run_id for entry in trained}:
                    raise _declined("this worker has taken part in no private round of the run")
                if any(run == run_id and other not in {*bases, model} for other, run, _ in rows):
                    raise _declined(
                        "another model was evaluated in the clear that begins no private round of this worker; a run "
                        "may have one such model, its last"
                    )
            with self._using() as connection:
                connection.execute("INSERT OR IGNORE INTO evaluated VALUES (?, ?, ?, ?)", (task, model, run_id, asked))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._connection
        except sqlite3.OperationalError as error:  # a full disk, one that cannot be read or written
            raise OSError(f"{self._path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise HomeError(
                f"{self._path} is damaged ({error}): it counts the private rounds of this site, so put back a copy of "
                "it; without one, move it away and lower the limits in policy.toml by what was used"
            ) from error


def _declined(message: str) -> WorkError:
    return WorkError(f"the owner requires private rounds: {message}", reason="policy:required")
