"""The orders for a trainer: to train a model, or to measure one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.spec.computation import PrivateSgd
from federation.spec.train_section import LocalSgd
from federation.training import TrainingStopped
from federation.work.minibatch_sizes import Cut


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingPlan:
    """The plan of one training.

    Attributes:
        sgd: epochs or steps, size of a minibatch, optimiser and rates, as the run asks for them.
        weights: of the objectives in the loss. A trainer without the ability "weights" is only given one objective.
        seed: of all random choices, 0 to 2^63 - 1.
        samples: training samples.
        from_gradients: the first step uses the result of `gradients` for the same model, batch size and seed.
        private: the noise on the gradients of samples; None is no noise.
        frozen: the columns of the model that stay as they are; none without the ability "frozen".
        stopped: returns True once the result is no longer needed.
        tell: takes the share of the training that is done, 0 to 1.
    """

    sgd: LocalSgd
    weights: Mapping[str, float]
    seed: int
    samples: int
    from_gradients: bool = False
    private: PrivateSgd | None = None
    frozen: tuple[slice, ...] = ()
    stopped: Callable[[], bool] = lambda: False
    tell: Callable[[float], None] = lambda share: None

    @property
    def steps(self) -> int:
        """Steps of the optimiser."""
        return self.sgd.count(self.samples)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        return self.sgd.learning_rate * self.sgd.schedule.factor(step, self.steps)

    def progress(self, share: float) -> None:
        """Tells the share that is done, 0 to 1. Raises TrainingStopped if the result is no longer wanted."""
        if self.stopped():
            raise TrainingStopped
        self.tell(share)

    def minibatches(self, *, even: bool = False) -> Iterator[NDArray[np.int64]]:
        """The samples of each step, as indices (n,); they are reshuffled in every epoch, and follow from the seed.

        With `even`, no minibatch of an epoch has less than half of `batch_size` samples, as models with BatchNorm need
        it: the last two share theirs where the last one would be smaller. The number of steps stays.

        Between two steps, it tells the progress.

        Raises:
            TrainingStopped: the result is no longer wanted.
        """
        generator, total, done = np.random.default_rng(self.seed), self.steps, 0
        sizes = Cut.of(self.samples, self.sgd.batch_size, even=even).sizes
        while done < total:
            order, start = generator.permutation(self.samples), 0
            for size in sizes[: total - done]:
                self.progress(done / total)
                yield order[start : start + size]
                start, done = start + size, done + 1
        self.progress(1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationPlan:
    """The plan of one evaluation.

    Attributes:
        split: "train", "validation" or "test"; it is not empty.
        metrics: the requested metrics of the task, besides loss and accuracy; others are left out.
        stopped: returns True once the result is no longer needed.
    """

    split: str
    metrics: tuple[str, ...] = ()
    stopped: Callable[[], bool] = lambda: False
