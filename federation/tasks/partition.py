"""Divides one data set among many clients: the samples of each, and those that it keeps back.

Every client computes the whole partition and keeps its own part, so that clients that agree on count, scheme, sizes and
seed hold disjoint parts without any message.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.spec.part import Part, PartError
from federation.tasks.data import Dataset, Pool, Splits
from federation.tasks.errors import DataError
from federation.tasks.splitting import counts_of, split

LEAST = 10  # samples, of a client of unequal size: 8, 1 and 1 when they are cut

# Names of the random streams of a partition: the same seed deals and sizes independently, and splits (stream 1).
_DEAL = 0
_QUOTAS = 2

_BLOCK = 4096  # draws of a class at a time

Indices = NDArray[np.int64]


def partition(pool: Pool, part: Part) -> list[Indices]:
    """The samples of every part. All schemes but "natural" deal out everything.

    "iid": a random deal. "shards:S": sort by label, cut into S * count shards whose sizes differ by at most one, deal S
    to each client (McMahan et al. 2017; FedMGDA+ section 6.1). "labels:S": the same with shards of one class each, so
    that a client has at most S classes; their sizes differ (FMOL section 5). "dirichlet:ALPHA": client i draws its
    shares of the classes from Dir(ALPHA); then a client with quota left is picked at random, draws a class from its
    shares (again while that class is used up) and gets a sample of it, until all are dealt (Acar et al. 2021; FedCMOO
    appendix).
    "natural": client i holds what owner i holds; when there are fewer clients than owners, the largest owners take
    part. Owners are ordered by name.

    The samples of a group of the pool go to one client: the other schemes deal groups as they deal samples, by the most
    frequent class of each.

    Returns:
        For each client the indices of its samples, ascending and disjoint.

    Raises:
        PartError: fewer samples (or groups, or owners) than clients, nothing to deal by, or a group of two owners.
    """
    kind = part.scheme.partition(":")[0]
    if pool.groups is None:
        return _parts(pool, part, "samples")
    names, keys = np.unique(pool.groups, return_inverse=True)
    if kind == "natural":
        _one_owner_each(pool, names, keys)
        return _parts(pool, part, "samples")
    unit = np.arange(len(names))
    units = Pool(unit, unit if kind == "iid" else _most_frequent(keys, classes(pool)))
    client = np.empty(len(names), np.int64)
    for index, own in enumerate(_parts(units, part, "groups of samples")):
        client[own] = index
    return _grouped(client[keys], part.count)


def _one_owner_each(pool: Pool, names: NDArray[Any], keys: Indices) -> None:
    """Checks that no group has samples of two owners. Raises PartError."""
    owner = _owner(pool)
    first = np.empty(len(names), np.int64)
    first[keys] = owner
    if len(wrong := np.flatnonzero(first[keys] != owner)):
        at = wrong[0]
        one, other = sorted((pool.owners[owner[at]], pool.owners[first[keys[at]]]))
        raise PartError(
            f"the group {names[keys[at]]!s} has samples of two owners, {one} and {other}, so it cannot stay with one "
            "client: use another scheme than natural; if these are two persons, give them two keys in Pool(groups=...)"
        )


def _most_frequent(keys: Indices, labels: Indices) -> Indices:
    """The class that most samples of each group have; of several, the lowest."""
    known, kinds = np.unique(labels, return_inverse=True)
    frequent: Indices = known[counts_of(keys, kinds).argmax(axis=1)]
    return frequent


def _parts(pool: Pool, part: Part, what: str) -> list[Indices]:
    """`partition` of a pool without groups; `what` are its samples."""
    kind, _, argument = part.scheme.partition(":")
    if kind == "natural":
        parts = _grouped(_owner(pool), len(pool.owners))
        return [parts[owner] for owner in holders(pool, part.count)]
    pieces = part.count * int(argument) if kind in ("shards", "labels") else part.count
    if len(pool) < pieces:
        raise PartError(f"{len(pool)} {what} cannot be cut into {pieces} pieces ({part.scheme}, {part.count} clients)")
    random = np.random.default_rng([part.seed, _DEAL])
    if kind == "iid":
        chosen = np.split(random.permutation(len(pool)), np.cumsum(quotas(len(pool), part))[:-1])
    elif kind in ("shards", "labels"):
        by_class = np.argsort(classes(pool), kind="stable")
        shards = np.array_split(by_class, pieces) if kind == "shards" else _of_one_class(classes(pool), by_class, part)
        hands = np.array_split(random.permutation(pieces), part.count)
        chosen = [np.concatenate([shards[shard] for shard in hand]) for hand in hands]
    else:
        chosen = _dirichlet(classes(pool), quotas(len(pool), part), float(argument), random)
    return [np.sort(own) for own in chosen]


def quotas(samples: int, part: Part) -> Indices:
    """The number of samples of each client, of at least `count` samples, for "iid" and "dirichlet": (count,) numbers.

    "equal": numbers that differ by at most one. "lognormal:SIGMA": every client gets `LEAST` samples, or all the same
    number if there are too few for that; the rest is shared in proportion to exp(SIGMA z), z standard normal.
    """
    kind, _, argument = part.sizes.partition(":")
    logarithms = np.zeros(part.count)
    if kind == "lognormal":
        logarithms = float(argument) * np.random.default_rng([part.seed, _QUOTAS]).standard_normal(part.count)
    weights = np.exp(logarithms - logarithms.max())
    least = min(LEAST, samples // part.count)
    ideal = (samples - least * part.count) * weights / weights.sum()
    counts: Indices = least + np.floor(ideal).astype(np.int64)
    largest_remainders = np.argsort(np.floor(ideal) - ideal, kind="stable")
    counts[largest_remainders[: samples - counts.sum()]] += 1
    return counts


def classes(pool: Pool) -> Indices:
    """(n,) the class of each sample, which shards and Dirichlet deal by. Raises PartError if the pool has none."""
    if pool.labels is not None:
        return pool.labels
    y = pool.y if hasattr(pool.y, "dtype") else np.asarray(pool.y)  # a table of pandas has none
    whole = re.fullmatch(r"(torch\.)?(bool|u?int[0-9]+)", str(y.dtype)) is not None
    if y.ndim != 1 or not whole:
        shape = ", ".join(["n", *map(str, y.shape[1:])])
        raise PartError(
            f"targets ({shape}) of {y.dtype} are no classes to deal by; use iid, or a task whose pool has labels"
        )
    return np.asarray(y).astype(np.int64)


def holders(pool: Pool, count: int) -> list[int]:
    """The owners that take part in "natural": the largest, of equal ones the first by name; ordered by name.

    Raises:
        PartError: no owners, or fewer than clients.
    """
    held = np.bincount(_owner(pool), minlength=len(pool.owners))
    largest = sorted(np.flatnonzero(held).tolist(), key=lambda owner: (-held[owner], pool.owners[owner]))
    if count > len(largest):
        raise PartError(f"{count} clients, but the data has {len(largest)} natural owners: ask for at most that number")
    return sorted(largest[:count], key=pool.owners.__getitem__)


def deal(pool: Pool, part: Part | None) -> Splits:
    """One client's splits of a pool; without a part the whole pool is its own.

    Its test split is its share of the pool's official test part where that has one and the scheme is "natural" (or
    there is no part); otherwise a tenth of its own samples.

    Raises:
        DataError: the pool cannot be dealt so; the message says why.
    """
    if part is None:
        official = None if pool.test is None else np.arange(len(pool.test))
        return _cut(pool, np.arange(len(pool)), official, Part(0, 1))
    own, official = _dealt(pool, part)[part.index]
    return _cut(pool, own, official, part)


def deal_all(pool: Pool, part: Part) -> list[Splits]:
    """Every client's splits of a pool, exactly as `deal` gives them one by one. Raises DataError."""
    return [
        _cut(pool, own, official, replace(part, index=index))
        for index, (own, official) in enumerate(_dealt(pool, part))
    ]


def _dealt(pool: Pool, part: Part) -> list[tuple[Indices, Indices | None]]:
    """Every client's samples, and those of the official test part."""
    try:
        parts = partition(pool, part)
        if pool.test is None or part.scheme != "natural":
            return [(own, None) for own in parts]
        official = _grouped(_owner(pool.test), len(pool.owners))
        return [(own, official[owner]) for own, owner in zip(parts, holders(pool, part.count), strict=True)]
    except PartError as error:
        raise DataError(str(error)) from error


def _cut(pool: Pool, own: Indices, official: Indices | None, part: Part) -> Splits:
    def chosen(values: Any, indices: Indices) -> Any:
        if hasattr(values, "iloc"):  # of pandas
            return values.iloc[indices]
        if not hasattr(values, "index_select"):  # of NumPy, or like it
            return np.asanyarray(values)[indices]
        from torch import from_numpy  # noqa: PLC0415

        return values.index_select(0, from_numpy(indices))

    def dataset(whole: Pool, indices: Indices) -> Dataset:
        return Dataset(chosen(whole.x, indices), chosen(whole.y, indices))

    train, validation, test = split(
        len(own),
        seed=part.seed,
        index=part.index,
        test=official is None,
        groups=None if pool.groups is None else pool.groups[own],
        labels=_stratified(pool)[own] if pool.stratify else None,
    )
    kept = dataset(pool, own[test]) if pool.test is None or official is None else dataset(pool.test, official)
    return Splits(dataset(pool, own[train]), dataset(pool, own[validation]), kept)


def _stratified(pool: Pool) -> Indices:
    """The classes whose shares the splits of a pool keep. Raises DataError if there are none."""
    try:
        return classes(pool)
    except PartError:
        raise DataError(
            f"stratify=True needs classes, and the targets ({pool.y.dtype}) are none: give Pool(labels=...) "
            "a class for each sample, or leave stratify out"
        ) from None


def _owner(pool: Pool) -> Indices:
    if pool.owner is None:
        raise PartError("this data has no natural owners: use iid, shards:S, labels:S or dirichlet:ALPHA")
    return pool.owner


def _grouped(keys: Indices, groups: int) -> list[Indices]:
    """For each of the keys 0 to groups - 1, where it stands, ascending."""
    order = np.argsort(keys, kind="stable")
    return np.split(order, np.cumsum(np.bincount(keys, minlength=groups))[:-1])


def _of_one_class(labels: Indices, by_class: Indices, part: Part) -> list[Indices]:
    """S * count shards of one class each, whose numbers for each class go with its size, at least one.

    Raises:
        PartError: fewer shards than classes.
    """
    pieces = part.count * int(part.scheme.partition(":")[2])
    sizes = np.unique(labels, return_counts=True)[1]
    if pieces < len(sizes):
        raise PartError(f"{pieces} shards ({part.scheme}, {part.count} clients) cannot hold {len(sizes)} classes apart")
    counts = np.ones(len(sizes), np.int64)
    for _ in range(pieces - len(sizes)):
        counts[np.argmax(sizes / counts)] += 1  # the class with the largest shards gets one more
    of_class = np.split(by_class, np.cumsum(sizes)[:-1])
    return [shard for own, count in zip(of_class, counts, strict=True) for shard in np.array_split(own, count)]


def _dirichlet(labels: Indices, sizes: Indices, alpha: float, random: np.random.Generator) -> list[Indices]:
    _, label, left = np.unique(labels, return_inverse=True, return_counts=True)
    shares = random.dirichlet(np.full(len(left), alpha), size=len(sizes))
    turns = _turns(sizes, random)
    drawn = _draw(shares, turns, random.random(len(labels)), left)
    # Each class is now drawn as often as it has samples; they go to those draws in random order.
    shuffled = random.permutation(len(labels))
    dealt = np.empty_like(shuffled)
    dealt[np.argsort(drawn, kind="stable")] = shuffled[np.argsort(label[shuffled], kind="stable")]
    return [dealt[own] for own in _grouped(turns, len(sizes))]


def _turns(sizes: Indices, random: np.random.Generator) -> Indices:
    """(n,) clients picked at random among those with quota left, until each has been picked as often as its size says.

    They come in the order of Poisson processes of one rate that end with their quotas: the exponential has no memory.
    """
    client = np.repeat(np.arange(len(sizes)), sizes)
    time = np.cumsum(random.standard_exponential(len(client)))
    begin = np.concatenate([[0.0], time])[np.cumsum(sizes) - sizes]
    return client[np.argsort(time - begin[client], kind="stable")]


def _draw(shares: NDArray[np.float64], turns: Indices, points: NDArray[np.float64], left: Indices) -> Indices:
    """The class that is drawn at each turn, (n,), by shares (clients, classes) and points (n,) in [0, 1).

    Drawing again while a class is used up is drawing from the shares that are left, which stay as they are until the
    next class is used up: so whole blocks are drawn at once. A client with no share in what is left draws by the sizes
    of the classes. `left` (classes,) is how often each can be drawn; n in all.
    """
    sizes, left = left, left.copy()
    drawn = np.empty(len(turns), dtype=np.int64)
    begin = 0
    while begin < len(turns):
        open_shares = np.where(left > 0, shares, 0.0)
        open_shares[~open_shares.any(axis=1)] = np.where(left > 0, sizes, 0)
        reach = np.cumsum(open_shares, axis=1)
        last = (reach < reach[:, -1:]).sum(axis=1)
        client = turns[begin : begin + _BLOCK]
        target = points[begin : begin + _BLOCK] * reach[client, -1]
        # Where a share is so small that the product is rounded up to it, the last open class is meant.
        block = np.minimum((reach[client] <= target[:, None]).sum(axis=1), last[client])
        counts = np.bincount(block, minlength=len(left))
        used_up = [
            np.flatnonzero(block == label)[left[label] - 1] for label in np.flatnonzero((counts >= left) & (left > 0))
        ]
        end = min(used_up, default=len(block) - 1) + 1
        drawn[begin : begin + end] = block[:end]
        left -= np.bincount(block[:end], minlength=len(left))
        begin += end
    return drawn
