"""What a worker does now, in a file of its home: its connection to the coordinator, and the work that has begun.

`fedpareto worker status` reads it, and takes no lock. The worker touches the file once a second, and removes it at its
end, so a file that is older is that of a worker that was killed.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from federation.trust.keys import replace_private
from worker.state_file import read_state, state_bytes

SILENT = timedelta(seconds=10)  # after which a worker that has not touched its file does not run
_ADVICE = "the worker writes it again"


@dataclass(frozen=True)
class CoordinatorConnection:
    """Whether a worker is connected to a coordinator, since when, and the problem if it is not.

    `since` is aware, and by this machine's clock.
    """

    connected: bool
    since: datetime
    problem: str = ""


@dataclass(frozen=True)
class WorkNow:
    """Work that has begun: its assignment, run and round, the activity such as "training", and since when."""

    assignment_id: str
    run_id: str
    round: int
    doing: str
    since: datetime


@dataclass(frozen=True)
class OfferedTask:
    """A task that a worker offers: the numbers in its whole model, and the objectives that this site serves."""

    task: str
    parameters: int
    objectives: int


@dataclass(frozen=True)
class WorkerStatus:
    """The state of a worker; `connection` is None until it has tried to connect."""

    connection: CoordinatorConnection | None
    work: tuple[WorkNow, ...]
    offers: tuple[OfferedTask, ...] = ()


class SeenWorker(NamedTuple):
    """The status in the file of a worker, and its last sign of life, aware and by this machine's clock."""

    status: WorkerStatus
    last_sign: datetime

    def runs(self, now: datetime) -> bool:
        """False if the worker has been silent for so long that it was killed."""
        return now - self.last_sign < SILENT


class StatusFile:
    """The file of a worker that runs. If it cannot be written, such as on a full disk, the next call tries again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: WorkerStatus | None = None

    def show(self, status: WorkerStatus) -> None:
        """Writes the status if it has changed, and gives a sign of life."""
        with suppress(OSError):
            if status == self._written:
                self._written = None  # until the file is known to be there
                os.utime(self._path)
            else:
                replace_private(self._path, state_bytes(asdict(status), default=_time))
            self._written = status

    def close(self) -> None:
        """Removes the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_status(path: Path) -> SeenWorker | None:
    """The worker that wrote the file; None if there is none, or if the last one ended in order.

    Raises:
        WorkerHomeError: the file is damaged, of another version, or cannot be read.
    """
    status = read_state(path, _parsed, _ADVICE)
    if status is None:
        return None
    try:
        return SeenWorker(status, datetime.fromtimestamp(path.stat().st_mtime, UTC))
    except FileNotFoundError:
        return None


def _time(value: object) -> str:
    if not isinstance(value, datetime):
        raise TypeError(f"no JSON for {value!r}")
    return value.isoformat()


def _parsed(document: Mapping[str, Any]) -> WorkerStatus:
    connection = document["connection"]
    return WorkerStatus(
        None if connection is None else CoordinatorConnection(**{**connection, "since": _aware(connection["since"])}),
        tuple(WorkNow(**{**work, "since": _aware(work["since"])}) for work in document["work"]),
        tuple(OfferedTask(**offer) for offer in document.get("offers", [])),
    )


def _aware(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text} has no zone")
    return time
