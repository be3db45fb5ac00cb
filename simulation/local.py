"""Local work of simulated clients: one after the other, with the code of a worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from federation.tasks import Splits, Task
from federation.training import TrainingDiverged
from federation.training.trainer import Trainer
from federation.work.base import Result
from federation.work.computation import AtBase

Outcome = Result | TrainingDiverged
Stopped = Callable[[], bool]
Serves = Mapping[str, tuple[str, ...]]


class LocalWork(ABC):
    """Computes what the work of simulated clients needs of their models and data."""

    @abstractmethod
    def compute(
        self,
        base: NDArray[np.float32],
        computations: Mapping[str, AtBase],
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        stopped: Stopped,
    ) -> dict[str, Outcome]:
        """What each client's computation came to.

        Args:
            base: w_t, (d,).
            computations: by client.
            seed: of the run.
            round: from 0.
            stopped: asked now and then.

        Raises:
            TrainingStopped: `stopped` said so.
        """


class Loop(LocalWork):
    """One client after the other, with the very code of a worker."""

    def __init__(
        self,
        task: Task,
        splits: Mapping[str, Splits],
        device: str,
        serves: Serves | None = None,
        trainer: type[Trainer] = Trainer,
    ) -> None:
        self._trainers: dict[str, Trainer] = {}
        first: Trainer | None = None
        for name, own in splits.items():
            objectives = (serves or {}).get(name)
            self._trainers[name] = (
                first.on(own, objectives) if first is not None else trainer(task, own, device, objectives=objectives)
            )
            first = first or self._trainers[name]

    def compute(
        self,
        base: NDArray[np.float32],
        computations: Mapping[str, AtBase],
        *,
        seed: int,
        round: int,  # noqa: A002 - the field's own word, as everywhere
        stopped: Stopped,
    ) -> dict[str, Outcome]:
        """One after the other."""
        outcomes: dict[str, Outcome] = {}
        for name, computation in computations.items():
            try:
                outcomes[name] = self._trainers[name].compute(
                    base, computation, seed=seed, round=round, client_id=name, stopped=stopped
                )
            except TrainingDiverged as error:
                outcomes[name] = error
        return outcomes
