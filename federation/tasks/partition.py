"""How one data set becomes many clients: who holds which samples, and what each keeps back.

Every client computes the whole partition and keeps its own part, so that clients that agree on count, scheme and seed
hold disjoint parts that make up the whole, without a word between them.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from federation.tasks import DataError, Dataset, Part, PartError, Splits

if TYPE_CHECKING:
    from torch import Tensor

# Names of the random streams of a partition: the same seed deals, and splits, independently.
_DEAL = 0
_SPLIT = 1

Indices = NDArray[np.int64]


def partition(labels: NDArray[np.int64], part: Part) -> Indices:
    """The samples of one part.

    "iid": a random deal. "shards:S": sort by label, cut into S * count shards whose sizes differ by at most one, deal S
    to each client (McMahan et al. 2017; FedMGDA+ section 6.1). "dirichlet:ALPHA": client i draws its shares of the
    classes from Dir(ALPHA), and the clients take turns at random, each drawing a class from its shares and a sample of
    that class, until all are dealt (Acar et al. 2021). Parts are disjoint, complete, and equal in size up to S.

    Args:
        labels: (n,) the class of each sample.
        part: which part.

    Returns:
        The indices of its samples, ascending.

    Raises:
        PartError: fewer samples than clients (or shards).
    """
    kind, _, argument = part.scheme.partition(":")
    pieces = part.count * int(argument) if kind == "shards" else part.count
    if len(labels) < pieces:
        raise PartError(
            f"{len(labels)} samples cannot be cut into {pieces} pieces ({part.scheme}, {part.count} clients)"
        )
    random = np.random.default_rng([part.seed, _DEAL])
    if kind == "iid":
        chosen = np.array_split(random.permutation(len(labels)), part.count)[part.index]
    elif kind == "shards":
        shards = np.array_split(np.argsort(labels, kind="stable"), pieces)
        hand = np.array_split(random.permutation(pieces), part.count)[part.index]
        chosen = np.concatenate([shards[shard] for shard in hand])
    else:
        chosen = _dirichlet(labels, part, float(argument), random)
    return np.sort(chosen).astype(np.int64)


def split(count: int, *, seed: int = 0, index: int = 0) -> tuple[Indices, Indices, Indices]:
    """Cuts a client's samples into train, validation and test, 80/10/10, at random.

    Args:
        count: how many samples.
        seed: of the partition.
        index: of the client.

    Returns:
        Three disjoint, ascending arrays that make up 0 to count - 1. From three samples on, none is empty.
    """
    held = max(1, round(count / 10)) if count >= 3 else 0
    order = np.random.default_rng([seed, _SPLIT, index]).permutation(count)
    train, validation, test = np.split(order, [count - 2 * held, count - held])
    return np.sort(train), np.sort(validation), np.sort(test)


def deal(x: "Tensor", y: "Tensor", part: Part | None) -> Splits:
    """One client's splits of a pool of labelled samples; without a part the whole pool is its own.

    Args:
        x: (n, ...) the samples.
        y: (n,) their classes.
        part: the client's part.

    Raises:
        DataError: samples and labels differ in number, or are too few for that many clients.
    """
    if len(x) != len(y):
        raise DataError(f"{len(x)} samples but {len(y)} labels")
    if part is not None:
        try:
            own = partition(y.numpy(), part)
        except PartError as error:
            raise DataError(str(error)) from error
        x, y = x[own], y[own]
    cuts = split(len(y), seed=part.seed, index=part.index) if part is not None else split(len(y))
    train, validation, test = (Dataset(x[cut], y[cut]) for cut in cuts)
    return Splits(train, validation, test)


def _dirichlet(labels: NDArray[np.int64], part: Part, alpha: float, random: np.random.Generator) -> Indices:
    classes, inverse = np.unique(labels, return_inverse=True)
    pools = [random.permutation(np.flatnonzero(inverse == label)) for label in range(len(classes))]
    left = np.array([len(pool) for pool in pools])
    shares = random.dirichlet(np.full(len(classes), alpha), size=part.count)
    quotas = [len(piece) for piece in np.array_split(labels, part.count)]
    turns = random.permutation(np.repeat(np.arange(part.count), quotas))
    chosen: list[int] = []
    for client, point in zip(turns, random.random(len(turns)), strict=True):
        # Drawing again while the class is used up, as the scheme has it, is drawing from the shares that are left.
        open_shares = np.where(left > 0, shares[client], 0.0)
        if not open_shares.any():
            open_shares = left.astype(np.float64)
        reach = np.cumsum(open_shares)
        label = int(np.searchsorted(reach, point * reach[-1], side="right"))
        left[label] -= 1
        if client == part.index:
            chosen.append(int(pools[label][left[label]]))
    return np.array(chosen, dtype=np.int64)
