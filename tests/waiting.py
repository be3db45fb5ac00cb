"""How tests wait for what coordinators, workers and their databases do."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session

T = TypeVar("T")
SECONDS = 120.0  # how long anything may take before the test fails; nothing depends on it


class Happenings:
    """What happens in this process: transactions that are committed, and messages that come to a client of a test."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def tell(self, *_: object) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait(self, count: int, seconds: float) -> None:
        """Waits until there are others than these, or for this time."""
        with self._changed:
            self._changed.wait_for(lambda: self.count != count, seconds)


HAPPENINGS = Happenings()
event.listen(Session, "after_commit", HAPPENINGS.tell)


def wait_for(condition: Callable[[], T | None], what: str, seconds: float = SECONDS) -> T:
    """Waits until a condition returns a true value, and returns the value.

    It looks again when something has happened in this process. Other processes and their files do not tell it, so it
    also looks now and then.
    """
    end, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < end:
        count = HAPPENINGS.count
        found = condition()
        if found:
            return found
        time.sleep(0.004)  # several things happen one after the other
        HAPPENINGS.wait(count, pause)
        pause = min(1.3 * pause, 0.1)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")
