"""Steps of SGD compiled, several at a time: for models so small that calling torch costs more than computing.

torch's compiler makes machine code of them, with the machine's C++ compiler. What comes out differs from a worker's
training by rounding only.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from federation.tasks import Splits, Task
from federation.tasks import parameters as flat
from federation.training import Descent, Trainer, TrainWork
from simulation import SimulationError

_UNROLLED = 8  # with more, compiling takes longer than it saves

# (w, the velocity, w_t, samples, labels) to (w, the velocity, the losses); samples and labels of so many minibatches
_Steps = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor]]


class CompiledTrainer(Trainer):
    """A trainer whose steps on full minibatches, for one objective, are compiled; the others it makes as its base."""

    def __init__(
        self,
        task: Task,
        splits: Splits,
        device: str = "cpu",
        threads: int | None = None,
        objectives: Sequence[str] | None = None,
    ) -> None:
        super().__init__(task, splits, device, threads, objectives)
        self._compiled: dict[tuple[TrainWork, str], _Steps] = {}  # trainers that share the model share them

    def _advance(
        self, batches: Iterator[tuple[Tensor, Tensor]], weights: Mapping[str, float], descent: Descent, room: int
    ) -> Sequence[Tensor]:
        work, target = descent.work, tuple(weights.items())
        if len(target) != 1 or target[0][1] != 1.0:
            return super()._advance(batches, weights, descent, room)
        some = list(islice(batches, min(_UNROLLED, room)))
        if len(some) < _UNROLLED or any(len(y) != work.batch_size for _, y in some):
            return [self._step(x, y, weights, descent) for x, y in some]
        x, y = (torch.stack(parts) for parts in zip(*some, strict=True))
        own = self._weights
        values, velocity, losses = self._steps(work, target[0][0])(own.values, descent.velocity, own.start, x, y)
        own.values.copy_(values)
        if velocity is not None and descent.velocity is not None:
            descent.velocity.copy_(velocity)
        return losses.unbind()

    def _steps(self, work: TrainWork, objective: str) -> _Steps:
        if (work, objective) not in self._compiled:
            self._compiled[work, objective] = self._compile(work, objective)
        return self._compiled[work, objective]

    def _compile(self, work: TrainWork, objective: str) -> _Steps:
        names = [name for name, _ in flat.trainable(self._model)]

        def loss_of(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
            parameters = dict(zip(names, self._weights.parameters(values), strict=True))
            return self._task.losses(functional_call(self._model, parameters, (x,)), y)[objective]

        def steps(
            values: Tensor, velocity: Tensor | None, start: Tensor, x: Tensor, y: Tensor
        ) -> tuple[Tensor, Tensor | None, Tensor]:
            losses = []
            for some_x, some_y in zip(x.unbind(), y.unbind(), strict=True):
                direction, loss = grad_and_value(loss_of)(values, some_x, some_y)
                if work.weight_decay:
                    direction = direction + work.weight_decay * values
                if work.proximal_mu:
                    direction = direction + work.proximal_mu * (values - start)
                if velocity is not None:
                    velocity = direction = work.momentum * velocity + direction
                values = values - work.learning_rate * direction
                losses.append(loss)
            return values, velocity, torch.stack(losses)

        compiled: _Steps = torch.compile(steps, fullgraph=True, dynamic=False)
        return compiled


def why_not_compiled(task: Task, batch_size: int) -> str:
    """Why the training of a task cannot be compiled, or would draw other random numbers; empty when it can."""
    if len(task.objectives) > 1:
        return "it has several objectives"
    if batch_size == 0:
        return "a step on a whole split takes long enough (train.batch_size = 0)"
    if type(task).augment is not Task.augment:
        return "its minibatches are varied at random"
    for module in flat.build(task).modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout would draw other numbers than a worker's"
        if isinstance(module, nn.RNNBase):
            return "recurrent layers cannot be compiled"
    return ""


def must_compile() -> None:
    """Compiles a line, to see whether there is what it takes.

    Raises:
        SimulationError: there is not.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    try:
        torch.compile(lambda x: x + 1, fullgraph=True, options={"force_disable_caches": True})(torch.zeros(1))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise SimulationError(
            f"the backend compiled needs a C++ compiler that works ({reason}): install one, or use --backend loop"
        ) from error
