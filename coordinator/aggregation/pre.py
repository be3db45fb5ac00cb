"""What may be done to the updates before any rule sees them, in Gram space.

Each stage replaces the rows U by W U, with W from K alone. The rule then answers for W U, and c W is the answer for U.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from coordinator.aggregation.geometry import clipping, coordinates, inverse_norms, squared_distances
from coordinator.aggregation.hyperparameters import hyperparameter
from coordinator.aggregation.qp import STATIONARY_TOLERANCE
from coordinator.aggregation.rules import HyperparameterError, Matrix, Rows, TooFewUpdatesError, Vector

_LARGEST_LOSS = 1e300  # a claim may be larger; means of such must not overflow


@dataclass(frozen=True)
class Mixture:
    """What one stage makes of m rows: m' rows W U.

    Attributes:
        matrix: W, shape (m', m).
        shares: shape (m', m), each row of sum 1: whose updates each of the m' rows speaks for. None: those of W, which
            then has rows of sum 1.
        prior: lambda0 of the m' rows, shape (m',), sum 1; None: unchanged.
        samples: training samples behind the m' rows, shape (m',); None: unchanged.
    """

    matrix: Matrix
    shares: Matrix | None = None
    prior: Vector | None = None
    samples: Vector | None = None

    @classmethod
    def scaled(cls, factors: Vector) -> "Mixture":
        """Each row multiplied by its factor, shape (m,); it still speaks for its own client."""
        return cls(np.diag(factors), np.eye(len(factors)))


@dataclass(frozen=True, kw_only=True)
class Stage(ABC):
    """What is done to the rows before the rule sees them. Its fields are its hyper-parameters.

    Attributes:
        name: what run specifications call it.
        compares: whether it compares or mixes the updates of one round. Rules that also read updates of earlier rounds
            (`tau`) refuse such a stage.
    """

    name: ClassVar[str] = ""
    compares: ClassVar[bool] = True

    @abstractmethod
    def mix(self, rows: Rows) -> Mixture:
        """Turns K and the scalars of the rows into W. Pure: the same rows give the same answer.

        Raises:
            TooFewUpdatesError: the stage promises nothing for so few rows; the round is then skipped.
        """


@dataclass(frozen=True)
class Staged:
    """Rows after some stages.

    Attributes:
        rows: what the rule sees: m' rows.
        matrix: W, shape (m', m): they are W U.
        shares: shape (m', m), each row of sum 1: whose updates each of them speaks for; W without any scaling.
    """

    rows: Rows
    matrix: Matrix
    shares: Matrix


def apply(stages: Sequence[Stage], rows: Rows) -> Staged:
    """The rows after every stage, in order.

    Raises:
        TooFewUpdatesError: a stage promises nothing for so few rows.
    """
    points, norms = coordinates(rows.gram), rows.norms
    identity = np.eye(len(rows.prior))
    staged = Staged(rows, identity, identity)
    for stage in stages:
        staged = _after(stage.mix(staged.rows), staged, points, norms)
    return staged


def _after(mixture: Mixture, before: Staged, points: Matrix, norms: Vector) -> Staged:
    rows = before.rows
    shares = mixture.matrix if mixture.shares is None else mixture.shares
    matrix, losses, accuracies = mixture.matrix @ before.matrix, rows.losses, rows.accuracies
    mixed = matrix @ points
    # What is left of rows that cancel is rounding; a rule that normalises would take it for a direction.
    size = np.abs(matrix) @ norms
    mixed[(mixed**2).sum(axis=1) <= STATIONARY_TOLERANCE * size**2] = 0.0
    after = replace(
        rows,
        gram=mixed @ mixed.T,
        prior=rows.prior if mixture.prior is None else mixture.prior,
        samples=rows.samples if mixture.samples is None else mixture.samples,
        losses=None if losses is None else shares @ np.clip(losses, -_LARGEST_LOSS, _LARGEST_LOSS),
        accuracies=None if accuracies is None else shares @ accuracies,
        clients=rows.clients if len(matrix) == len(rows.prior) else (),
    )
    return Staged(after, matrix, shares @ before.shares)


@dataclass(frozen=True, kw_only=True)
class Normalise(Stage):
    """Every update to norm 1; a zero update stays zero."""

    name: ClassVar[str] = "normalise"
    compares: ClassVar[bool] = False

    def mix(self, rows: Rows) -> Mixture:
        """See the class."""
        return Mixture.scaled(inverse_norms(rows.gram))


@dataclass(frozen=True, kw_only=True)
class Clip(Stage):
    """Longer updates to norm `clip_norm` (Sun et al., 2019)."""

    name: ClassVar[str] = "clip"
    compares: ClassVar[bool] = False

    clip_norm: float = hyperparameter(0.0, "the norm that clip allows; 0 is the median of the norms")

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise HyperparameterError(f"clip_norm must be finite and not negative; got {self.clip_norm!r}")

    def mix(self, rows: Rows) -> Mixture:
        """See the class."""
        return Mixture.scaled(clipping(rows.norms, self.clip_norm))


@dataclass(frozen=True, kw_only=True)
class _Outnumbered(Stage, ABC):
    """A stage whose promise holds against f attackers among more than 2 f updates."""

    byzantine: int = hyperparameter(1, "attackers that arc and nnm allow for, less than half of the updates")

    def __post_init__(self) -> None:
        if self.byzantine < 0:
            raise HyperparameterError(f"byzantine must not be negative; got {self.byzantine}")

    def _must_outnumber(self, m: int) -> None:
        f = self.byzantine
        if m <= 2 * f:
            raise TooFewUpdatesError(
                f"{self.name} with byzantine = {f} needs at least {2 * f + 1} updates; there are {m}"
            )


@dataclass(frozen=True, kw_only=True)
class Arc(_Outnumbered):
    """Adaptive robust clipping (Allouah et al., 2025, Algorithm 2): the longest updates to the next one's norm.

    With f of m updates from attackers, the k = floor(2 f (m - f) / m) longest get the norm of the next in length. That
    is never more than the norm of an honest update, since k >= f; and at least half of the updates stay as they are.
    """

    name: ClassVar[str] = "arc"

    def mix(self, rows: Rows) -> Mixture:
        """See the class."""
        m, f, norms = len(rows.prior), self.byzantine, rows.norms
        self._must_outnumber(m)
        bound = np.sort(norms)[m - 1 - 2 * f * (m - f) // m]
        return Mixture.scaled(np.divide(bound, norms, out=np.ones(m), where=norms > bound))


@dataclass(frozen=True, kw_only=True)
class Nnm(_Outnumbered):
    """Nearest-neighbour mixing (Allouah et al., 2023): every update becomes the mean of the m - f nearest to it.

    An attacker's row becomes a mean of mostly honest ones, and honest rows move towards each other.
    """

    name: ClassVar[str] = "nnm"

    def mix(self, rows: Rows) -> Mixture:
        """See the class."""
        m = len(rows.prior)
        self._must_outnumber(m)
        distances = squared_distances(rows.gram)
        np.fill_diagonal(distances, -1.0)  # before its duplicates, each is its own nearest
        nearest = np.argsort(distances, axis=1, kind="stable")[:, : m - self.byzantine]
        matrix = np.zeros((m, m))
        np.put_along_axis(matrix, nearest, 1.0 / (m - self.byzantine), axis=1)
        return Mixture(matrix)


@dataclass(frozen=True, kw_only=True)
class Bucket(Stage):
    """Bucketing (Karimireddy et al., 2022, Algorithm 1): updates in random order, averaged by `bucket_size`.

    The mean in a bucket is weighted by the prior, whose sum the bucket inherits; it is plain for a uniform prior.
    """

    name: ClassVar[str] = "bucket"

    bucket_size: int = hyperparameter(2, "updates in a bucket")
    bucket_seed: int = hyperparameter(0, "with the round, decides who shares a bucket")

    def __post_init__(self) -> None:
        if self.bucket_size < 1:
            raise HyperparameterError(f"bucket_size must be at least 1; got {self.bucket_size}")
        if self.bucket_seed < 0:
            raise HyperparameterError(f"bucket_seed must not be negative; got {self.bucket_seed}")

    def mix(self, rows: Rows) -> Mixture:
        """See the class."""
        m = len(rows.prior)
        order = np.random.default_rng([self.bucket_seed, rows.round]).permutation(m)
        members = np.zeros((-(-m // self.bucket_size), m))
        members[np.arange(m) // self.bucket_size, order] = 1.0
        prior = members @ rows.prior
        matrix = members * np.where(prior[:, None] > 0, rows.prior, 1.0)
        matrix /= matrix.sum(axis=1, keepdims=True)
        return Mixture(matrix, prior=prior, samples=members @ rows.samples)


STAGES: Mapping[str, type[Stage]] = MappingProxyType(
    {stage.name: stage for stage in (Normalise, Clip, Arc, Nnm, Bucket)}
)
