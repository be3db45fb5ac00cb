"""The sketches S and T: a random linear map, exact in integers and so the same on every machine (sections 2.3, 2a).

    q = rint(2^24 v);  table of 4 blocks of 4096 buckets;  k rows of dense signs;  S v = signs table / (2^24 sqrt(4 k))

Coordinate l takes the 8-byte little-endian word l of the stream `count`; in block b its bits 13b to 13b+11 are the
bucket, and bit 13b+12 set means minus. Row r takes 16384 bits of the stream `dense`, highest bit of a byte first, and a
bit that is set means minus. All sums are integers below 2^53, computed in float64 in any order, if
4 sum |q| <= 2^53. A vector of length 1 meets this for d below 2^54.

S is divided by its norm, which is computed from the integer sums: the common factor 1 / (2^24 sqrt(4 k)) cancels.
T has k' = 256 rows, and the factor is 2^-29: its fixed point is exact but for one rounding.
"""

import math

import numpy as np

from federation.secure.blocks import Blocks
from federation.secure.derivation import count_key, dense_key
from federation.secure.errors import Fault, Malformed
from federation.secure.fields import F_P, F_Q, Elements, Integers, Reals, fixed
from federation.secure.streams import Stream
from federation.secure.thresholds import S_BITS, T_BITS, T_ROWS

_BITS = 24
_PARTS = 4
_BUCKETS = 4096
_INDEX = 13  # bits of a bucket and its sign
_ROWS = 8  # of dense signs at a time: 1 MB, which fits into a core's cache


def integer_sketch(seed: bytes, vector: Blocks, rows: int) -> Integers:
    """The sums before they are divided, (k,): 2^24 sqrt(4 k) times the sketch.

    Args:
        seed: of the tables: the session for S, tau1 for T.
        vector: v in blocks.
        rows: k.

    Raises:
        Malformed: v is not finite, or so long that float64 would round the sums.
    """
    table = _table(seed, vector)
    whole, stream = table.sum(), Stream(dense_key(seed))
    sums = np.empty(rows)
    for start in range(0, rows, _ROWS):
        count = min(_ROWS, rows - start)
        minus = np.unpackbits(np.frombuffer(stream.read(count * len(table) // 8), np.uint8)).reshape(count, len(table))
        sums[start : start + count] = whole - 2 * (minus.astype(np.float64) @ table)
    return sums.astype(np.int64)


def first_sketch(session: bytes, unit: Blocks, rows: int) -> Elements:
    """S u / ||S u|| in F_p with 14 fractional bits, (k,).

    Raises:
        Malformed: u is not finite or too long, or its sketch is 0.
    """
    sums = integer_sketch(session, unit, rows)
    # Python's integers: squares of 53 bits do not fit into 64, and a rounded length would differ between machines.
    square = sum(int(value) ** 2 for value in sums)
    # Section 2.3: a zero has no direction. Divided by its length, it would be shared as an arbitrary element.
    if not square:
        raise Malformed(Fault.ZERO, "the sketch of the update is 0")
    return F_P.encode(fixed(sums / math.sqrt(square), S_BITS))


def second_sketch(tau1: bytes, vector: Blocks) -> Reals:
    """T v, (256,).

    Raises:
        Malformed: v is not finite, or too long.
    """
    return integer_sketch(tau1, vector, T_ROWS) / (2.0**_BITS * math.sqrt(_PARTS * T_ROWS))


def second_elements(tau1: bytes, unit: Blocks) -> Elements:
    """T u in F_q with 16 fractional bits, (256,).

    Raises:
        Malformed: u is not finite, or too long.
    """
    return F_Q.encode(fixed(second_sketch(tau1, unit), T_BITS))


def _table(seed: bytes, vector: Blocks) -> Reals:
    """The signed sums of each bucket of each part, (16384,)."""
    halves = np.zeros((_PARTS, 2, _BUCKETS))  # plus, minus
    stream, size = Stream(count_key(seed)), 0.0
    for block in vector:
        # Section 2a: integers first. Sums of floats depend on their order, and the check of T R compares the sketches
        # of several machines.
        q = np.rint(block.astype(np.float64) * 2.0**_BITS)
        # Section 2a: counted before the sums are used: beyond 2^53 they would be rounded.
        size += float(np.abs(q).sum())
        if not size <= 2.0**53 / _PARTS:  # or not a number
            raise Malformed(Fault.RANGE, "the vector is not finite, or too long for exact sums")
        words = np.frombuffer(stream.read(8 * len(q)), "<u8")
        for part in range(_PARTS):
            index = (words >> np.uint64(_INDEX * part)) & np.uint64(2 * _BUCKETS - 1)
            halves[part] += np.bincount(index.view(np.int64), weights=q, minlength=2 * _BUCKETS).reshape(2, _BUCKETS)
    table: Reals = (halves[:, 0] - halves[:, 1]).reshape(-1)
    return table
