"""An owner's wish that a site leaves its federation, and the signed withdrawal, in two files of the site's home.

`fedpareto worker leave` writes the wish and takes no lock. Whoever holds the lock of the home signs the withdrawal, and
keeps it until a coordinator has acknowledged it.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from federation.monitoring.events import Events
from federation.trust.envelope import from_text, to_text
from federation.trust.keys import replace_private
from federation.v1.common_pb2 import SignedEnvelope
from worker.home import WorkerHomeError
from worker.state_file import read_state, state_bytes

_ADVICE = "until then, the site begins no work; `fedpareto worker leave` writes the wish again"
_KEPT = "`fedpareto worker leave` signs another withdrawal"


@dataclass(frozen=True)
class Leave:
    """The wish to leave.

    Attributes:
        since: when the owner said so, aware.
        now: whether begun work is dropped; otherwise the site ends it first, private rounds included.
        forget: whether the owner wants officers to remove the payloads that the site has sent.
    """

    since: datetime
    now: bool = False
    forget: bool = False

    def __post_init__(self) -> None:
        if self.since.tzinfo is None:
            raise ValueError(f"the time {self.since} has no zone")


@dataclass(frozen=True)
class SignedWithdrawal:
    """A signed withdrawal.

    Attributes:
        envelope: the withdrawal.
        left: when a coordinator acknowledged it, aware: by this machine's clock or the coordinator's, the later one.
        earlier: withdrawals from the same joining that were sent before; one of them can be on record instead.
    """

    envelope: SignedEnvelope
    left: datetime | None = None
    earlier: tuple[SignedEnvelope, ...] = ()


def read_leave(path: Path) -> tuple[Leave | None, str]:
    """The wish in a file, None if there is none; and what is wrong with the file.

    With a file that is damaged, of another version, or cannot be read, the site begins no work and does not leave.
    """
    try:
        return read_state(path, _wish, _ADVICE), ""
    except WorkerHomeError as error:
        return None, str(error)


def write_leave(path: Path, leave: Leave) -> None:
    """Replaces the wish of a site. Raises OSError."""
    since = leave.since.astimezone(UTC).isoformat()
    replace_private(path, state_bytes({"since": since, "now": leave.now, "forget": leave.forget}))


def read_withdrawal(path: Path) -> SignedWithdrawal | None:
    """The withdrawal in a file; None if there is none.

    Raises:
        WorkerHomeError: the file is damaged, of another version, or cannot be read.
    """
    return read_state(path, _signed, _KEPT)


def write_withdrawal(path: Path, withdrawal: SignedWithdrawal) -> None:
    """Replaces the withdrawal of a site. Raises OSError."""
    left = None if withdrawal.left is None else withdrawal.left.astimezone(UTC).isoformat()
    earlier = [to_text(envelope) for envelope in withdrawal.earlier]
    replace_private(path, state_bytes({"withdrawal": to_text(withdrawal.envelope), "left": left, "earlier": earlier}))


class WatchedLeave:
    """The wish of a site whose worker runs, as of the last `look`. Any thread may read it.

    Attributes:
        leave: None without a wish, and with a file that cannot be read.
    """

    def __init__(self, path: Path, events: Events) -> None:
        self._path = path
        self._events = events
        self._problem = ""  # that the owner was warned of
        self.leave: Leave | None = None
        self.look()

    def look(self) -> None:
        """Reads the owner's wish, and warns of a file that cannot be read."""
        self.leave, problem = read_leave(self._path)
        if problem not in ("", self._problem):
            self._events.warn("leaving", problem)
        self._problem = problem

    def closes(self) -> bool:
        """True if the site begins no work, because its owner wants to leave, or may want to."""
        return self.leave is not None or self._problem != ""


def _wish(document: dict[str, Any]) -> Leave:
    now, forget = document["now"], document["forget"]
    if not isinstance(now, bool) or not isinstance(forget, bool):
        raise TypeError("now and forget are true or false")
    return Leave(datetime.fromisoformat(document["since"]), now, forget)


def _signed(document: dict[str, Any]) -> SignedWithdrawal:
    left = document["left"]
    return SignedWithdrawal(
        from_text(document["withdrawal"]),
        None if left is None else datetime.fromisoformat(left),
        tuple(from_text(text) for text in document.get("earlier", [])),
    )
