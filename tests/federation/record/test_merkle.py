"""The Merkle tree of the log, against the published test vectors of Certificate Transparency and a second reading."""

import random

import pytest

from federation.record.merkle import BLOCK, Tree, continues, leaf_hash, node_hash, root_from, tree_root

# The inputs and roots of the reference implementation of RFC 6962, which RFC 9162 keeps.
INPUTS = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
SIZE = 4 * BLOCK + 77
LEAVES = [leaf_hash(str(number).encode()) for number in range(SIZE)]


def grown(size: int = SIZE) -> Tree:
    tree = Tree(lambda start, stop: LEAVES[start:stop])
    for leaf in LEAVES[:size]:
        tree.append(leaf)
    return tree


def test_the_roots_are_those_of_the_reference_implementation() -> None:
    leaves = [leaf_hash(bytes.fromhex(text)) for text in INPUTS]
    assert [tree_root(leaves[: size + 1]).hex() for size in range(8)] == ROOTS


def test_a_tree_that_grows_over_several_blocks_has_the_roots_of_its_leaves() -> None:
    tree = Tree(lambda start, stop: LEAVES[start:stop])
    for size, leaf in enumerate(LEAVES, 1):
        tree.append(leaf)
        if size % 97 == 0 or size % BLOCK in (0, 1, BLOCK - 1):
            assert tree.root() == tree_root(LEAVES[:size])
    assert tree.root(700) == tree_root(LEAVES[:700])


def test_a_proof_shows_that_a_tree_continues_another_one_and_no_other_proof_does() -> None:
    tree, draw = grown(), random.Random(5)
    pairs = [(1, 1), (1, SIZE), (SIZE, SIZE), (BLOCK, SIZE), (BLOCK + 1, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK)]
    pairs += [(min(two), max(two)) for two in (draw.sample(range(1, SIZE + 1), 2) for _ in range(60))]
    for first, second in pairs:
        proof = tree.consistency(first, second)
        assert len(proof) <= 12  # at most log2 of the size, and one
        one, two = tree.root(first), tree.root(second)
        assert continues(first, one, second, two, proof)
        other = leaf_hash(b"other")
        assert not continues(first, other, second, two, proof)
        assert not continues(first, one, second, other, proof)
        assert not continues(first, one, second, two, [*proof, other])
        assert not continues(second + 1, one, second, two, proof)
        for place in range(len(proof)):
            assert not continues(first, one, second, two, [*proof[:place], other, *proof[place + 1 :]])
            assert not continues(first, one, second, two, proof[:place] + proof[place + 1 :])


def test_a_tree_whose_early_leaf_differs_continues_nothing_that_was_signed_before() -> None:
    changed = [leaf_hash(b"changed"), *LEAVES[1:]]
    tree = Tree(lambda start, stop: changed[start:stop])
    for leaf in changed:
        tree.append(leaf)
    assert not continues(300, grown(300).root(), SIZE, tree.root(), tree.consistency(300, SIZE))


@pytest.mark.parametrize(("first", "second"), [(0, 3), (4, 3), (1, SIZE + 1)])
def test_there_is_no_proof_between_sizes_that_do_not_exist(first: int, second: int) -> None:
    with pytest.raises(ValueError, match="no proof from"):
        grown().consistency(first, second)


def test_hashes_of_another_length_prove_nothing() -> None:
    two = node_hash(LEAVES[0], LEAVES[1])
    assert continues(1, LEAVES[0], 2, two, [LEAVES[1]])
    assert not continues(1, LEAVES[0], 2, two, [LEAVES[1] + b"0"])
    assert not continues(0, b"", 2, two, [LEAVES[1]])


@pytest.mark.parametrize("seed", range(20))
def test_some_leaves_and_the_nodes_around_them_give_the_roots_of_each_size(seed: int) -> None:
    drawn = random.Random(seed)
    size = drawn.randint(1, 900)
    leaves, tree = LEAVES[:size], grown(size)
    shown = sorted({drawn.randrange(size) for _ in range(drawn.randint(1, 40))})
    sizes = sorted({size, *(drawn.randint(1, size) for _ in range(3))})
    nodes = tree.around(shown, sizes)
    assert not any(start <= number < stop for start, stop in nodes for number in shown)
    known = nodes | {(number, number + 1): leaves[number] for number in shown}
    for first in [*sizes, *(number + 1 for number in shown)]:
        assert root_from(dict(known), 0, first) == tree_root(leaves[:first])
    alone = tree.around(shown, [size]) | {(number, number + 1): leaves[number] for number in shown}
    for one in alone:  # none is too many
        with pytest.raises(LookupError, match="nothing is known of leaf"):
            root_from({place: node for place, node in alone.items() if place != one}, 0, size)
