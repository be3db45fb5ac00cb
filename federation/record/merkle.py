"""The Merkle tree of RFC 9162, section 2.1, with SHA-256: roots, and proofs that a longer log continues a shorter one.

Leaves and nodes are hashes of 32 bytes. The tree of no leaves has no root here.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

HASH_BYTES = 32
BLOCK = 256  # leaves; of a complete block, only the root is kept in memory


def leaf_hash(data: bytes) -> bytes:
    """The leaf of some data (2.1.1)."""
    return hashlib.sha256(b"\0" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The node above two hashes (2.1.1)."""
    return hashlib.sha256(b"\1" + left + right).digest()


def tree_root(leaves: Sequence[bytes]) -> bytes:
    """The root over one leaf or more (2.1.1)."""
    if len(leaves) == 1:
        return leaves[0]
    half = _split(len(leaves))
    return node_hash(tree_root(leaves[:half]), tree_root(leaves[half:]))


def _split(size: int) -> int:
    """The largest power of two below `size`."""
    return 1 << (size - 1).bit_length() - 1


class Tree:
    """A tree that grows. It keeps the roots of complete blocks and reads the leaves of others where they are stored.

    Args:
        read: returns the leaves from one number up to another.
    """

    def __init__(self, read: Callable[[int, int], Sequence[bytes]]) -> None:
        self.size = 0
        self._block = lru_cache(maxsize=16)(lambda number: list(read(number * BLOCK, (number + 1) * BLOCK)))
        self._tail: list[bytes] = []  # the leaves of the last block, while it is incomplete
        self._levels: list[list[bytes]] = []  # the roots of complete subtrees of BLOCK, 2 BLOCK, 4 BLOCK, ... leaves

    def append(self, leaf: bytes) -> None:
        """Adds a leaf at the end."""
        self._tail.append(leaf)
        self.size += 1
        if len(self._tail) < BLOCK:
            return
        complete, level = tree_root(self._tail), 0
        self._tail = []
        while True:
            if level == len(self._levels):
                self._levels.append([])
            nodes = self._levels[level]
            nodes.append(complete)
            if len(nodes) % 2:
                return
            complete, level = node_hash(nodes[-2], nodes[-1]), level + 1

    def root(self, size: int | None = None) -> bytes:
        """The root over the first `size` leaves, of which there is at least one; over all by default."""
        return self._range(0, self.size if size is None else size)

    def consistency(self, first: int, second: int) -> list[bytes]:
        """The proof that the first `second` leaves continue the first `first` ones (2.1.4.1).

        Raises:
            ValueError: not 0 < first <= second <= size.
        """
        if not 0 < first <= second <= self.size:
            raise ValueError(f"no proof from {first} to {second} leaves: the tree has {self.size}")
        return self._subproof(first, 0, second, known=True)

    def _subproof(self, first: int, start: int, stop: int, *, known: bool) -> list[bytes]:
        """The hashes that lead from the first `first` leaves of a range to the range; `known` leaves out the first."""
        if first == stop - start:
            return [] if known else [self._range(start, stop)]
        half = _split(stop - start)
        if first <= half:
            return [
                *self._subproof(first, start, start + half, known=known),
                self._range(start + half, stop),
            ]
        return [
            *self._subproof(first - half, start + half, stop, known=False),
            self._range(start, start + half),
        ]

    def around(self, leaves: Collection[int], sizes: Iterable[int]) -> dict[tuple[int, int], bytes]:
        """The nodes that lead from some leaves, by their numbers, to the roots over the first `sizes` leaves.

        Each is the root over the leaves from one number up to another, none of which is among `leaves`. For one size
        they are as few as can be. `root_from` computes the roots from them.
        """
        return {(start, stop): self._range(start, stop) for start, stop in ranges_around(leaves, sizes)}

    def _range(self, start: int, stop: int) -> bytes:
        """The root over leaves that are a subtree of some tree."""
        size = stop - start
        if size >= BLOCK and size & (size - 1) == 0:
            return self._levels[(size // BLOCK).bit_length() - 1][start // size]
        if size > BLOCK:
            half = start + _split(size)
            return node_hash(self._range(start, half), self._range(half, stop))
        number, begin = divmod(start, BLOCK)
        leaves = self._tail if number == self.size // BLOCK else self._block(number)
        return tree_root(leaves[begin : begin + size])


def ranges_around(leaves: Collection[int], sizes: Iterable[int]) -> set[tuple[int, int]]:
    """The ranges of the nodes that lead from some leaves to the roots over the first `sizes` leaves: see `around`."""
    ordered = sorted(leaves)
    ranges: set[tuple[int, int]] = set()
    visited: set[tuple[int, int]] = set()

    def visit(start: int, stop: int) -> None:
        if (start, stop) in visited:
            return
        visited.add((start, stop))
        if bisect_left(ordered, start) == bisect_left(ordered, stop):
            ranges.add((start, stop))
        elif stop - start > 1:
            half = start + _split(stop - start)
            visit(start, half)
            visit(half, stop)

    for size in sizes:
        visit(0, size)
    return ranges


def root_from(nodes: dict[tuple[int, int], bytes], start: int, stop: int) -> bytes:
    """The root over the leaves from one number up to another, from leaves and other nodes of the tree.

    The computed roots are added to `nodes`: trees of several sizes have most of their nodes in common.

    Raises:
        LookupError: `nodes` lacks a leaf or node.
    """
    present = nodes.get((start, stop))
    if present is not None:
        return present
    if stop - start <= 1:
        raise LookupError(f"nothing is known of leaf {start}")
    half = start + _split(stop - start)
    root = nodes[start, stop] = node_hash(root_from(nodes, start, half), root_from(nodes, half, stop))
    return root


def continues(first: int, first_root: bytes, second: int, second_root: bytes, proof: Sequence[bytes]) -> bool:
    """True if a proof shows that the tree of `second` leaves continues that of `first` leaves (2.1.4.2)."""
    if not 0 < first <= second or any(len(node) != HASH_BYTES for node in proof):
        return False
    if first == second:
        return not proof and first_root == second_root
    path = list(proof) if first & (first - 1) else [first_root, *proof]
    if not path:
        return False
    fn, sn = first - 1, second - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    first_hash = second_hash = path[0]
    for node in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            first_hash, second_hash = node_hash(node, first_hash), node_hash(node, second_hash)
            while fn and not fn & 1:
                fn, sn = fn >> 1, sn >> 1
        else:
            second_hash = node_hash(second_hash, node)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and first_hash == first_root and second_hash == second_root
