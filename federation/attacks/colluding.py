"""Attacks from the honest updates of others: all accomplices send the same vector.

An omniscient attacker knows the updates of all honest clients (a simulation); real accomplices estimate from their own
honest updates, as Baruch et al. do.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.attacks.base import Attack, AttackError, Matrix, Vector
from federation.spec.options import option

_BLOCK = 1 << 16  # columns that are read in double precision at a time
_DIRECTIONS = ("unit", "std", "sign")


@dataclass(frozen=True)
class _Colluding(Attack):
    """An attack in which all accomplices send the same vector."""

    needs_peers = True

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return self.together(peers if len(peers) else own[None], m).astype(np.float32)

    @abstractmethod
    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        """The vector that all send, (d,), from the updates that they know, (h, d), their own where no one is honest."""


@dataclass(frozen=True)
class Alie(_Colluding):
    """A Little Is Enough (Baruch et al., 2019, Algorithm 3): mean - z std, coordinate by coordinate.

    Each coordinate stays among the honest ones, so that no outlier can be seen, and all are shifted at once. std is the
    population deviation, as in the authors' code.
    """

    name = "alie"
    from_participants = "z"
    alone = "the deviation of one update is 0: it sends its own honest update, which is no attack"

    z: float = option(0.0, "standard deviations from the mean; 0: the paper's z_max from n and f", "[0, inf)")

    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        z = self.z or alie_z(m, m - len(known))
        return np.concatenate([block.mean(axis=0) - z * block.std(axis=0) for _, block in _blocks(known)])


@dataclass(frozen=True)
class Ipm(_Colluding):
    """Inner-product manipulation (Xie et al., 2020, Fall of Empires): -epsilon mean.

    A small epsilon hides among the honest updates and reverses what a robust rule makes of a few of them; a large one
    reverses the average.
    """

    name = "ipm"
    alone = "it sends the negative of its own update, as sign-flip does"

    epsilon: float = option(0.1, "multiplies the negative mean", "[1e-9, inf)")

    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        return -self.epsilon * _mean(known)


@dataclass(frozen=True)
class StandStill(_Colluding):
    """The negative mean of the honest updates: the convex hull of all then holds 0, where unboxed MGDA stands still."""

    name = "stand-still"
    alone = "it sends the negative of its own update, as sign-flip does"

    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        return -_mean(known)


@dataclass(frozen=True)
class MinMax(_Colluding):
    """Min-max (Shejwalkar and Houmansadr, 2021): mean + gamma p, p away from the mean.

    gamma is the largest for which no honest update is farther from it than the two farthest honest ones are from each
    other. The paper bisects; here it is the smallest positive root of one quadratic equation for each honest update.
    """

    name = "min-max"
    alone = "there is no distance to hide in: it sends its own honest update, which is no attack"

    direction: str = option("unit", "p: unit (-mean / ||mean||), std (-std) or sign (-sign(mean))")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.direction not in _DIRECTIONS:
            raise AttackError(f"direction = {self.direction}: min-max goes in one of {', '.join(_DIRECTIONS)}")

    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        mean = _mean(known)
        p = self._direction(known, mean)
        gram, along, length = np.zeros((len(known), len(known))), np.zeros(len(known)), float(p @ p)
        for part, block in _blocks(known):
            away = mean[part] - block
            gram += away @ away.T
            along += away @ p[part]
        if length == 0.0:
            return mean
        squares = np.diag(gram)
        farthest = (squares[:, None] + squares - 2 * gram).max()
        # ||mean - u_i + gamma p||^2 = farthest
        root = np.sqrt(along**2 + length * np.maximum(farthest - squares, 0.0))
        gamma = float(((root - along) / length).min())
        return mean + gamma * p

    def _direction(self, known: Matrix, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.direction == "std":
            return -np.concatenate([block.std(axis=0) for _, block in _blocks(known)])
        if self.direction == "sign":
            return -np.sign(mean)
        return -mean / (np.linalg.norm(mean) or 1.0)


@dataclass(frozen=True)
class Mimic(_Colluding):
    """All accomplices copy one honest client, which counts too much then (Karimireddy et al., 2022).

    The paper picks the client whose updates vary most in early rounds; here it is always the same one, by its place.
    """

    name = "mimic"
    alone = "it copies itself: it sends its own honest update, which is no attack"

    client: int = option(0, "which of the honest participants is copied, from 0; the last at most", "[0, inf)")

    def together(self, known: Matrix, m: int) -> NDArray[Any]:
        copied: Vector = known[min(self.client, len(known) - 1)]
        return copied


def alie_z(n: int, f: int) -> float:
    """The paper's z_max: s = floor(n / 2 + 1) - f more make a majority, and Phi(z) = (n - f - s) / (n - f).

    Of n participants, f < n attack. s >= 1 where the attackers are a majority already, and z >= 0: with few attackers
    (n = 10, f <= 2) the formula allows no deviation at all.
    """
    supporters = max(1, math.floor(n / 2 + 1) - f)
    share = (n - f - supporters) / (n - f)
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


def _blocks(rows: Matrix) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for begin in range(0, rows.shape[1], _BLOCK):
        part = slice(begin, begin + _BLOCK)
        yield part, rows[:, part].astype(np.float64)


def _mean(rows: Matrix) -> NDArray[np.float64]:
    return np.asarray(rows.mean(axis=0, dtype=np.float64))
