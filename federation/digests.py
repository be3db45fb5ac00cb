"""Self-describing digests: `blake3:<hex>` by default, `sha256:<hex>` where a policy asks for it.

A blob's file name is its digest, so `parse` checks every digest that came over the wire.
"""

import hashlib
import re
from pathlib import Path
from typing import Protocol

from blake3 import blake3

DEFAULT_ALGORITHM = "blake3"
_PIECE = 1 << 20  # bytes of a file that are read at a time
_PATTERN = re.compile(r"(blake3|sha256):([0-9a-f]{64})")


class Hasher(Protocol):
    """A running hash: fed piece by piece, read once."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Adds the next piece."""

    def hexdigest(self) -> str:
        """The digest of all pieces, 64 hexadecimal characters."""


def hasher(algorithm: str = DEFAULT_ALGORITHM) -> Hasher:
    """A fresh hasher, "blake3" or "sha256". Raises ValueError for another algorithm."""
    if algorithm == "blake3":
        return blake3()
    if algorithm == "sha256":
        return hashlib.sha256()
    raise ValueError(f"unknown digest algorithm {algorithm!r}: use blake3 or sha256")


def digest(data: bytes | memoryview, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The digest of `data`, with its algorithm in front."""
    state = hasher(algorithm)
    state.update(data)
    return f"{algorithm}:{state.hexdigest()}"


def file_digest(path: Path, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """The digest of a file, with its algorithm in front. Raises OSError."""
    state = hasher(algorithm)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return f"{algorithm}:{state.hexdigest()}"


def derived_seed(text: str) -> int:
    """A seed, 0 to 2^63 - 1, of a text that names its purpose and place."""
    return int.from_bytes(blake3(text.encode()).digest(8), "little") >> 1


def model_name(text: str) -> str:
    """The only name of a model: the digest of its file by the default algorithm, in lower case.

    Sums are counted by model, so a model must not have two names. Raises ValueError for another name.
    """
    algorithm, _ = parse(text)
    if algorithm != DEFAULT_ALGORITHM:
        raise ValueError(f"a model is named by its {DEFAULT_ALGORITHM} digest, and not by {text}")
    return text


def parse(text: str) -> tuple[str, str]:
    """Splits a digest into algorithm and hexadecimal value. Raises ValueError if it is not canonical."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"not a digest: {text[:80]!r}; expected blake3:<64 hex digits> or sha256:<64 hex digits>")
    return match[1], match[2]
