"""The record of refusals: each one at once, or, of calls that come too often, together once a minute."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from weakref import WeakValueDictionary

from coordinator.condition import Condition
from coordinator.threads import Threads
from storage import audit

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 60.0


class _Tally:
    """Refusals of one caller, of one action, for one reason, that are not on record yet."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.times = 0


class RefusalRecord:
    """Writes refusals down. Used on the event loop; `clock` gives aware times."""

    def __init__(self, threads: Threads, condition: Condition, clock: Callable[[], datetime]) -> None:
        self._threads = threads
        self._condition = condition
        self._clock = clock
        self._unrecorded: WeakValueDictionary[tuple[str, str, str], _Tally] = WeakValueDictionary()
        self._counted: dict[tuple[str, str, str, str], int] = {}  # since the last time that it was written
        self._writing: set[asyncio.Task[None]] = set()

    async def write(self, actor: str, action: str, outcome: str, detail: str, times: int = 1) -> None:
        """Writes a refusal down before its answer goes out.

        The refusals of one caller that come while one is being written are written together: others do not wait for it.
        """
        tally = self._unrecorded.setdefault((actor, action, outcome), _Tally())
        tally.times += times
        async with tally.turn:
            times, tally.times = tally.times, 0
            if times == 0:
                return  # the previous holder of the lock has written this entry, too
            try:
                await self._threads.write(
                    audit.record,
                    at=self._clock(),
                    actor=actor,
                    action=action,
                    outcome=outcome,
                    detail=detail,
                    times=times,
                )
            except Exception as error:  # the answer to the caller matters more than its record
                if self._condition.note(error) is None:
                    log.exception("could not record that %s by %s was refused: %s", action, actor, outcome)

    def count(self, actor: str, action: str, outcome: str, detail: str) -> None:
        """Counts a frequent refusal: the first is written at once, the next ones once a minute."""
        key = (actor, action, outcome, detail)
        if key in self._counted:
            self._counted[key] += 1
        else:
            log.warning("refused %s by %s: %s; from now on once a minute", action, actor, outcome)
            self._write_counted(key, 1)

    async def finish(self) -> None:
        """Writes down the refusals that are counted and not on record yet."""
        for key, times in list(self._counted.items()):
            if times:
                await self.write(*key, times)
        self._counted.clear()
        await asyncio.gather(*self._writing)

    def _write_counted(self, key: tuple[str, str, str, str], times: int) -> None:
        self._counted[key] = 0
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.write(*key, times))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        loop.call_later(TOGETHER_SECONDS, self._minute_over, key)

    def _minute_over(self, key: tuple[str, str, str, str]) -> None:
        times = self._counted.pop(key, 0)
        if times:
            log.warning("refused %s by %s %d times in a minute: %s", key[1], key[0], times, key[2])
            self._write_counted(key, times)
