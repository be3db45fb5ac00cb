"""Some 1,000 rounds of updates on which our rules are compared with those of other libraries."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]

KINDS = (
    "random",
    "clustered",
    "sign flips",
    "scaled by 1e3",
    "scaled by 1e12",
    "ALIE",
    "IPM",
    "duplicates",
    "zeros",
    "mimics",
    "offset",
)
_EACH = 92
_CLOSE = 1e-6  # of the median norm of the updates
_ROUNDING = 1e-12  # of the numbers that are added up


@dataclass(frozen=True)
class Round:
    """The updates of a round, and what is known of them.

    Attributes:
        kind: one of KINDS.
        updates: U, shape (m, d).
        f: how many of them, the last ones, are attackers'; m >= 2 f + 3.
    """

    kind: str
    updates: Matrix
    f: int

    @property
    def median_norm(self) -> float:
        """The median of the norms of the updates."""
        return float(np.median(np.linalg.norm(self.updates, axis=1)))

    @property
    def scale(self) -> float:
        """The least distance within which an update has half of the others."""
        distances = np.linalg.norm(self.updates[:, None] - self.updates[None], axis=2)
        return float(np.sort(distances, axis=1)[:, len(self.updates) // 2].min())

    def no_farther(self, ours: Vector, theirs: Vector) -> bool:
        """Whether the sum of our point's distances from the updates is no larger than that of theirs."""
        rounding = 1e-10 * self.scale + 1e-14 * float(np.abs(self.updates).sum())
        mine, other = (np.linalg.norm(self.updates - point, axis=1).sum() for point in (ours, theirs))
        return bool(mine <= other + rounding)

    def differ(self, ours: Vector, theirs: Vector) -> float:
        """The distance of two directions, in units of what counts as equal: 1e-6 of the median norm.

        Where they are much longer than that (one of the updates is 1e12 times as long), it is 1e-12 of their length.
        """
        allowed = _CLOSE * self.median_norm + _ROUNDING * float(np.linalg.norm(theirs))
        return float(np.linalg.norm(ours - theirs)) / (allowed + 1e-300)


def rounds() -> Iterator[Round]:
    """92 rounds of each kind: 1012 in all."""
    for kind in KINDS:
        for seed in range(_EACH):
            yield made(kind, seed)


def made(kind: str, seed: int) -> Round:
    """One round of a kind: honest updates around a common one, then the attackers'."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    f = int(rng.integers(1, 4))
    m = int(rng.integers(2 * f + 3, 14))
    d = int(rng.choice([1, 2, 10, 100]))
    common = rng.standard_normal(d)
    honest = common + rng.uniform(0.1, 2) * rng.standard_normal((m - f, d))
    attack = rng.standard_normal((f, d))
    mean, deviation = honest.mean(axis=0), honest.std(axis=0, ddof=1)
    match kind:
        case "clustered":
            honest[: (m - f) // 2] += 3 * rng.standard_normal(d)
        case "sign flips":
            attack = -(common + rng.standard_normal((f, d)))
        case "scaled by 1e3":
            attack *= 1e3
        case "scaled by 1e12":
            attack *= 1e12
        case "ALIE":  # Baruch et al., 2019
            attack = np.tile(mean - rng.uniform(0.3, 2) * deviation, (f, 1))
        case "IPM":  # Xie et al., 2020
            attack = np.tile(-rng.uniform(0.1, 10) * mean, (f, 1))
        case "duplicates":
            honest = honest[rng.integers(0, (m - f + 1) // 2, m - f)]
        case "zeros":
            honest[rng.random(m - f) < 0.3] = 0.0
            attack[:] = 0.0
        case "mimics":  # Karimireddy et al., 2022
            attack = np.tile(honest[0], (f, 1))
        case "offset":
            honest, attack = honest + 1e3, attack + 1e3
    return Round(kind, np.vstack([honest, attack]), f)
