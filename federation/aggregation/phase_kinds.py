"""The phases that built-in algorithms yield, one class for each kind of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.phases import AlgorithmPhase, Asked
from federation.spec.objective_names import Targets, joint_target, separate_targets
from federation.spec.task_metrics import MetricKind
from federation.vectors import payload_bytes, update_layout
from federation.work.evaluate.work import Evaluate
from federation.work.jacobian.work import Jacobian
from federation.work.residual.work import REFERENCE, Residual
from federation.work.search.work import DIRECTION, Search, direction_layout
from federation.work.statistics.work import Statistics
from federation.work.train.work import Train

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class TrainingPhase(AlgorithmPhase):
    """Ask clients to train from the current model.

    Attributes:
        separate: each client sends a row for each of its objectives, trained for that one alone, and not one row that
            descends them together.
        weights: of the objectives in the loss of that one row; None is the mean of the client's own.
        from_jacobian: the first step uses the gradients of the round's `GradientsPhase`.
        measure: measure the base model on the training split first.
    """

    kind = Train

    separate: bool = False
    weights: Mapping[str, float] | None = None
    from_jacobian: bool = False
    measure: bool = True

    def targets(self, objectives: Sequence[str]) -> Targets:
        """The losses that the rows of a client that serves these objectives descend."""
        return separate_targets(objectives) if self.separate else joint_target(objectives, self.weights)

    def work(self, asked: Asked) -> Train:
        work = Train.of(asked.spec, asked.round, self.targets(asked.objectives))
        return replace(work, from_jacobian=self.from_jacobian, measure=self.measure and work.measure)


@dataclass(frozen=True, kw_only=True)
class GradientsPhase(AlgorithmPhase):
    """Ask for a sketch of the gradients of each client's objectives at the current model, on one minibatch.

    The attributes are those of `Jacobian`; with `batch_size` None, the minibatch is as large as in training.
    """

    kind = Jacobian

    sketch: str
    budget: float
    batch_size: int | None = None
    encoder_only: bool = False
    measure: bool = False

    def work(self, asked: Asked) -> Jacobian:
        return Jacobian(
            sketch=self.sketch,
            budget=self.budget,
            batch_size=asked.spec.train.batch_size if self.batch_size is None else self.batch_size,
            objectives=asked.objectives,
            encoder_only=self.encoder_only,
            measure=self.measure,
        )


@dataclass(frozen=True, kw_only=True)
class ResidualsPhase(AlgorithmPhase):
    """Ask for the inner products of the gradients' remainders (beside their sketches) with the sum of the sketches.

    Attributes:
        gradients: the phase that the sketches were made for.
        reference: a sketch of their sum: rows by name.
        objectives: those of the reference.
    """

    kind = Residual

    gradients: GradientsPhase
    reference: Mapping[str, NDArray[np.float32]]
    objectives: tuple[str, ...]

    def work(self, asked: Asked) -> Residual:
        return Residual(jacobian=self.gradients.work(asked), objectives=self.objectives)

    def inputs(self) -> Mapping[str, bytes]:
        layout = update_layout([(name, len(values)) for name, values in self.reference.items()])
        return {REFERENCE: b"".join(payload_bytes(layout, self.reference))}


@dataclass(frozen=True, kw_only=True)
class EvaluationPhase(AlgorithmPhase):
    """Ask clients to evaluate a model on some of their own splits ("train", "validation", "test").

    `metrics` are those of the task that they measure besides loss and accuracy.
    """

    kind = Evaluate

    splits: tuple[str, ...]
    metrics: tuple[MetricKind, ...] = ()

    def work(self, asked: Asked) -> Evaluate:
        return Evaluate(splits=self.splits, metrics=self.metrics)


@dataclass(frozen=True, kw_only=True)
class StatisticsPhase(AlgorithmPhase):
    """Ask clients to describe the columns of their data that the specification names."""

    kind = Statistics

    def work(self, asked: Asked) -> Statistics:
        return Statistics.of(asked.spec)


def measuring_phase(spec: "RunSpec", metrics: tuple[MetricKind, ...]) -> AlgorithmPhase:
    """The phase in which the clients of a run measure a model, or, in one that describes data, their data."""
    return StatisticsPhase() if spec.describes else EvaluationPhase(splits=spec.evaluated, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class LineSearchPhase(AlgorithmPhase):
    """Ask for the losses on the training splits at several steps along one direction.

    Attributes:
        direction: d, (d,).
        steps: the clients measure w_t - s d for each step s.
    """

    kind = Search

    direction: NDArray[np.float32]
    steps: tuple[float, ...]

    def work(self, asked: Asked) -> Search:
        return Search(steps=self.steps)

    def inputs(self) -> Mapping[str, bytes]:
        return {DIRECTION: b"".join(payload_bytes(direction_layout(len(self.direction)), {DIRECTION: self.direction}))}
