"""Streams of events: each keeps one open page up to date, and sends the parts of it that have changed, whole."""

import asyncio
import hashlib
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

PAUSE_SECONDS = 1.0  # at least, between two events of one page: rounds may be shorter
PART_SECONDS = 0.03  # between two parts
SIGN_OF_LIFE_SECONDS = 15.0
_KEPT = 64  # pages, made for streams, that are kept while nothing changes

Parts = Mapping[str, str]  # the HTML of each part of a page, by the id of its element


def mark(part: str) -> str:
    """A short digest of a part of a page."""
    return hashlib.blake2b(part.encode(), digest_size=4).hexdigest()


def marks(parts: Parts) -> str:
    """The digests of all parts, for the address of the stream: it begins with what differs from them."""
    return ".".join(mark(part) for part in parts.values())


class ChangeBell:
    """Wakes every stream when the state has changed; `ring` may be called from any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Event] = set()
        self.stopped = False

    def ring(self) -> None:
        """Wakes every stream."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    def stop(self) -> None:
        """Ends every stream; called on the event loop."""
        self.stopped = True
        self._wake()

    def listen(self) -> asyncio.Event:
        """An event that is set at each change, until `leave`; called on the event loop."""
        self._loop = asyncio.get_running_loop()
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def leave(self, event: asyncio.Event) -> None:
        """Forgets an event."""
        self._waiting.discard(event)


class Shared:
    """Makes each page once for all its streams, until its version changes."""

    def __init__(self) -> None:
        self._made: OrderedDict[str, tuple[object, Parts]] = OrderedDict()
        self._lock = threading.Lock()

    def parts(self, key: str, version: object, make: Callable[[], Parts]) -> Parts:
        """The parts of the page `key`, made again if `version` is another one."""
        with self._lock:
            made = self._made.get(key)
            if made is None or made[0] != version:
                made = version, make()
                self._made[key] = made
            self._made.move_to_end(key)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
            return made[1]


async def stream(bell: ChangeBell, have: str, parts: Callable[[], Parts], *, pause: float) -> AsyncIterator[bytes]:
    """Yields events with the parts of a page that differ from those that the browser has.

    Args:
        bell: rings when something may have changed.
        have: the `marks` of the page that the browser loaded.
        parts: makes the page; called in another thread.
        pause: seconds between two events.
    """
    changed = bell.listen()
    sent: dict[str, str] | None = None
    try:
        while not bell.stopped:
            changed.clear()
            begun = time.monotonic()
            made = await asyncio.to_thread(parts)
            if sent is None:
                sent = dict(zip(made, have.split("."), strict=False))
            fresh = {name: part for name, part in made.items() if sent.get(name) != mark(part)}
            if fresh:
                sent |= {name: mark(part) for name, part in fresh.items()}
                for name, part in fresh.items():
                    yield _event(name, part)
                    await asyncio.sleep(PART_SECONDS)  # the browser draws each part in a task of its own
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - begun)))
            while not changed.is_set():
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b": the console is well\n\n"
    finally:
        bell.leave(changed)


def _event(name: str, part: str) -> bytes:
    lines = "\n".join(f"data: {line}" for line in part.splitlines())
    return f"event: {name}\n{lines or 'data:'}\n\n".encode()


async def compressed(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream as gzip, complete after each event; parts that repeat earlier ones take few bytes."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    yield packer.compress(b": welcome\n\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    async for event in events:
        yield packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)
