"""What may be done to the updates before any rule sees them, in Gram space.

Each stage replaces the rows U by W U, with W from K alone. The rule then answers for W U, and c W is the answer for U.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from coordinator.aggregation.geometry import clipping, coordinates, inverse_norms, squared_distances
from coordinator.aggregation.qp import STATIONARY_TOLERANCE
from coordinator.aggregation.rules import HyperparameterError, Matrix, Rows, TooFewUpdatesError, Vector

_LARGEST_LOSS = 1e300  # a claim may be larger; means of such must not overflow


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


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages, in order, and their hyper-parameters; every algorithm takes them."""

    pre: tuple[str, ...] = field(
        default=(), metadata={"help": "stages before the rule, in order, of: normalise, clip, nnm, bucket"}
    )
    byzantine: int = field(
        default=1, metadata={"help": "attackers that nnm allows for, less than half of the updates", "stage": "nnm"}
    )
    clip_norm: float = field(
        default=0.0, metadata={"help": "the norm that clip allows; 0 is the median of the norms", "stage": "clip"}
    )
    bucket_size: int = field(default=2, metadata={"help": "updates in a bucket", "stage": "bucket"})
    bucket_seed: int = field(
        default=0, metadata={"help": "with the round, decides who shares a bucket", "stage": "bucket"}
    )

    def __post_init__(self) -> None:
        for name in self.pre:
            if name not in _STAGES:
                raise HyperparameterError(f"pre: no stage {name!r}; there are {', '.join(_STAGES)}")
        if len(set(self.pre)) < len(self.pre):
            raise HyperparameterError(f"pre: each stage at most once; got {list(self.pre)}")
        if self.byzantine < 0:
            raise HyperparameterError(f"byzantine must not be negative; got {self.byzantine}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm >= 0):
            raise HyperparameterError(f"clip_norm must be finite and not negative; got {self.clip_norm!r}")
        if self.bucket_size < 1:
            raise HyperparameterError(f"bucket_size must be at least 1; got {self.bucket_size}")
        if self.bucket_seed < 0:
            raise HyperparameterError(f"bucket_seed must not be negative; got {self.bucket_seed}")

    def apply(self, rows: Rows) -> Staged:
        """The rows after every stage.

        Raises:
            TooFewUpdatesError: nnm with as many attackers as half of the updates.
        """
        points, norms = coordinates(rows.gram), rows.norms
        identity = np.eye(len(rows.prior))
        staged = Staged(rows, identity, identity)
        for name in self.pre:
            staged = _after(_STAGES[name](self, staged.rows), staged, points, norms)
        return staged


@dataclass(frozen=True)
class _Stage:
    """One stage's W, shape (m', m), and how it shares out; `prior` and `samples` are those of the m' rows."""

    matrix: Matrix
    shares: Matrix
    prior: Vector
    samples: Vector


def _after(stage: _Stage, before: Staged, points: Matrix, norms: Vector) -> Staged:
    matrix, losses, accuracies = stage.matrix @ before.matrix, before.rows.losses, before.rows.accuracies
    mixed = matrix @ points
    # What is left of rows that cancel is rounding; a rule that normalises would take it for a direction.
    size = np.abs(matrix) @ norms
    mixed[(mixed**2).sum(axis=1) <= STATIONARY_TOLERANCE * size**2] = 0.0
    rows = replace(
        before.rows,
        gram=mixed @ mixed.T,
        prior=stage.prior,
        samples=stage.samples,
        losses=None if losses is None else stage.shares @ np.clip(losses, -_LARGEST_LOSS, _LARGEST_LOSS),
        accuracies=None if accuracies is None else stage.shares @ accuracies,
        clients=before.rows.clients if len(stage.prior) == len(before.rows.prior) else (),
    )
    return Staged(rows, matrix, stage.shares @ before.shares)


def _scaled(rows: Rows, factors: Vector) -> _Stage:
    return _Stage(np.diag(factors), np.eye(len(factors)), rows.prior, rows.samples)


def _normalise(_: Stages, rows: Rows) -> _Stage:
    """Every update to norm 1; a zero update stays zero."""
    return _scaled(rows, inverse_norms(rows.gram))


def _clip(stages: Stages, rows: Rows) -> _Stage:
    """Longer updates to norm `clip_norm` (Sun et al., 2019)."""
    return _scaled(rows, clipping(rows.norms, stages.clip_norm))


def _nnm(stages: Stages, rows: Rows) -> _Stage:
    """Nearest-neighbour mixing (Allouah et al., 2023): every update becomes the mean of the m - f nearest to it.

    An attacker's row becomes a mean of mostly honest ones, and honest rows move towards each other.
    """
    m = len(rows.prior)
    if m <= 2 * stages.byzantine:
        raise TooFewUpdatesError(
            f"nnm with byzantine = {stages.byzantine} needs at least {2 * stages.byzantine + 1} updates; there are {m}"
        )
    distances = squared_distances(rows.gram)
    np.fill_diagonal(distances, -1.0)  # before its duplicates, each is its own nearest
    nearest = np.argsort(distances, axis=1, kind="stable")[:, : m - stages.byzantine]
    matrix = np.zeros((m, m))
    np.put_along_axis(matrix, nearest, 1.0 / (m - stages.byzantine), axis=1)
    return _Stage(matrix, matrix, rows.prior, rows.samples)


def _bucket(stages: Stages, rows: Rows) -> _Stage:
    """Bucketing (Karimireddy et al., 2022, Algorithm 1): updates in random order, averaged by `bucket_size`.

    The mean in a bucket is weighted by the prior, whose sum the bucket inherits; it is plain for a uniform prior.
    """
    m = len(rows.prior)
    order = np.random.default_rng([stages.bucket_seed, rows.round]).permutation(m)
    members = np.zeros((-(-m // stages.bucket_size), m))
    members[np.arange(m) // stages.bucket_size, order] = 1.0
    prior = members @ rows.prior
    matrix = members * np.where(prior[:, None] > 0, rows.prior, 1.0)
    matrix /= matrix.sum(axis=1, keepdims=True)
    return _Stage(matrix, matrix, prior, members @ rows.samples)


_STAGES: Mapping[str, Callable[[Stages, Rows], _Stage]] = MappingProxyType(
    {"normalise": _normalise, "clip": _clip, "nnm": _nnm, "bucket": _bucket}
)
