"""The record of refusals: each one at once, or, of calls that come too often, together once a minute."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime
from weakref import WeakValueDictionary

from coordinator.condition import Condition
from storage import audit
from storage.database import Database

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 60.0


class _Tally:
    """Refusals of one caller, of one action, for one reason, that are not on record yet."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.times = 0


class RefusalRecord:
    """Writes refusals down. Used on the event loop.

    Args:
        database: where the record is.
        blocking: runs what waits for the database.
        condition: told about faults of the database.
        clock: the time, aware.
    """

    def __init__(
        self, database: Database, blocking: Executor, condition: Condition, clock: Callable[[], datetime]
    ) -> None:
        self._database = database
        self._blocking = blocking
        self._condition = condition
        self._clock = clock
        self._unrecorded: WeakValueDictionary[tuple[str, str, str], _Tally] = WeakValueDictionary()
        self._counted: dict[tuple[str, str, str, str], int] = {}  # since the last time that it was written
        self._writing: set[asyncio.Task[None]] = set()

    async def write(self, actor: str, action: str, outcome: str, detail: str, times: int = 1) -> None:
        """Writes a refusal down before its answer goes out.

        What one caller piles up while one is being written is written together: a flood waits for itself alone.

        Args:
            actor: how the record names the caller.
            action: the rpc, or what was attempted.
            outcome: the reason of the refusal.
            detail: its message.
            times: how often it happened.
        """

        def write(times: int) -> None:
            with self._database.begin() as session:
                audit.record(
                    session, at=self._clock(), actor=actor, action=action, outcome=outcome, detail=detail, times=times
                )

        tally = self._unrecorded.setdefault((actor, action, outcome), _Tally())
        tally.times += times
        async with tally.turn:
            times, tally.times = tally.times, 0
            if times == 0:
                return  # the previous holder of the lock has written this entry, too
            try:
                await asyncio.get_running_loop().run_in_executor(self._blocking, write, times)
            except Exception as error:  # the answer to the caller matters more than its record
                if self._condition.note(error) is None:
                    log.exception("could not record that %s by %s was refused: %s", action, actor, outcome)

    def count(self, actor: str, action: str, outcome: str, detail: str) -> None:
        """Counts a refusal that comes often: the first is written at once, those after it once a minute."""
        key = (actor, action, outcome, detail)
        if key in self._counted:
            self._counted[key] += 1
        else:
            log.warning("refused %s by %s: %s; from now on once a minute", action, actor, outcome)
            self._write_counted(key, 1)

    async def finish(self) -> None:
        """Writes down what is counted and not on record yet."""
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
