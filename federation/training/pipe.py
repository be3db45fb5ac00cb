"""Messages between a worker and the process of an external trainer; docs/start/your-own-trainer.md describes them.

A message is a line of JSON, an object with a "type". If it has "bytes", that number of bytes follow: vectors of
float32, little-endian. `Messages` reads and writes them on both sides.
"""

import json
from collections.abc import Iterable
from reprlib import repr as shortened
from typing import IO, Any

import numpy as np

from federation.vectors import Array, Vector

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 20  # of a trainer's message; that of a worker has the name of each tensor
MAX_DIGITS = 40  # of an integer
FLOAT = np.dtype("<f4")

Header = dict[str, Any]


class PipeError(Exception):
    """Bytes that are no message; the message says why."""


class Messages:
    """The messages of one direction each: `read` from one stream, `write` to another.

    Args:
        source: to read from.
        sink: to write to.
        most: bytes that may follow a line.
        line: bytes of a line that is read.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes], most: int, line: int = MAX_LINE_BYTES) -> None:
        self.source, self.sink, self._most, self._line = source, sink, most, line

    def write(self, header: Header, vectors: Iterable[Array] = ()) -> None:
        """Writes a message and the vectors that follow. Raises OSError if the other side is gone."""
        parts = [np.ascontiguousarray(vector, dtype=FLOAT) for vector in vectors]
        if parts:
            header = {**header, "bytes": sum(part.nbytes for part in parts)}
        self.sink.write(json.dumps(header).encode() + b"\n")
        for part in parts:
            self.sink.write(part.data.cast("B"))
        self.sink.flush()

    def read(self) -> tuple[Header, Vector] | None:
        """The next message, and the floats that follow it, (n,); None at the end of the stream.

        Raises:
            PipeError: the bytes are not a message, or the message is incomplete.
        """
        line = self.source.readline(self._line)
        if not line:
            return None
        if len(line) == self._line:
            raise PipeError(f"a line of {self._line} bytes or more: {line[:80]!r}")
        try:
            header = json.loads(line.decode(), parse_int=_integer)
        except (ValueError, RecursionError):
            raise PipeError(f"a line that is not JSON: {line[:80]!r}") from None
        if not isinstance(header, dict) or not isinstance(header.get("type"), str):
            raise PipeError(f"a line that is no JSON object with a type: {line[:80]!r}")
        count = header.get("bytes", 0)
        if not isinstance(count, int) or not 0 <= count <= self._most or count % FLOAT.itemsize:
            number = shortened(count)
            raise PipeError(f"{header['type'][:40]!r} with {number} bytes; at most {self._most}, a multiple of 4")
        data = self.source.read(count)
        if len(data) < count:
            raise PipeError(f"{header['type'][:40]!r} ended after {len(data)} of {count} bytes")
        return header, np.frombuffer(data, FLOAT)


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise PipeError(f"an integer of {len(text)} digits; at most {MAX_DIGITS}")
    return int(text)
