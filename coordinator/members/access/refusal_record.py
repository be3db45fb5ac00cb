"""The record of refusals: the first of a kind at once, and those that follow together once a minute."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.condition import Condition
from coordinator.thread_pool import ThreadPool
from storage import audit

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 60.0
MAX_KINDS = 10_000  # counted separately; further kinds are counted together
OTHERS = "peers beyond those that are counted apart"


@dataclass(frozen=True)
class _Kind:
    """The common fields of refusals that are counted together."""

    actor: str
    action: str
    outcome: str


@dataclass
class _Tally:
    """The refusals of one kind since the last time that they were written."""

    times: int = 0
    detail: str = ""  # of the newest


class RefusalRecord:
    """Writes refusals down. Used on the event loop; `clock` gives aware times.

    If the process dies, up to a minute's repetitions are not on record; their first refusal is.
    """

    def __init__(self, threads: ThreadPool, condition: Condition, clock: Callable[[], datetime]) -> None:
        self._threads = threads
        self._condition = condition
        self._clock = clock
        self._tallies: dict[_Kind, _Tally] = {}
        self._writing: set[asyncio.Task[None]] = set()

    async def write(self, actor: str, action: str, outcome: str, detail: str, times: int = 1) -> None:
        """Writes a refusal down before its answer goes out, unless it repeats one of the last minute."""
        kind = self._kind(actor, action, outcome)
        if not self._repeats(kind, detail, times):
            await self._record(kind, detail, times)

    def count(self, actor: str, action: str, outcome: str) -> None:
        """Writes a frequent refusal down, without waiting for it."""
        kind = self._kind(actor, action, outcome)
        if not self._repeats(kind, "", 1):
            log.warning("refused %s by %s: %s; from now on once a minute", action, actor, outcome)
            self._start(kind, "", 1)

    async def finish(self) -> None:
        """Writes down the refusals that are counted and not on record yet."""
        for kind, tally in list(self._tallies.items()):
            if tally.times:
                times, tally.times = tally.times, 0
                await self._record(kind, tally.detail, times)
        await asyncio.gather(*self._writing)

    def _kind(self, actor: str, action: str, outcome: str) -> _Kind:
        kind = _Kind(actor, action, outcome)
        crowded = kind not in self._tallies and len(self._tallies) >= MAX_KINDS
        return _Kind(OTHERS, action, outcome) if crowded else kind

    def _repeats(self, kind: _Kind, detail: str, times: int) -> bool:
        """Counts a refusal that repeats one of the last minute; of another one, begins the minute."""
        tally = self._tallies.get(kind)
        if tally is None:
            self._begin(kind)
            return False
        tally.times, tally.detail = tally.times + times, detail
        return True

    def _begin(self, kind: _Kind) -> None:
        self._tallies[kind] = _Tally()
        asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._minute_over, kind)

    def _minute_over(self, kind: _Kind) -> None:
        tally = self._tallies.pop(kind)
        if tally.times:
            log.warning("refused %s by %s %d times in a minute: %s", kind.action, kind.actor, tally.times, kind.outcome)
            self._begin(kind)
            self._start(kind, tally.detail, tally.times)

    def _start(self, kind: _Kind, detail: str, times: int) -> None:
        task = asyncio.get_running_loop().create_task(self._record(kind, detail, times))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _record(self, kind: _Kind, detail: str, times: int) -> None:
        entry = {"actor": kind.actor, "action": kind.action, "outcome": kind.outcome, "detail": detail}
        try:
            await self._threads.write(audit.record, at=self._clock(), times=times, **entry)
        except Exception as error:  # the answer to the caller matters more than its record
            if self._condition.note(error) is None:
                log.exception("could not record that %s by %s was refused: %s", kind.action, kind.actor, kind.outcome)
