"""Stages before the rule: operations on the updates, in Gram space.

Each stage replaces the rows U by W U, with W from K alone, or from the norms, or from neither. The rule then answers
for W U, and c W is the answer for U.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from federation.aggregation.answers import asked, copied
from federation.aggregation.answers import mixture as read
from federation.aggregation.geometry import clipping, coordinates, inverse, squared_distances
from federation.aggregation.interface import (
    UNREAD,
    HyperparameterError,
    Matrix,
    Mixture,
    Reads,
    Rows,
    Vector,
    check_updates,
)
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.owners_code import is_owners_class
from federation.spec.options import Options, option

_LARGEST_LOSS = 1e300  # larger claims count as this, so that their means do not overflow


@dataclass(frozen=True, kw_only=True)
class Stage(Options, ABC):
    """An operation on the rows before the rule is applied. Its options are hyper-parameters.

    Attributes:
        name: its name in run specifications.
        compares: True if it compares or mixes the updates of one round. Rules that also read updates of earlier rounds
            (`tau`) refuse such a stage.
        reads: what `mix` reads of the updates; `rows` has no more. A class with a `mix` of its own that does not say it
            reads K.
    """

    refusal = HyperparameterError
    name: ClassVar[str] = ""
    compares: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads.GRAM

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reads = Reads.of(cls, "mix")
        if "mix" in vars(cls):
            cls.reads = reads

    @abstractmethod
    def mix(self, rows: Rows) -> Mixture:
        """Turns K and the scalars of the rows into W. Pure: the same rows give the same answer.

        Raises:
            TooFewUpdatesError: there are too few rows for the stage; the round is then skipped.
        """


@dataclass(frozen=True)
class Staged:
    """The m' rows W U after some stages; `matrix` is W, (m', m), and `shares`, (m', m), are as in `Mixture`."""

    rows: Rows
    matrix: Matrix
    shares: Matrix


def apply(stages: Sequence[Stage], rows: Rows) -> Staged:
    """The rows after every stage, in order.

    Raises:
        TooFewUpdatesError: there are too few rows for a stage.
        PluginError: the code of a plug-in raised an exception, or its answer cannot be used; see `answers.asked`.
    """
    known = bool(rows.gram.size)
    points, norms = (coordinates(rows.gram), rows.norms) if known else (UNREAD, np.zeros(0))
    matrix = shares = np.eye(len(rows.prior))
    for stage in stages:
        mixture = _mixed(stage, rows)
        mean = mixture.matrix if mixture.shares is None else mixture.shares
        matrix, shares = mixture.matrix @ matrix, mean @ shares
        products = UNREAD
        if known:
            mixed = matrix @ points
            # Rows that cancel leave rounding errors, which a rule that normalises would treat as a direction.
            size = np.abs(matrix) @ norms
            mixed[(mixed**2).sum(axis=1) <= STATIONARY_TOLERANCE * size**2] = 0.0
            products = mixed @ mixed.T
        losses, accuracies = rows.losses, rows.accuracies
        rows = replace(
            rows,
            gram=products,
            squares=_squares(mixture.matrix, rows.squares),
            prior=rows.prior if mixture.prior is None else mixture.prior,
            samples=rows.samples if mixture.samples is None else mixture.samples,
            losses=None if losses is None else mean @ np.clip(losses, -_LARGEST_LOSS, _LARGEST_LOSS),
            accuracies=None if accuracies is None else mean @ accuracies,
            clients=rows.clients if len(matrix) == len(rows.prior) else (),
        )
    return Staged(rows, matrix, shares)


def _squares(matrix: Matrix, squares: Vector) -> Vector:
    """The squared lengths of the rows W U where W only scales the rows of U; (0,) where they do not follow."""
    scales = matrix.shape == (len(squares),) * 2 and np.count_nonzero(matrix) == np.count_nonzero(np.diag(matrix))
    return np.diag(matrix) ** 2 * squares if scales else np.zeros(0)


def _mixed(stage: Stage, rows: Rows) -> Mixture:
    rows = rows.reading(stage.reads)
    if not is_owners_class(type(stage)):
        return stage.mix(rows)
    said = "" if stage.reads is Reads.GRAM else f" (reads = Reads.{stage.reads.name})"
    whose = f"stage {stage.name or type(stage).__name__!r}{said}"
    return asked(whose, "mix", lambda: stage.mix(copied(rows)), partial(read, rows=rows))


@dataclass(frozen=True, kw_only=True)
class Normalize(Stage):
    """Every update to norm 1; a zero update stays zero."""

    name = "normalize"
    compares = False
    reads = Reads.NORMS

    def mix(self, rows: Rows) -> Mixture:
        return Mixture.scaled(inverse(rows.norms))


@dataclass(frozen=True, kw_only=True)
class Clip(Stage):
    """Longer updates to norm `clip_norm` (Sun et al., 2019)."""

    name = "clip"
    compares = False
    reads = Reads.NORMS

    clip_norm: float = option(0.0, "the norm that clip allows; 0 is the median of the norms", "[0, inf)")

    def mix(self, rows: Rows) -> Mixture:
        return Mixture.scaled(clipping(rows.norms, self.clip_norm))


@dataclass(frozen=True, kw_only=True)
class _Outnumbered(Stage, ABC):
    """A stage whose promise holds against f attackers among more than 2 f updates."""

    byzantine: int = option(1, "attackers that arc and nnm allow for, less than half of the updates", "[0, inf)")

    def _check_outnumbered(self, m: int) -> None:
        check_updates(m, 2 * self.byzantine + 1, f"{self.name} with byzantine = {self.byzantine}")


@dataclass(frozen=True, kw_only=True)
class Arc(_Outnumbered):
    """Adaptive robust clipping (Allouah et al., 2025, Algorithm 2): the longest updates to the next one's norm.

    With f of m updates from attackers, the k = floor(2 f (m - f) / m) longest get the norm of the next in length. That
    is never more than the norm of an honest update, since k >= f; and at least half of the updates stay as they are.
    """

    name = "arc"
    reads = Reads.NORMS

    def mix(self, rows: Rows) -> Mixture:
        m, f, norms = len(rows.prior), self.byzantine, rows.norms
        self._check_outnumbered(m)
        bound = np.sort(norms)[m - 1 - 2 * f * (m - f) // m]
        return Mixture.scaled(np.divide(bound, norms, out=np.ones(m), where=norms > bound))


@dataclass(frozen=True, kw_only=True)
class Nnm(_Outnumbered):
    """Nearest-neighbour mixing (Allouah et al., 2023): every update becomes the mean of the m - f nearest to it.

    An attacker's row becomes a mean of mostly honest ones, and honest rows move towards each other.
    """

    name = "nnm"

    def mix(self, rows: Rows) -> Mixture:
        m = len(rows.prior)
        self._check_outnumbered(m)
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

    name = "bucket"
    reads = Reads.NOTHING

    bucket_size: int = option(2, "updates in a bucket", "[1, inf)")
    bucket_seed: int = option(0, "with the round, decides which clients share a bucket", "[0, inf)")

    def mix(self, rows: Rows) -> Mixture:
        m = len(rows.prior)
        order = np.random.default_rng([self.bucket_seed, rows.round]).permutation(m)
        members = np.zeros((-(-m // self.bucket_size), m))
        members[np.arange(m) // self.bucket_size, order] = 1.0
        prior = members @ rows.prior
        matrix = members * np.where(prior[:, None] > 0, rows.prior, 1.0)
        matrix /= matrix.sum(axis=1, keepdims=True)
        return Mixture(matrix, prior=prior, samples=members @ rows.samples)


STAGES: Mapping[str, type[Stage]] = MappingProxyType(
    {stage.name: stage for stage in (Normalize, Clip, Arc, Nnm, Bucket)}
)
