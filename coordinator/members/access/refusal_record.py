"""The record of refusals: the first of a kind at once, and those that follow together once a minute.

The kinds of a minute are bounded, for each caller and for all callers without a certificate, who can have any number of
addresses.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.fault_state import FaultState
from coordinator.members.access.rpc_messages import MAX_MESSAGE_CHARACTERS
from coordinator.thread_pool import ThreadPool
from storage import audit

log = logging.getLogger(__name__)

TOGETHER_SECONDS = 60.0
# Kinds that are counted separately in a minute; further ones are counted together.
MAX_KINDS = 10_000
PER_CALLER = 50
OF_STRANGERS = 32
OTHERS = "peers beyond those that are counted apart"
SEVERAL = "several"  # calls, and reasons
_STRANGER = "peer "


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

    def __init__(self, threads: ThreadPool, faults: FaultState, clock: Callable[[], datetime]) -> None:
        self._threads = threads
        self._faults = faults
        self._clock = clock
        self._tallies: dict[_Kind, _Tally] = {}
        self._apart: Counter[str] = Counter()  # kinds in `_tallies`, by actor; those of all strangers as _STRANGER
        self._writing: set[asyncio.Task[None]] = set()

    async def write(self, actor: str, action: str, outcome: str, detail: str, times: int = 1) -> None:
        """Writes a refusal down before its answer goes out, unless it repeats one of the last minute."""
        kind = self._kind(actor, action, outcome)
        if kind.action == SEVERAL:
            detail = f"{action}: {outcome}: {detail}"
        if not self._repeats(kind, detail, times):
            # In quotes: part of the detail may be the caller's text, with line breaks.
            log.info("refused %s by %s: %s (%r)", action, actor, outcome, detail[:MAX_MESSAGE_CHARACTERS])
            await self._record(kind, detail, times)

    def count(self, actor: str, action: str, outcome: str) -> None:
        """Writes a frequent refusal down, without waiting for it."""
        kind = self._kind(actor, action, outcome)
        if not self._repeats(kind, "", 1):
            log.warning("refused %s by %s: %s; from now on once a minute", action, actor, outcome)
            self._start(kind, "", 1)

    async def note_connections(self, source: str, reason: str, times: int) -> None:
        """Writes down that the front listener has refused connections of a host, a network, or a member's URI."""
        actor = source if source.startswith("fedpareto://") else f"{_STRANGER}{source}"
        await self.write(actor, "connect", reason, f"{times} connections closed", times)

    async def finish(self) -> None:
        """Writes down the refusals that are counted and not on record yet."""
        for kind, tally in list(self._tallies.items()):
            if tally.times:
                times, tally.times = tally.times, 0
                await self._record(kind, tally.detail, times)
        await asyncio.gather(*self._writing)

    def _kind(self, actor: str, action: str, outcome: str) -> _Kind:
        kind = _Kind(actor, action, outcome)
        if kind in self._tallies:
            return kind
        if self._apart[actor] >= PER_CALLER:
            return _Kind(actor, SEVERAL, SEVERAL)
        crowded = actor.startswith(_STRANGER) and self._apart[_STRANGER] >= OF_STRANGERS
        return _Kind(OTHERS, SEVERAL, SEVERAL) if crowded or len(self._tallies) >= MAX_KINDS else kind

    def _count(self, actor: str, more: int) -> None:
        for group in (actor, _STRANGER) if actor.startswith(_STRANGER) else (actor,):
            self._apart[group] += more
            if not self._apart[group]:
                del self._apart[group]

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
        self._count(kind.actor, 1)
        asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._minute_over, kind)

    def _minute_over(self, kind: _Kind) -> None:
        tally = self._tallies.pop(kind)
        self._count(kind.actor, -1)
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
            if self._faults.note(error) is None:
                log.exception("could not record that %s by %s was refused: %s", kind.action, kind.actor, kind.outcome)
