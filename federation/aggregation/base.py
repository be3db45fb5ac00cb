"""Algorithms, which ask clients in phases and compute a step; and rules, algorithms that apply a pure function of K."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from federation.aggregation.answers import asked, combination, copied
from federation.aggregation.diagnostics import describe, drawn_rows
from federation.aggregation.interface import (
    Combination,
    Coordinates,
    HyperparameterError,
    Matrix,
    Reads,
    Rows,
    TooFewUpdatesError,
    Vector,
)
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import Replies, RoundContext, RoundGenerator, Step
from federation.aggregation.pre import Stage, apply
from federation.aggregation.qp import STATIONARY_TOLERANCE
from federation.aggregation.secure.private_rule import private_round
from federation.aggregation.server_optimizers import Optimizer
from federation.arrays import Numbers, vector
from federation.errors import ArgumentError
from federation.owners_code import is_owners_class
from federation.plugins import CodeOrigin
from federation.spec.computation import Ability
from federation.spec.options import Options

Opened = Literal["sum", "gram"] | None
"""The values that a private round opens for a rule besides the weighted sum: none, or the Gram matrix of sketches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Options, ABC):
    """The work of a run in each round. Its options are its hyper-parameters.

    Attributes:
        name: its name in run specifications and on the command line.
        reads_losses: True if it needs the losses that clients report.
        reads_accuracies: True if it needs the accuracies on their training splits that they report.
        averages: True if its model is the mean of the models after every step; this mean is evaluated and deployed, and
            the clients train from the last model.
        stages: they change the rows before the rule sees them.
        private: the values that a private round must open for it; None where it cannot work in a private round.
        no_auto: why `server.learning_rate` cannot be "auto"; empty where the rate is a factor of its direction, whose
            length follows from the Gram matrix.
        added_state: the keys of its state that a version after its first one has added. The record of a run lacks them
            where an older version made it, so the rule has a default for each.
    """

    refusal = HyperparameterError
    name: ClassVar[str] = ""
    reads_losses: ClassVar[bool] = False
    reads_accuracies: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    private: ClassVar[Opened] = None
    no_auto: ClassVar[str] = ""
    added_state: ClassVar[frozenset[str]] = frozenset()

    stages: tuple[Stage, ...] = ()

    def fit(self, objectives: tuple[str, ...]) -> None:
        """Checks that the hyper-parameters suit a task's objectives; a rule over clients takes any.

        Raises:
            HyperparameterError: they do not; the message names the key.
        """

    def cautions(self) -> tuple[str, ...]:
        """Warnings for the operator who submits a run: how a client could abuse the rule."""
        if not self.reads_losses:
            return ()
        return (
            f"{self.name} weighs clients by the losses that they report: a client that inflates its loss gains "
            "influence (bias attack); fedmgda+ reads no losses",
        )

    @property
    def measures_samples(self) -> bool:
        """True if it asks for losses or gradients on training splits, which noise in the training does not protect."""
        return self.reads_losses or self.reads_accuracies

    @property
    def divides_by_rate(self) -> bool:
        """True if it treats an update divided by train.learning_rate as a sum of gradients."""
        return False

    def needs(self, objectives: tuple[str, ...]) -> frozenset[Ability]:
        """The abilities that trainers need for its work, for a task with these objectives."""
        return frozenset({Ability.WEIGHTS} if len(objectives) > 1 else ())

    def sensitivity(self, updates: int) -> float | None:
        """The largest move of the direction when one of these updates is replaced by another one or by zero.

        The bound holds with the prior 1/m. None where the algorithm has no such bound.
        """
        return None

    def largest_weights(self, prior: Vector) -> Vector | None:
        """The largest weight that each row of an open round can get, shape (m,); None where nothing but 1 bounds it.

        `prior` is lambda0, shape (m,).
        """
        return None

    @property
    def keeps_updates(self) -> bool:
        """True if later rounds may recall updates, which must then be stored."""
        return False

    def origins(self) -> tuple[CodeOrigin, ...]:
        """Further plug-ins that make its steps, such as a sketch."""
        return ()

    def optimizer(self) -> Optimizer | None:
        """The server's optimiser, where that is part of the algorithm."""
        return None

    def blobs(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """The digests of the payloads that the state refers to, which must be kept."""
        return ()

    @abstractmethod
    def round(self, context: RoundContext) -> RoundGenerator:
        """One round: yields phases, is sent the replies to each, and returns the step. See `phases`."""

    def usable(self, replies: Replies) -> Replies:
        """The replies without those that lack the loss or the accuracy that the rule reads.

        Raises:
            TooFewUpdatesError: none is left.
        """
        if self.reads_losses and not (replies := replies.reporting("loss")):
            raise TooFewUpdatesError(f"{self.name} needs losses, and no client reported one")
        if self.reads_accuracies and not (replies := replies.reporting("accuracy")):
            raise TooFewUpdatesError(f"{self.name} needs accuracies on training splits, and no client reported one")
        return replies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule(Algorithm, ABC):
    """An algorithm in which every client trains once, and a function of the Gram matrix of the updates makes the step.

    Attributes:
        reads: what `combine` reads of the updates; `rows` has no more. A class with a `combine` of its own that does
            not say it reads K.

    A subclass is a frozen dataclass that defines `combine`:

        @dataclass(frozen=True, kw_only=True)
        class Mean(Rule):
            def combine(self, rows):
                return conclude(rows.gram, rows.prior, rows.prior)
    """

    reads: ClassVar[Reads] = Reads.GRAM

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reads = Reads.of(cls, "combine")
        if "combine" in vars(cls):
            cls.reads = reads

    @property
    def needs_of_updates(self) -> Reads:
        """What the rule and its stages read of the updates."""
        needed, mixed = Reads.NOTHING, False
        parts: tuple[Stage | Rule, ...] = (*self.stages, self)
        for part in parts:
            # The lengths of rows that a stage has mixed follow from K alone.
            needed = max(needed, Reads.GRAM if mixed and part.reads > Reads.NOTHING else part.reads)
            mixed = mixed or (isinstance(part, Stage) and part.compares)
        return needed

    @abstractmethod
    def combine(self, rows: Rows) -> Combination:
        """Turns K and the scalars of the rows into coefficients. Pure: the same rows give the same answer.

        Raises:
            TooFewUpdatesError: there are too few rows for the rule.
        """

    def decide(self, rows: Rows) -> Combination:
        """Applies the stages, then `combine`; the answer is in terms of the rows before the stages.

        Raises:
            PluginError: the code of a plug-in raised an exception, or its answer cannot be used; see `answers.asked`.
        """
        if not is_owners_class(type(self)):
            return self.staged(rows)
        return asked(self._whose, "combine", lambda: self.staged(copied(rows)), partial(combination, rows=rows))

    def staged(self, rows: Rows) -> Combination:
        """As `decide`, which calls it."""
        if not self.stages:
            return self._combined(rows)
        staged = apply(self.stages, rows)
        answer = self._combined(staged.rows)
        weights = (answer.weights @ staged.shares[: len(answer.weights)])[: rows.current]
        if answer.coordinates is not None:
            coordinates = Coordinates(answer.coordinates.matrix @ staged.matrix, answer.coordinates.trim)
            return dataclasses.replace(answer, weights=weights, coordinates=coordinates)
        coefficients = answer.coefficients @ staged.matrix
        described = describe(rows.gram, coefficients, weights) if rows.gram.size else {}
        return Combination(coefficients, weights, answer.state, answer.diagnostics | described)

    def _combined(self, rows: Rows) -> Combination:
        """The answer of `combine` to what it reads of these rows, completed from K where K is known."""
        seen = rows.reading(self.reads)
        if is_owners_class(type(self)):
            read = partial(combination, rows=seen)
            answer = asked(self._whose, "combine", lambda: self.combine(seen), read, twice=False)
        else:
            answer = self.combine(seen)
        if seen.gram.size or not rows.gram.size or answer.coordinates is not None:
            return answer
        return dataclasses.replace(
            _concluded(rows.gram, answer.coefficients, answer.weights, answer.diagnostics),
            state=answer.state,
            objectives=answer.objectives,
        )

    @property
    def _whose(self) -> str:
        said = "" if self.reads is Reads.GRAM else f" (reads = Reads.{self.reads.name})"
        return f"algorithm {self.name or type(self).__name__!r}{said}"

    def round(self, context: RoundContext) -> RoundGenerator:
        if context.private is not None:
            return (yield from private_round(self, context, context.private))
        replies = self.usable((yield TrainingPhase()))
        drawn = self.gram_rows(context, len(replies))
        return Step(replies, self.decide(self.rows_of(replies, context)), gram_rows=drawn)

    def gram_rows(self, context: RoundContext, count: int) -> tuple[int, ...]:
        """The rows, of `count`, of whose products K is made in a round; none: of all.

        Above `MOST_COMPARED` rows, K is for metrics alone where neither the rule nor a stage reads it.
        """
        if context.compares_all or self.needs_of_updates is Reads.GRAM:
            return ()
        return drawn_rows(context.seed, context.number, count)

    def rows_of(self, replies: Replies, context: RoundContext) -> Rows:
        """The input of `decide` in a round: with K, unless it is of some rows alone."""
        some = self.gram_rows(context, len(replies))
        return replies.rows(context, reads=self.needs_of_updates if some else Reads.GRAM)


def conclude(K: Matrix, coefficients: Numbers, weights: Numbers, **measured: float) -> Combination:
    """The answer of a rule without state; where the rows cancel each other, all coefficients are 0: no step.

    K is (m, m), the coefficients are (m,), the weights those of the rows of this round, which come first; `measured`
    are further diagnostics. Lists and tensors of PyTorch are read as arrays. For a rule that does not read K, it is
    (0, 0) here: whether the rows cancel is then found from the direction.

    Raises:
        ValueError: no vectors of numbers, or of other lengths.
    """
    c, shares = vector("coefficients", coefficients, len(K) or None), vector("weights", weights)
    if len(shares) > len(c):
        raise ArgumentError(f"weights has {len(shares)} numbers; there are {len(c)} rows")
    return _concluded(K, c, shares, measured) if K.size else Combination(c, shares, {}, measured)


def _concluded(K: Matrix, c: Vector, shares: Vector, measured: Mapping[str, float]) -> Combination:
    length = float(np.abs(c) @ np.sqrt(np.diag(K)))
    stationary = bool(c @ K @ c <= STATIONARY_TOLERANCE * length**2)
    if stationary:
        c = np.zeros(len(K))
    diagnostics = describe(K, c, shares) | {**measured, "stationary": float(stationary)}
    return Combination(c, shares, {}, diagnostics)
