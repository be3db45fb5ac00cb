"""Top-k: the entries of the largest magnitude, and their positions."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import Embedding, Jacobian, Message

_EXACT = 1 << 24  # float32 holds every whole number up to here
_BITS = 24  # so a float32 can carry as many bits


@dataclass(frozen=True, kw_only=True)
class TopK(Embedding):
    """The K entries of A, of all rows together, that are largest in magnitude; the others count as 0.

    Their positions are part of the budget, as float32 like the values: either K gaps between positions, or a bitmap
    with 24 entries of A to a float, whichever leaves more for values. Where the whole of A fits, it is sent. Gaps that
    float32 could not hold are bridged by fillers of value 0, for which room is kept. Among entries of one magnitude the
    first ones are taken. Biased: entries that are small at every client are not sent, however large their sum.
    """

    name: ClassVar[str] = "top-k"

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        entries, budget = served * self.d, int(self.budget * self.d)
        bitmap = -(-entries // _BITS)
        by_bitmap, by_gaps = budget - bitmap, max(budget // 2, 1 + entries // _EXACT)
        if budget >= entries:
            return (("values", entries),)
        if by_bitmap > by_gaps:
            return (("values", by_bitmap), ("bitmap", bitmap))
        return (("values", by_gaps), ("gaps", by_gaps))

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        values, entries = message["values"], served * self.d
        if len(self.layout(served)) == 1:
            return values.reshape(served, self.d)
        sparse = np.zeros(entries, dtype=np.float32)
        if "bitmap" in message:
            where = np.flatnonzero(_unpacked(message["bitmap"], entries))[: len(values)]
            sparse[where] = values[: len(where)]
        else:
            where = np.cumsum(message["gaps"].astype(np.int64))
            used = (values != 0) & (where >= 0) & (where < entries)
            sparse[where[used]] = values[used]
        return sparse.reshape(served, self.d)

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        entries = A.reshape(-1)
        lengths = dict(self.layout(len(A)))
        room = lengths["values"]
        if len(lengths) == 1:
            return {"values": entries}
        if "bitmap" in lengths:
            where = largest(entries, room)
            flags = np.zeros(len(entries), dtype=np.uint8)
            flags[where] = 1
            return {"values": entries[where], "bitmap": _packed(flags)}
        where = largest(entries, room - len(entries) // _EXACT)
        return _with_gaps(where, entries[where], room)


def largest(entries: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The positions of the `count` values of the largest magnitude, ascending; of equal ones, the first."""
    magnitudes = np.abs(entries)
    least = np.partition(magnitudes, len(entries) - count)[len(entries) - count]
    above, equal = np.flatnonzero(magnitudes > least), np.flatnonzero(magnitudes == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def _with_gaps(where: NDArray[np.int64], values: NDArray[Any], room: int) -> dict[str, NDArray[Any]]:
    """Values and the gaps before them, with fillers of value 0 in wide gaps and, of gap 0, at the end."""
    gaps = np.diff(where, prepend=0)
    fillers = gaps // _EXACT
    at = np.arange(len(where)) + np.cumsum(fillers)
    rows = {"values": np.zeros(room), "gaps": np.zeros(room)}
    rows["gaps"][: at[-1] + 1] = _EXACT
    rows["gaps"][at] = gaps % _EXACT
    rows["values"][at] = values
    return rows


def _packed(flags: NDArray[np.uint8]) -> NDArray[np.float32]:
    octets = np.packbits(np.pad(flags, (0, -len(flags) % _BITS))).reshape(-1, 3).astype(np.int32)
    return (octets @ np.array([1 << 16, 1 << 8, 1], dtype=np.int32)).astype(np.float32)


def _unpacked(words: NDArray[np.float32], count: int) -> NDArray[np.uint8]:
    whole = np.clip(words, 0, _EXACT - 1).astype(np.int32)
    octets = np.stack([whole >> 16, whole >> 8, whole], axis=1).astype(np.uint8)
    return np.unpackbits(octets.reshape(-1), count=count)
