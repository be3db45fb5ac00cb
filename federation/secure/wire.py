"""Elements as bytes (section 2a): little-endian, exact lengths, no element at or above the modulus."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.secure.errors import Fault, Malformed
from federation.secure.fields import Elements, Field
from federation.secure.hashing import exactly

Words = NDArray[np.unsignedinteger[Any]]


def pack(field: Field, elements: Elements) -> bytes:
    """Elements as words of 4 (p) or 8 (q) bytes, row by row."""
    return elements.astype(field.word).tobytes()


def unpack(field: Field, data: bytes, count: int) -> Elements:
    """`count` elements, (count,).

    Raises:
        Malformed: another length, or a word at or above the modulus.
    """
    # Section 2a: a list that is longer or shorter would be read as shares of other secrets.
    exactly(data, field.width * count, f"a message of {count} elements")
    elements = np.frombuffer(data, field.word).astype(np.uint64)
    # Section 2a: x and x + p are one share in two spellings. The arithmetic expects values below p, and would be wrong.
    if (elements >= np.uint64(field.modulus)).any():
        raise Malformed(Fault.ELEMENT, f"a word is at or above 2^{field.bits} - 1")
    return elements
