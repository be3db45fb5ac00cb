"""An owner's pause of a site, in a file of its home: it begins no work until its owner resumes, or until a time.

`fedpareto worker pause` and `resume` write the file and take no lock. A worker that runs reads it once a second.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from federation.durable_files import sync_directory
from federation.monitoring.events import Events
from federation.trust.keys import replace_private
from federation.work.closing import SiteClosing
from worker.home import WorkerHomeError
from worker.site.policy_file import OpenHours
from worker.state_file import read_state, state_bytes

_LAST_YEAR = 9000  # of a pause: opening hours are computed for some days after it
_ADVICE = "until then, the site is paused; `fedpareto worker resume` removes it"


@dataclass(frozen=True)
class Pause:
    """A pause until a time, aware; until None, it ends when the owner resumes.

    Raises:
        ValueError: the time has no zone, or is too far away.
    """

    until: datetime | None

    def __post_init__(self) -> None:
        if self.until is not None and self.until.tzinfo is None:
            raise ValueError(f"the time {self.until} has no zone")
        if self.until is not None and self.until.year > _LAST_YEAR:
            raise ValueError(f"{self.until:%Y-%m-%d} is too far away: the last year is {_LAST_YEAR}")


def read_pause(path: Path) -> tuple[Pause | None, str]:
    """The pause in a file, None if there is none; and what is wrong with the file.

    With a file that is damaged, of another version, or cannot be read, the site is paused.
    """
    try:
        return read_state(path, _parsed, _ADVICE), ""
    except WorkerHomeError as error:
        return Pause(None), str(error)


def write_pause(path: Path, pause: Pause) -> None:
    """Replaces the pause of a site. Raises OSError."""
    until = None if pause.until is None else pause.until.astimezone(UTC).isoformat()
    replace_private(path, state_bytes({"until": until}))


def end_pause(path: Path) -> None:
    """Removes the pause of a site, if there is one. Raises OSError."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def _parsed(document: dict[str, Any]) -> Pause:
    until = document["until"]
    return Pause(None if until is None else datetime.fromisoformat(until))


def closing_now(pause: Pause | None, hours: OpenHours, now: datetime) -> SiteClosing | None:
    """Why a site begins no work now, and until when, by its pause and its opening hours; None while it is open."""
    closed = hours.closed_until(now)
    if pause is not None and pause.until is None:
        return SiteClosing(None, paused=True)
    if pause is None or pause.until is None or pause.until <= now or (closed is not None and closed >= pause.until):
        return None if closed is None else SiteClosing(closed)
    return SiteClosing(hours.closed_until(pause.until) or pause.until, paused=True)


class WatchedPause:
    """The pause of a site whose worker runs, as of the last `look`. Any thread may read it."""

    def __init__(self, path: Path, events: Events) -> None:
        self._path = path
        self._events = events
        self._problem = ""  # that the owner was warned of
        self.pause: Pause | None = None
        self.look()

    def look(self) -> None:
        """Reads the owner's decision, and warns of a file that cannot be read."""
        self.pause, problem = read_pause(self._path)
        if problem not in ("", self._problem):
            self._events.warn("pause", problem)
        self._problem = problem
