"""The ledger of a site's privacy: the trainings with noise, from which the epsilon that is spent follows."""

from dataclasses import asdict, dataclass
from pathlib import Path

from federation.spec.accounting import Mechanism
from worker.ledgers.ledger_file import LedgerFile

MIGRATIONS = (
    (
        """
        CREATE TABLE spent (
            entry INTEGER PRIMARY KEY, at TEXT, data_set TEXT, task TEXT, run TEXT, round INTEGER, assignment TEXT,
            noise REAL, clip REAL, rate REAL, steps INTEGER
        )
        """,
    ),
)
_ADVICE = (
    "it says what has been learned of this site's samples, so do not start without it: put back a copy of the file"
)


@dataclass(frozen=True)
class PrivacyEntry:
    """One training with noise."""

    at: str  # ISO 8601, by the coordinator's clock
    data_set: str
    task: str
    run: str
    round: int
    assignment: str
    noise: float
    clip: float
    rate: float
    steps: int

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of this training."""
        return Mechanism(self.noise, self.rate, self.steps)


_COLUMNS = ", ".join(PrivacyEntry.__dataclass_fields__)


class Ledger:
    """The trainings with noise of a site, over all its runs; an append-only file. Any thread may call.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile(path, MIGRATIONS, _ADVICE)

    def mechanisms(self, data_set: str) -> list[Mechanism]:
        """The mechanisms of all trainings on a data set, with the steps of equal ones added up."""
        with self._file.using() as connection:
            rows = connection.execute(
                "SELECT noise, rate, sum(steps) FROM spent WHERE data_set = ? GROUP BY noise, rate", (data_set,)
            ).fetchall()
        return [Mechanism(*row) for row in rows]

    def entries(self) -> list[PrivacyEntry]:
        """All entries in order."""
        with self._file.using() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM spent ORDER BY entry").fetchall()  # noqa: S608 - our own
        return [PrivacyEntry(*row) for row in rows]

    def add(self, entry: PrivacyEntry) -> None:
        """Adds an entry; it is on the disk when this returns. Raises OSError if it cannot be written."""
        values = tuple(asdict(entry).values())
        with self._file.using() as connection:
            connection.execute(
                f"INSERT INTO spent ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})",  # noqa: S608 - our own
                values,
            )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_mechanisms(path: Path) -> dict[str, list[Mechanism]]:
    """By data set, what `Ledger.mechanisms` gives, also while a worker uses the ledger; empty if there is no file.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile.reading`.
    """
    found: dict[str, list[Mechanism]] = {}
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        if connection is None:
            return found
        rows = connection.execute(
            "SELECT data_set, noise, rate, sum(steps) FROM spent GROUP BY data_set, noise, rate"
        ).fetchall()
    for data_set, *mechanism in rows:
        found.setdefault(data_set, []).append(Mechanism(*mechanism))
    return found


def read_ledger(path: Path) -> list[PrivacyEntry]:
    """All entries of a ledger in order, also while a worker uses it; none if there is no file.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        if connection is None:
            return []
        rows = connection.execute(f"SELECT {_COLUMNS} FROM spent ORDER BY entry").fetchall()  # noqa: S608 - our own
    return [PrivacyEntry(*row) for row in rows]
