"""The world of one schedule: its clock, its queue of events, and its trace. All follow from one seed."""

import heapq
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from random import Random

BEGINNING = datetime(2026, 1, 5, 8, tzinfo=UTC)
LONGEST_SECONDS = 6 * 3600.0


class Stuck(BaseException):
    """A schedule does not end. No part of the coordinator may handle it."""


class World:
    """Time, and what happens next. Events are functions; those of one time happen in the order of their making.

    Attributes:
        random: draws everything that is left to chance.
        seconds: since the beginning; they only grow.
        ahead: how far the wall clock was set from them, in seconds.
        trace: what has happened.
        counts: of events, by kind.
    """

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.seconds = 0.0
        self.ahead = 0.0
        self.trace: list[str] = []
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0

    def now(self) -> datetime:
        """The wall clock, which jumps."""
        return BEGINNING + timedelta(seconds=self.seconds + self.ahead)

    def unset_clock(self) -> datetime:
        """A clock that nobody sets."""
        return BEGINNING + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return self.seconds

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Lets an event happen after some seconds."""
        self._made += 1
        heapq.heappush(self._queue, (self.seconds + seconds, self._made, event))

    def note(self, kind: str, *details: object) -> None:
        """Adds a line to the trace, and counts its kind."""
        self.counts[kind] += 1
        self.trace.append(f"{self.seconds:.3f} {kind} {' '.join(map(str, details))}".rstrip())

    def next(self, until: float | None = None) -> bool:
        """Lets the next event happen, unless it comes after `until`, in seconds; then only the time passes."""
        if not self._queue or (until is not None and self._queue[0][0] > until):
            if until is None:
                raise Stuck("nothing happens any more")
            self.seconds = max(self.seconds, until)
            return False
        at, _, event = heapq.heappop(self._queue)
        self.seconds = max(self.seconds, at)
        if self.seconds > LONGEST_SECONDS:
            raise Stuck(f"the schedule has not ended after {LONGEST_SECONDS:.0f} s")
        event()
        return True
