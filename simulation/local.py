"""Local work of simulated clients: its interface, and a loop with the code of a worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from federation.spec.computation import AtBase
from federation.tasks import Splits, Task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.own import Own, compute
from federation.training.reasons import NOT_ASKED
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.trainers import make_trainer
from federation.work.base import Result, WorkError

Outcome = Result | TrainingDiverged | WorkError
Stopped = Callable[[], bool]
Serves = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Turn:
    """The round for which clients compute."""

    seed: int  # of the run
    round: int  # from 0
    stopped: Stopped
    own: Mapping[str, Own] = field(default_factory=dict)  # by client, in a run that does not share all parameters


class LocalWork(ABC):
    """Executes the computations of simulated clients."""

    @abstractmethod
    def compute(self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn) -> dict[str, Outcome]:
        """The outcome of each client's computation, from the model w_t = `base`, shape (d,).

        Raises:
            TrainingStopped: `turn.stopped`, which is called between minibatches, returned true.
        """


class Loop(LocalWork):
    """One client after the other, with the code of a worker."""

    def __init__(
        self,
        task: Task,
        splits: Mapping[str, Splits],
        device: str,
        serves: Serves | None = None,
        trainer: type[Trainer] = TorchTrainer,
    ) -> None:
        self._trainers: dict[str, Trainer] = {}
        first: Trainer | None = None
        for name, own in splits.items():
            objectives = (serves or {}).get(name)
            if first is None:
                first = self._trainers[name] = make_trainer(trainer, task, own, device, objectives=objectives)
            else:
                self._trainers[name] = first.on(own, objectives)

    def compute(self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for name, computation in computations.items():
            try:
                trainer, own = self._trainers[name], turn.own.get(name)
                outcomes[name] = compute(
                    trainer,
                    base,
                    computation,
                    own,
                    seed=turn.seed,
                    round=turn.round,
                    client_id=name,
                    stopped=turn.stopped,
                )
            except (TrainingDiverged, WorkError) as error:
                outcomes[name] = error
            except TrainingStopped:
                if turn.stopped():
                    raise
                outcomes[name] = WorkError(NOT_ASKED)
        return outcomes
