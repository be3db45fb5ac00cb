"""Windows of uploads: how many bytes of each may be on their way, within a memory budget for all of them.

HTTP/2's own windows limit one stream each. gRPC's probing lets them grow with a line's speed, without a limit on their
sum, and on a fast line most of every member's update would wait in memory. So the coordinator limits each upload
(`Window`): one byte of the budget is taken for each byte that may be on its way.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

from coordinator.settings import SMALLEST_WINDOW
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from federation.refusals import Refusal

LARGEST_WINDOW = 16 << 20  # bytes; fills a line of 600 Mbit/s at 200 ms
FIRST_WINDOW = 4 << 20  # bytes, where the budget has plenty of room
PLENTY = 8  # the first window takes at most this part of the remaining budget
GROWTH = 4  # the factor by which a window grows when it slows its line down
HELD_UP_SECONDS = 0.02  # shorter waits slow no line down: 1 MiB in 20 ms is 400 Mbit/s
FAR_SECONDS = 0.05  # shorter round trips need no larger first window
UPLOADS = MonitoredNumber(
    "fedpareto_uploads", "Uploads of replies that are under way, or wait for a place.", MonitoredKind.GAUGE, ("state",)
)
PAYLOAD_BYTES = MonitoredNumber(
    "fedpareto_payload_bytes",
    "Bytes of updates that members have sent, and of models that they have fetched.",
    MonitoredKind.COUNTER,
    ("direction",),
)
BLOB_SECONDS = MonitoredNumber(
    "fedpareto_blob_seconds",
    "Seconds until an update of a member was stored, or a blob for a member was open.",
    MonitoredKind.DURATION,
    ("kind",),
    (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0),
)
IDLE_SECONDS = 70.0  # longer than a call waits for a chunk


class Transfer:
    """An upload under way. Its window grows if it slows the line down and the budget has room.

    The first chunk comes a round trip after the first window, the second one as fast as the line carries it: the two
    times show how many bytes fit on the line. Later, the window slows the line down when the upload stops at its limit:
    the first chunk beyond a limit then comes much later than other chunks, since the sender waits for the next window.

    Args:
        grow: takes this number of bytes from the budget, or fewer; returns the number taken.

        window: the first one, which was taken from the budget.

    Attributes:
        window: the bytes that may be on their way.
        limit: the byte up to which the upload may go.
        heard: when the last chunk came, by the monotonic clock.
        left: True once its place was given away.
    """

    def __init__(self, grow: Callable[[int], int], window: int = SMALLEST_WINDOW) -> None:
        self._grow = grow
        self._usual = HELD_UP_SECONDS  # the wait for a chunk, an average
        self._begin: int | None = None
        self._first_wait: float | None = None  # for the first chunk, until the second one has come
        self._limits: deque[int] = deque(maxlen=4)  # the last ones; the upload may have stopped at any of them
        self.window = window
        self.limit = 0
        self.heard = monotonic()
        self.left = False

    def allow(self, arrived: int) -> bool:
        """Raises the limit at the start, and when half of the window has arrived; returns True if it did."""
        if self._begin is None:
            self._begin = self.limit = arrived
        if self.limit - arrived > self.window // 2:
            return False
        self.limit = arrived + self.window
        self._limits.append(self.limit)
        return True

    def note(self, start: int, waited: float, size: int) -> None:
        """Notes the wait for the chunk at byte `start`, in seconds, and its size in bytes."""
        self.heard = monotonic()
        if start == self._begin:
            self._first_wait = waited
            return
        if self._first_wait is not None:
            round_trip, self._first_wait = self._first_wait - waited, None
            if round_trip > FAR_SECONDS:
                # Twice the bytes on the line: the next limit is sent when half of the window has arrived.
                self._enlarge(2 * round(size * round_trip / max(waited, 1e-3)))
        if start not in self._limits:
            self._usual = (self._usual + waited) / 2
        elif waited > max(HELD_UP_SECONDS, 2 * self._usual):
            self._enlarge(GROWTH * self.window)

    def _enlarge(self, window: int) -> None:
        wanted = min(window, LARGEST_WINDOW) - self.window
        if wanted > 0:
            self.window += self._grow(wanted)


class Transfers:
    """The uploads under way. Used on the event loop.

    Args:
        memory: bytes of all windows together, at least the smallest window for each transfer.
        count: uploads at a time. Further ones wait; the member with the fewest uploads goes first.
        tally: counts the uploads.
    """

    def __init__(self, memory: int, count: int, tally: Tally) -> None:
        self._tally = tally
        tally.begin(UPLOADS, ("waiting",), ("under way",))
        tally.begin(PAYLOAD_BYTES, ("received",), ("sent",))
        self._spare = memory - count * SMALLEST_WINDOW  # bytes by which windows may grow
        self._free = count
        self._under_way: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, member: str, end: Callable[[Refusal], None]) -> AsyncIterator[Transfer]:
        """A place among the uploads under way; waits until one is free.

        An upload that neither sends nor reads loses its place, and its call is ended with `end`.
        """
        with self._tally.during(UPLOADS, "waiting"):
            await self._enter(member)
        more = min(FIRST_WINDOW - SMALLEST_WINDOW, self._spare // PLENTY)
        transfer = Transfer(self._take, SMALLEST_WINDOW + self._take(more))
        watch = asyncio.create_task(self._watch(transfer, member, end))
        try:
            with self._tally.during(UPLOADS, "under way"):
                yield transfer
        finally:
            watch.cancel()
            self._leave(transfer, member)

    async def _watch(self, transfer: Transfer, member: str, end: Callable[[Refusal], None]) -> None:
        while (left := transfer.heard + IDLE_SECONDS - monotonic()) > 0:
            await asyncio.sleep(left)
        self._leave(transfer, member)
        end(Refusal("limit:idle", f"for {IDLE_SECONDS:.0f} s nothing of this upload was sent, or no window was read"))

    async def _enter(self, member: str) -> None:
        if self._free:
            self._free -= 1
            self._under_way[member] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        waiting = (member, turn)
        self._waiting.append(waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._give_away(member)  # the place came at the same moment
            raise

    def _leave(self, transfer: Transfer, member: str) -> None:
        if not transfer.left:
            transfer.left = True
            self._spare += transfer.window - SMALLEST_WINDOW
            self._give_away(member)

    def _give_away(self, member: str) -> None:
        """Frees the place of a member, and gives it to the waiting member with the fewest uploads."""
        self._under_way[member] -= 1
        if not self._under_way[member]:
            del self._under_way[member]
        if not self._waiting:
            self._free += 1
            return
        first = min(self._waiting, key=lambda waiting: self._under_way[waiting[0]])
        self._waiting.remove(first)
        self._under_way[first[0]] += 1
        first[1].set_result(None)

    def _take(self, wanted: int) -> int:
        granted = min(wanted, self._spare)
        self._spare -= granted
        return granted
