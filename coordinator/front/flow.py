"""Moves bytes from one socket to another, without a copy in this process where the system allows it."""

import contextlib
import fcntl
import os
import socket

BYTES = 1 << 20  # the most that one flow holds
# The system gives the unprivileged processes of a user 64 MiB for pipes, and then makes them smaller than by default.
LARGE = 32  # pipes of that size at a time
SMALL = BYTES // 4  # bytes in each further pipe
SPARE = 16  # empty pipes that are kept for the next flows


class Pipe:
    """Keeps bytes in the kernel: they are spliced from the source into a pipe, and from the pipe into the sink."""

    def __init__(self, size: int) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.large = False
        for wanted in (size, SMALL):  # the user's share of pipe memory may be used up: then the pipe stays as it is
            with contextlib.suppress(OSError):
                self.large = fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, wanted) >= BYTES
                break

    def take(self, source: socket.socket) -> int:
        """Reads from `source` into the empty pipe; returns the number of bytes, 0 at the end of the stream."""
        return os.splice(source.fileno(), self._write, BYTES, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)

    def give(self, sink: socket.socket, count: int) -> int:
        """Writes up to `count` bytes to `sink`; returns the number written."""
        return os.splice(self._read, sink.fileno(), count, flags=os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        """Closes the descriptors."""
        os.close(self._read)
        os.close(self._write)


class Buffer:
    """Copies bytes through this process, where the system has no splice or no descriptor for a pipe."""

    def __init__(self) -> None:
        self._bytes = memoryview(b"")

    def take(self, source: socket.socket) -> int:
        """Reads from `source`; returns the number of bytes, 0 at the end of the stream."""
        self._bytes = memoryview(source.recv(BYTES))
        return len(self._bytes)

    def give(self, sink: socket.socket, count: int) -> int:
        """Writes its bytes to `sink`; returns the number written."""
        sent = sink.send(self._bytes)
        self._bytes = self._bytes[sent:]
        return sent

    def close(self) -> None:
        """Does nothing: a buffer holds no descriptor."""


class Holds:
    """Lends pipes to flows, as long as they have bytes in them; buffers where pipes cannot be had."""

    def __init__(self) -> None:
        self._spare: list[Pipe] = []  # the large ones last
        self._large = 0  # pipes that are open
        self._splices = _can_splice()

    def borrow(self) -> Pipe | Buffer:
        """An empty hold."""
        if self._spare:
            return self._spare.pop()
        if self._splices:
            try:
                pipe = Pipe(BYTES if self._large < LARGE else SMALL)
            except OSError:  # no descriptor is left
                return Buffer()
            self._large += pipe.large
            return pipe
        return Buffer()

    def give_back(self, hold: Pipe | Buffer, *, empty: bool) -> None:
        """Takes a hold back; one that is not empty is thrown away with its bytes."""
        closed: Pipe | Buffer | None = hold
        if empty and isinstance(hold, Pipe):
            self._spare.insert(len(self._spare) if hold.large else 0, hold)
            closed = self._spare.pop(0) if len(self._spare) > SPARE else None
        if closed is not None:
            closed.close()
            self._large -= isinstance(closed, Pipe) and closed.large


class Flow:
    """One direction of a connection: reads from a non-blocking source, writes to a non-blocking sink.

    Attributes:
        waiting: bytes that were read and not written yet; nothing more is read before they are.
        ended: the source has ended.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, holds: Holds) -> None:
        self._source = source
        self._sink = sink
        self._holds = holds
        self._hold: Pipe | Buffer | None = None
        self.waiting = 0
        self.ended = False

    @property
    def finished(self) -> bool:
        """Everything has been written, and nothing more will come."""
        return self.ended and not self.waiting

    def move(self) -> None:
        """Moves the bytes that can move now, and the end of the source; raises OSError if a socket is broken."""
        if self.waiting:
            self._give()
        if self.waiting or self.ended:
            return
        if self._hold is None:
            self._hold = self._holds.borrow()
        try:
            self.waiting = self._hold.take(self._source)
            self.ended = self.waiting == 0
        except BlockingIOError:
            pass
        else:
            self._give()
        if not self.waiting:
            self._return_hold()
        if self.finished:
            self._sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Drops the waiting bytes."""
        self._return_hold()
        self.waiting = 0
        self.ended = True

    def _give(self) -> None:
        if self._hold is None:
            raise AssertionError("bytes wait in no hold")
        try:
            while self.waiting:
                self.waiting -= self._hold.give(self._sink, self.waiting)
        except BlockingIOError:
            pass

    def _return_hold(self) -> None:
        if self._hold is not None:
            self._holds.give_back(self._hold, empty=not self.waiting)
            self._hold = None


def _can_splice() -> bool:
    if not hasattr(os, "splice"):
        return False
    near, far = socket.socketpair()
    pipe = Pipe(SMALL)
    try:
        far.send(b"x")
        return pipe.take(near) == 1 and pipe.give(near, 1) == 1 and far.recv(1) == b"x"
    except OSError:
        return False
    finally:
        pipe.close()
        near.close()
        far.close()
