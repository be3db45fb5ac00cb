"""Local work of simulated clients: its interface, and a loop with the code of a worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from federation.attacks import AttackError
from federation.owners_code import described, passes
from federation.plugins import PluginError
from federation.spec.computation import Ability, AtBase
from federation.tasks import DataError, Splits, Task, TaskError
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.generators import generators_kept
from federation.training.own import Own, compute
from federation.training.reasons import NOT_ASKED
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.trainers import make_trainer, trainer_code
from federation.work.base import Result, WorkError
from fedpareto.simulation import SimulationError

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

    @abstractmethod
    def repeatable(self, client: str) -> bool:
        """True if a client gives the same result for the same work, as far as its work has shown until now."""


@contextmanager
def naming(clients: Sequence[str], round_: int) -> Iterator[None]:
    """Turns an exception of the clients' code into a SimulationError with their names, the round and the owner's line.

    Exceptions that are outcomes of a computation are passed on.
    """
    try:
        yield
    except (TrainingDiverged, TrainingStopped, WorkError, SimulationError):
        raise
    except BaseException as error:
        if passes(error):
            raise
        several = f"{clients[0]} to {clients[-1]}, stacked (the backend loop would name one of them)"
        why = str(error) if isinstance(error, TaskError | DataError | AttackError | PluginError) else described(error)
        raise SimulationError(f"{clients[0] if len(clients) == 1 else several}, in round {round_}: {why}") from error


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
            with trainer_code(trainer, f"preparing it for {name}"):
                if first is None:
                    first = self._trainers[name] = make_trainer(trainer, task, own, device, objectives=objectives)
                else:
                    self._trainers[name] = first.on(own, objectives)

    def try_out(self) -> None:
        """Tries the trainer on the data of the first client that trains; random generators stay as they were.

        Raises:
            DataError, TaskError, WorkError, PluginError: as of `Trainer.try_out`, and of the code of its owner.
        """
        for name, trainer in self._trainers.items():
            if trainer.samples:
                with generators_kept(), trainer_code(type(trainer), f"trying it on the data of {name}"):
                    trainer.try_out()
                return

    def compute(self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for name, computation in computations.items():
            try:
                trainer, own = self._trainers[name], turn.own.get(name)
                with naming([name], turn.round):
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

    def repeatable(self, client: str) -> bool:
        return Ability.REPEATABLE in self._trainers[client].abilities

    @property
    def operations(self) -> frozenset[str]:
        """The operations of the built-in trainer that had no deterministic kernel until now."""
        trainers = self._trainers.values()
        return frozenset().union(*(each.kernels.operations for each in trainers if isinstance(each, TorchTrainer)))
