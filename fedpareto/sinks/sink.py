"""What a sink is: it takes the numbers of a run's rounds to one target, such as a tracking server or a directory."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from federation.errors import Error


class SinkError(Error):
    """A target that cannot be used as it was named: another attempt would not help."""


@dataclass(frozen=True)
class FollowedRun:
    """A run whose numbers go to a target. `created` is the time of its submission; `rounds` is how many are wanted."""

    run_id: str
    name: str
    task: str
    algorithm: str
    created: datetime
    rounds: int

    @property
    def key(self) -> str:
        """Names this run among all: two simulations of one specification have the same id."""
        return f"{self.run_id}@{self.created.astimezone(UTC).isoformat()}"


@dataclass(frozen=True)
class RoundNumbers:
    """A round that has ended: its number from 0, its end in seconds since 1970, and the numbers that it discloses.

    `values` may be infinite, and are never NaN. All of it is read from the record: the same each time.
    """

    round: int
    ended: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: COMPLETED, FAILED, STOPPED or PAUSED, and why; and files for a sink that takes them."""

    state: str
    reason: str
    files: Sequence[Path] = ()


class Sink(ABC):
    """Takes one run to one target. All calls come from one thread.

    An exception of any call except `SinkError` means that the target cannot be reached now. The sink is then closed,
    and another one is made for the same target, until that works.

    Attributes:
        packages: it needs these, by the names under which they are imported; those of the built-in sinks are in the
            extra "tracking".
        takes_files: True if `finish` gets the model, its card and the report as files.
    """

    packages: ClassVar[Sequence[str]] = ()
    takes_files: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, address: str) -> None:
        """`address` is what follows the colon in `--to NAME:ADDRESS`. Raises SinkError: it cannot be one."""

    @abstractmethod
    def open(self, run: FollowedRun) -> int:
        """Finds the run at the target, or makes it there; returns the first round that the target lacks.

        The answer comes from the target itself, so that a process that starts again goes on where the last one ended.

        Raises:
            SinkError: the target holds something else.
        """

    @abstractmethod
    def write(self, numbers: RoundNumbers) -> None:
        """Writes a round; they come in order. When it returns, the target has the round, also after a kill."""

    @abstractmethod
    def finish(self, end: RunEnd) -> None:
        """Writes how the run ended. It may come again for a run that has ended, and then changes nothing."""

    def close(self) -> None:  # noqa: B027 - a sink may hold nothing
        """Lets go of what it holds."""
