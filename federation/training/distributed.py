"""The built-in trainer in several processes of one machine, such as one for each GPU.

Each process holds the model and the data, and makes the gradient of its part of every minibatch. The gradients are
added up, so that every process makes the same step. The result is that of one process up to rounding; where the model
draws random numbers, as dropout does, each process draws its own. BatchNorm normalises each process's part, which has
two samples or more if the minibatch has, and the first process's statistics count.

Where one process meets an operation without a deterministic kernel, the work begins again in all of them, also in those
whose part of the minibatch is empty and which never meet it. Process 0 evaluates alone, so its orders begin with the
kernels that it has come to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from federation.spec.computation import Ability
from federation.tasks import Task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.determinism import without_kernel
from federation.training.lending import Lending
from federation.training.plans import TrainingPlan
from federation.training.ranks import Ranks
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.training_json import plan_of, training_order
from federation.vectors import Vector


class _ElsewhereError(RuntimeError):
    """An operation of another process has no deterministic kernel."""

    def __init__(self) -> None:
        super().__init__("an operation of another process does not have a deterministic implementation")


class DistributedTrainer(TorchTrainer):
    """One of several processes that train together. Process 0 gets the orders, and evaluates alone."""

    # Each process would draw other samples and other noise.
    abilities = TorchTrainer.abilities - {Ability.NOISE}

    def __init__(self, task: Task, data: Any, device: str, *given: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(task, data, ranks.device(device), *given)

    def prepare(self) -> None:
        """As `TorchTrainer.prepare`. Raises ValueError: too few GPUs."""
        super().prepare()
        self.device = f"{self._ranks.count} x {self.device}"
        self.kernels.speaks = self._ranks.rank == 0
        self._lending = Lending(self.task, copies=True)  # one process alone could not begin the work again

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        """As `TorchTrainer.train`, together. Process 0 decides when to stop."""
        if self._ranks.rank == 0:
            self._ranks.tell({"type": "train", **training_order(plan)}, model)
        self.kernels.repeatable = self._ranks.agree(self.kernels.repeatable)
        wanted = plan.stopped
        return super().train(model, replace(plan, stopped=lambda: self._ranks.agree(wanted())))

    def gradients(self, model: Vector, batch_size: int, seed: int) -> dict[str, Vector]:
        """As `TorchTrainer.gradients`, together."""
        if self._ranks.rank == 0:
            self._ranks.tell({"type": "gradients", "batch_size": batch_size, "seed": seed}, model)
        self.kernels.repeatable = self._ranks.agree(self.kernels.repeatable)
        return super().gradients(model, batch_size, seed)

    def close(self) -> None:
        """Tells the other processes to end."""
        if self._ranks.rank == 0:
            self._ranks.tell({"type": "end"})
        self._ranks.leave()
        super().close()

    def _train(self, model: Vector, plan: TrainingPlan, even: bool) -> Vector:
        with self._telling():
            return super()._train(model, plan, even)

    def _gradients(self, model: Vector, batch_size: int, seed: int, even: bool) -> dict[str, Vector]:
        with self._telling():
            return super()._gradients(model, batch_size, seed, even)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells the others of an operation without a deterministic kernel: they ask before they add up gradients."""
        try:
            yield
        except _ElsewhereError:
            raise
        except Exception as error:
            if self.kernels.repeatable and without_kernel(error):
                self._ranks.any(True)
            raise

    def _seed(self, seed: int) -> None:
        super()._seed(seed + self._ranks.rank)

    @property
    def _processes(self) -> int:
        return self._ranks.count

    def _part(self, samples: Tensor, even: bool) -> Tensor:
        return self._ranks.part(samples, even=even)

    def _add_up(self, tensor: Tensor) -> None:
        # Only what is made of a process's own part, the gradient, can meet an operation that the others do not.
        if tensor is self._buffers.gradient and self.kernels.repeatable and self._ranks.any(False):
            raise _ElsewhereError
        self._ranks.add(tensor)


def follow(ranks: Ranks, prepared: Callable[[dict[str, Any]], Trainer]) -> None:
    """Does what process 0 tells, until it tells the end. `prepared` makes the trainer of its first order.

    Raises:
        WorkError: `trainer:died`, if another process has ended.
    """
    header, _ = ranks.hear()
    trainer = prepared(header)
    while True:
        header, model = ranks.hear()
        try:
            match header["type"]:
                case "train":
                    trainer.train(model, plan_of(header, trainer.samples))
                case "gradients":
                    trainer.gradients(model, header["batch_size"], header["seed"])
                case _:
                    trainer.close()
                    return
        except (TrainingDiverged, TrainingStopped):
            continue  # in every process
