"""The ledger of private rounds: the sessions that count, and the evaluations in the clear where rounds must be private.

It covers all runs and is never erased, since nothing takes back what a session has shown of the data. Every entry is on
the disk before its reply leaves this machine. Beside it are the computations that failed since the last success of
their data set, and the sums of statistics for which data sets were masked.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from federation.work.site import EVALUATE, DescribedEntry, FailedSession, SessionEntry, SessionLedger
from worker.ledgers.ledger_file import LedgerFile

MIGRATIONS = (
    (
        """
        CREATE TABLE sessions (
            session TEXT PRIMARY KEY, run TEXT NOT NULL, task TEXT NOT NULL, base_model TEXT NOT NULL,
            work TEXT NOT NULL, masked INTEGER NOT NULL, unmasked INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE failures (
            session TEXT PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, task TEXT NOT NULL,
            work TEXT NOT NULL, error TEXT NOT NULL
        ) WITHOUT ROWID
        """,
    ),
    (
        """
        CREATE TABLE described (
            session TEXT PRIMARY KEY, run TEXT NOT NULL, task TEXT NOT NULL, question TEXT NOT NULL,
            masked TEXT NOT NULL, confirmed TEXT NOT NULL
        ) WITHOUT ROWID
        """,
    ),
)
_ADVICE = (
    "it counts the private rounds of this site, so put back a copy of it; without one, move it away and lower the "
    "limits in policy.toml by what was used"
)
_COLUMNS = "session, run, task, base_model, work, masked, unmasked"


class SessionCounts(NamedTuple):
    """How many sessions of training, and how many evaluations, count for a task."""

    training: int
    evaluations: int


def count_sessions(path: Path) -> dict[str, SessionCounts]:
    """By task, what counts in a ledger, also while a worker uses it; empty if there is no file.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile.reading`.
    """
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        if connection is None:
            return {}
        rows = connection.execute(
            "SELECT task, sum(work != ?1), sum(work = ?1) FROM sessions GROUP BY task", (EVALUATE,)
        ).fetchall()
    return {task: SessionCounts(training, evaluations) for task, training, evaluations in rows}


class RoundLedger(SessionLedger):
    """The ledger of a worker, which is made when it is missing. Any thread may call, other processes may read.

    `added` is called with the task after each new session.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """

    def __init__(self, path: Path, added: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._added = added
        self._file = LedgerFile(path, MIGRATIONS, _ADVICE)

    def tasks(self) -> list[str]:
        """The tasks that have been in sessions."""
        with self._file.using() as connection:
            return [
                task for (task,) in connection.execute("SELECT task FROM sessions UNION SELECT task FROM described")
            ]

    def entries(self, tasks: Collection[str]) -> Sequence[SessionEntry]:
        """The entries of some tasks."""
        with self._file.using() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM sessions").fetchall()  # noqa: S608 - a constant
        return [
            SessionEntry(session, run, task, base, work, bool(masked), bool(unmasked))
            for session, run, task, base, work, masked, unmasked in rows
            if task in tasks
        ]

    def add(self, entry: SessionEntry) -> None:
        """Records an entry durably; a repetition changes nothing. Raises OSError if it cannot be written."""
        reached = (entry.masked, entry.unmasked)
        values = (entry.session, entry.run_id, entry.task, entry.base_model, entry.work, *reached)
        with self.lock, self._file.using() as connection:
            # Section 3, rule 1: IGNORE: a session that is asked again must not lose `masked` or `unmasked`, and counts
            # once.
            new = connection.execute("INSERT OR IGNORE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)", values).rowcount
        if new and self._added is not None:
            self._added(entry.task)

    def mask(self, session: str) -> None:
        """Records durably that MASK was answered in a session. Raises OSError if it cannot be written."""
        with self.lock, self._file.using() as connection:
            # Section 3, rule 5: set and never cleared: nothing takes back what was sent.
            connection.execute("UPDATE sessions SET masked = 1 WHERE session = ?", (session,))

    def unmask(self, session: str) -> None:
        """Records durably that UNMASK was answered in a session. Raises OSError if it cannot be written."""
        with self.lock, self._file.using() as connection:
            # Section 3, rule 5: by the session alone: no later message can move the sum to another model's limit.
            connection.execute("UPDATE sessions SET unmasked = 1 WHERE session = ?", (session,))

    def described(self, tasks: Collection[str]) -> Sequence[DescribedEntry]:
        """The sums of statistics of some tasks."""
        with self._file.using() as connection:
            rows = connection.execute(
                "SELECT session, run, task, question, masked, confirmed FROM described"
            ).fetchall()
        return [
            DescribedEntry(session, run, task, question, tuple(json.loads(masked)), tuple(json.loads(confirmed)))
            for session, run, task, question, masked, confirmed in rows
            if task in tasks
        ]

    def describe(self, entry: DescribedEntry) -> None:
        """Records an entry durably; a repetition changes nothing. Raises OSError if it cannot be written."""
        lists = json.dumps(entry.masked), json.dumps(entry.confirmed)
        values = (entry.session, entry.run_id, entry.task, entry.question, *lists)
        with self.lock, self._file.using() as connection:
            # Section 3, rule 8: IGNORE: a session that is asked again must not lose the V that was confirmed.
            connection.execute("INSERT OR IGNORE INTO described VALUES (?, ?, ?, ?, ?, ?)", values)

    def confirm(self, session: str, members: Sequence[str]) -> None:
        """Records durably that V is confirmed in a session. Raises OSError if it cannot be written."""
        with self.lock, self._file.using() as connection:
            # Section 3, rule 8: set and never cleared: nothing takes back what was signed.
            connection.execute(
                "UPDATE described SET confirmed = ? WHERE session = ?", (json.dumps(list(members)), session)
            )

    def failures(self, tasks: Collection[str]) -> Sequence[FailedSession]:
        """The sessions of some tasks whose computations failed since the last of the same kind, by run and round."""
        return [failed for failed in self.all_failures() if failed.task in tasks]

    def all_failures(self) -> list[FailedSession]:
        """The same of all tasks."""
        with self._file.using() as connection:
            rows = connection.execute("SELECT session, run, round, task, work, error FROM failures ORDER BY run, round")
            return [FailedSession(*row) for row in rows.fetchall()]

    def fail(self, failed: FailedSession) -> None:
        """Records a failed computation durably; a repetition changes nothing. Raises OSError if it cannot."""
        values = (failed.session, failed.run_id, failed.round, failed.task, failed.work, failed.error)
        with self.lock, self._file.using() as connection:
            # Section 2d: a session that is asked again after a crash counts as one failure.
            connection.execute("INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?, ?, ?)", values)

    def succeed(self, tasks: Collection[str], work: str = "") -> None:
        """Ends the row of failures of some tasks, durably: of one kind of work, or of all. Raises OSError."""
        rows = [(task, work) for task in sorted(tasks)]
        with self.lock, self._file.using() as connection:
            # Section 2d: of this kind of work: a coordinator could reset the count of trainings by evaluations that
            # succeed.
            connection.executemany("DELETE FROM failures WHERE task = ? AND ? IN ('', work)", rows)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
