"""A line to a port of this machine that delays, has a rate, and breaks: a TCP proxy whose event loop is in a thread.

It has no losses and no slow start: what TCP itself makes of a long line is not part of what is measured through it.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

PIECE = 1 << 16  # bytes read at a time


@dataclass
class Direction:
    """One direction of the line, which all connections share.

    Attributes:
        rate: bytes per second.
        burst: seconds of the rate that may be made up for after the machine was busy.
        carried: bytes that have left the line.
        on_way: bytes that are on the line, unless a connection broke.
    """

    rate: float
    burst: float
    carried: int = 0
    on_way: int = 0
    _found: int = field(default=0, init=False)
    _free: float = field(default=0.0, init=False)  # when the last byte will have entered the line

    @property
    def filled(self) -> float:
        """How many bytes were on the line when a byte left it, on average."""
        return self._found / self.carried

    def leave(self, count: int) -> None:
        """Counts bytes that leave the line."""
        self._found += count * self.on_way
        self.on_way -= count
        self.carried += count

    async def enter(self, count: int) -> float:
        """Waits until bytes have entered the line; returns when the last did."""
        self._free = max(self._free, time.monotonic() - self.burst) + count / self.rate
        free = self._free
        await asyncio.sleep(free - time.monotonic())
        self.on_way += count
        return max(free, time.monotonic())


class SlowLine:
    """The line. It can be changed while it is used; new connections go to `target`.

    Args:
        target: the port.
        delay: seconds in each direction: half of a round trip.
        rate: bytes per second in each direction.
        burst: seconds of the rate that may be made up for after the machine was busy.
        cut_after: bytes that a connection carries, both directions together, before it breaks; 0: none breaks.

    Attributes:
        port: where it listens, on 127.0.0.1.
        cuts: connections that broke.
        damage: the byte of the way up, counted over all connections, that is changed on its way; -1: none.
    """

    def __init__(
        self, target: int, *, delay: float = 0.0, rate: float = 1e12, burst: float = 0.05, cut_after: float = 0
    ) -> None:
        self.target = target
        self.delay = delay
        self.cut_after = cut_after
        self.cuts = 0
        self.damage = -1
        self.up, self.down = Direction(rate, burst), Direction(rate, burst)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE), self._loop
        ).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Breaks every connection."""

        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        left = [self.cut_after]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target, limit=PIECE)
            writers.append(far_writer)
            pumps = (self._pump(reader, far_writer, self.up, left), self._pump(far_reader, writer, self.down, left))
            tasks = [asyncio.create_task(pump) for pump in pumps]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self.cuts += self.cut_after > 0 and left[0] == 0
        except (OSError, asyncio.CancelledError):
            pass  # nobody listens there at present, or the line is closed
        finally:
            for end in writers:
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction, left: list[float]
    ) -> None:
        """Carries one direction of a connection, until it ends or breaks."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivery = asyncio.create_task(self._deliver(under_way, writer, direction, left))
        try:
            while (data := await reader.read(PIECE)) and not delivery.done():
                entered = await direction.enter(len(data))
                under_way.put_nowait((entered + self.delay, data))
            under_way.put_nowait((time.monotonic() + self.delay, b""))
            await delivery
        except OSError:
            pass
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)

    async def _deliver(
        self,
        under_way: "asyncio.Queue[tuple[float, bytes]]",
        writer: asyncio.StreamWriter,
        direction: Direction,
        left: list[float],
    ) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - time.monotonic())
            if not data:
                return
            if self.cut_after:
                data = data[: int(left[0])]
                left[0] -= len(data)
            if direction is self.up and 0 <= (at := self.damage - direction.carried) < len(data):
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            writer.write(data)
            await writer.drain()
            direction.leave(len(data))
            if self.cut_after and left[0] == 0:
                writer.close()  # what was delivered arrives
                with suppress(OSError):
                    await writer.wait_closed()
                return


@contextmanager
def slow_line(target: int, **arguments: float) -> Iterator[SlowLine]:
    """A line that is closed at the end; arguments as for `SlowLine`."""
    line = SlowLine(target, **arguments)
    try:
        yield line
    finally:
        line.close()
