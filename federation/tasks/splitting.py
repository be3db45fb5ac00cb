"""Cuts a client's samples into train, validation and test: at random, by class, or with groups that stay together."""

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation", "test")
_TRAIN, _VALIDATION, _TEST = range(3)
_DRAWS = 50  # of which the best is taken
_SPLIT = 1  # the random stream; those of `federation.tasks.partition` have other numbers

Indices = NDArray[np.int64]


def split(
    count: int,
    *,
    seed: int = 0,
    index: int = 0,
    test: bool = True,
    groups: Indices | None = None,
    labels: Indices | None = None,
) -> tuple[Indices, Indices, Indices]:
    """Cuts a client's samples into train, validation and test at random: 80/10/10, or 90/10/0 if `test` is False.

    With `groups`, (count,) keys, the samples of a key stay together. A split then comes as near to its size as the
    groups allow. With `labels`, (count,) classes, each split keeps the shares of the classes; a class with as many
    samples (or groups) as there are splits is in each of them, while there is room.

    Returns:
        Three disjoint, ascending arrays that make up 0 to count - 1. From three samples on (with `groups`: from three
        groups on), no other is empty.
    """
    held = max(1, round(count / 10)) if count >= 3 else 0
    kept = held if test else 0
    random = np.random.default_rng([seed, _SPLIT, index])
    if groups is None and labels is None:
        order = random.permutation(count)
        train, validation, tested = np.split(order, [count - held - kept, count - kept])
        return np.sort(train), np.sort(validation), np.sort(tested)
    kinds = np.zeros(count, np.int64) if labels is None else _numbered(labels)
    if groups is None:
        places = _by_class(kinds, held, kept, random)
    else:
        keys = _numbered(groups)
        places = _by_group(counts_of(keys, kinds), held, kept, random)[keys]
    train, validation, tested = (np.flatnonzero(places == place) for place in (_TRAIN, _VALIDATION, _TEST))
    return train, validation, tested


def counts_of(keys: Indices, kinds: Indices) -> Indices:
    """(groups, classes): how many samples of each class a group has; keys and classes count from 0."""
    shape = (keys.max(initial=-1) + 1, kinds.max(initial=-1) + 1)
    return np.bincount(keys * shape[1] + kinds, minlength=shape[0] * shape[1]).reshape(shape)


def _numbered(values: Indices) -> Indices:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _by_class(kinds: Indices, held: int, kept: int, random: np.random.Generator) -> Indices:
    """The split of each sample, of which `held` are for validation and `kept` for testing."""
    sizes = np.bincount(kinds)
    validation = _shares(sizes, held, least=3 if kept else 2)
    tested = _shares(sizes - validation, kept, least=2)
    order = random.permutation(len(kinds))
    order = order[np.argsort(kinds[order], kind="stable")]
    kind = kinds[order]
    rank = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[kind]  # among the samples of its class
    places = np.empty_like(order)
    places[order] = np.where(
        rank < validation[kind], _VALIDATION, np.where(rank < (validation + tested)[kind], _TEST, _TRAIN)
    )
    return places


def _shares(sizes: Indices, held: int, least: int) -> Indices:
    """(C,) the samples of each class, with these sizes, in a split of `held` samples: nearly in proportion.

    A class of at least `least` samples gets one; where there are more such classes than samples, the largest do.
    """
    ideal = held * sizes / max(1, sizes.sum())
    shares: Indices = np.minimum(np.floor(ideal).astype(np.int64), sizes)
    largest = np.argsort(-sizes, kind="stable")
    present = largest[sizes[largest] >= least][:held]
    shares[present] = np.maximum(shares[present], 1)
    while shares.sum() > held:
        shares[np.argmax(np.where(shares > 1, shares - ideal, -np.inf))] -= 1
    while shares.sum() < held:
        shares[np.argmax(np.where(shares < sizes, ideal - shares, -np.inf))] += 1
    return shares


def _by_group(counts: Indices, held: int, kept: int, random: np.random.Generator) -> Indices:
    """The split of each group, whose samples of each class are `counts` (groups, classes).

    First, each class comes into each split, the class of the fewest groups first. The other groups are drawn at random,
    several times; the draw counts whose splits come nearest to their sizes and to the shares of the classes.
    """
    sizes, total = counts.sum(axis=1), counts.sum(axis=0)
    most = np.array([sizes.sum() - held - kept, held, kept])
    wanted = np.outer(most / max(1, sizes.sum()), total)
    present = _present(counts, most, random)
    others = np.flatnonzero(present < 0)
    drawn = [_drawn(present, random.permutation(others), sizes, most) for _ in range(_DRAWS)]

    def distance(places: Indices) -> float:
        held_now = np.array([counts[places == place].sum(axis=0) for place in range(len(SPLITS))])
        return float(((held_now - wanted) ** 2 / np.maximum(wanted, 1)).sum())

    best: Indices = min(drawn, key=distance)
    return best


def _present(counts: Indices, most: Indices, random: np.random.Generator) -> Indices:
    """The splits of groups that bring each class into each split, of at most these sizes; -1 for all other groups."""
    sizes, holders = counts.sum(axis=1), (counts > 0).sum(axis=0)
    places, order = np.full(len(counts), -1), random.permutation(len(counts))
    for kind in np.argsort(holders, kind="stable"):
        for place in np.flatnonzero(most) if holders[kind] >= len(SPLITS) else ():
            left = order[(places[order] < 0) & (counts[order, kind] > 0)]
            room = most[place] - sizes[places == place].sum()
            if len(left) and room > 0 and not counts[places == place, kind].any():
                fitting = left[sizes[left] <= room]
                smallest, largest = left[np.argmin(sizes[left])], left[np.argmax(sizes[left])]
                chosen = largest if place == _TRAIN else fitting[0] if len(fitting) else smallest
                places[chosen] = place
    return places


def _drawn(present: Indices, order: Indices, sizes: Indices, most: Indices) -> Indices:
    """`present`, and the other groups in this order: for validation, then for testing, the rest for training."""
    places = present.copy()
    for place in (_VALIDATION, _TEST):
        room = most[place] - sizes[present == place].sum()
        reached = np.concatenate([[0], np.cumsum(sizes[order])])
        count = int(np.argmin(np.abs(reached - room))) if room > 0 else 0
        places[order[:count]] = place
        order = order[count:]
    places[order] = _TRAIN
    return places
