"""Compiled steps of SGD, several at a time, for models so small that calling torch costs more than computing.

torch's compiler uses the machine's C++ compiler. The results differ from a worker's training by rounding only.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from federation.spec.train_section import LocalSgd
from federation.tasks import Task
from federation.tasks import parameters as flat
from federation.training.sgd import Descent, Tensors
from federation.training.torch_trainer import TorchTrainer, Training
from fedpareto.simulation import SimulationError

_UNROLLED = 8  # with more, compiling takes longer than it saves

# (w, w_t, the velocity, samples, labels) to the losses; samples and labels of several minibatches. w and velocity move.
_Steps = Callable[[Tensors, Tensors, Tensors, Tensor, Tensor], Tensor]


class CompiledTrainer(TorchTrainer):
    """A trainer with compiled steps on full minibatches for one objective."""

    def prepare(self) -> None:
        """Makes the model; steps are compiled when they are needed first."""
        super().prepare()
        self._compiled: dict[tuple[LocalSgd, str], _Steps] = {}  # trainers that share the model share them

    def _advance(self, batches: Iterator[tuple[Tensor, Tensor]], training: Training, room: int) -> Sequence[Tensor]:
        descent, target = training.descent, tuple(training.plan.weights.items())
        work = descent.work
        if len(target) != 1 or target[0][1] != 1.0:
            return super()._advance(batches, training, room)
        some = list(islice(batches, min(_UNROLLED, room)))
        if len(some) < _UNROLLED or any(len(y) != work.batch_size for _, y in some):
            return [self._step(x, y, training) for x, y in some]
        x, y = (torch.stack(parts) for parts in zip(*some, strict=True))
        steps = self._steps(work, target[0][0])
        return steps(descent.values, descent.start, descent.means, x, y).unbind()

    def _steps(self, work: LocalSgd, objective: str) -> _Steps:
        if (work, objective) in self._compiled:
            return self._compiled[work, objective]
        names = [name for name, _ in flat.trainable(self._model)]

        def loss_of(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
            parameters = dict(zip(names, self._buffers.parameters(values), strict=True))
            return self.task.losses(functional_call(self._model, parameters, (x,)), y)[objective]

        def steps(values: Tensors, start: Tensors, velocity: Tensors, x: Tensor, y: Tensor) -> Tensor:
            descent, losses = Descent(work, values, start, velocity), []
            for some_x, some_y in zip(x.unbind(), y.unbind(), strict=True):
                gradient, loss = grad_and_value(loss_of)(values[0], some_x, some_y)
                descent.step([gradient])
                losses.append(loss)
            return torch.stack(losses)

        return self._compiled.setdefault((work, objective), torch.compile(steps, fullgraph=True, dynamic=False))


def why_not_compiled(task: Task, sgd: LocalSgd) -> str:
    """The reason why the training of a task cannot be compiled, or would draw other random numbers; empty if it can."""
    if not sgd.plain or sgd.clip_norm or sgd.micro_batch or sgd.precision != "float32":
        return (
            "only plain SGD can be (train.optimizer, step_schedule, step_warm_up, clip_norm, micro_batch and precision)"
        )
    if len(task.objectives) > 1:
        return "it has several objectives"
    if sgd.batch_size == 0:
        return "a step on a whole split takes long enough (train.batch_size = 0)"
    if type(task).augment is not Task.augment:
        return "its minibatches are varied at random"
    for module in flat.build(task).modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout would draw other numbers than a worker's"
        if isinstance(module, nn.RNNBase):
            return "recurrent layers cannot be compiled"
    return ""


def check_compiler() -> None:
    """Compiles one line.

    Raises:
        SimulationError: there is no C++ compiler that works.
    """
    from torch._inductor import config  # noqa: PLC0415 - seconds

    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)  # "No CUDA runtime is found"
    try:
        # Not as an option of `compile`, which PyTorch 2.11 refuses.
        with config.patch(force_disable_caches=True), warnings.catch_warnings(action="ignore"):
            torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(1))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise SimulationError(
            f"the backend compiled needs a C++ compiler that works ({reason}): install one, or use --backend loop"
        ) from error
    finally:
        logger.setLevel(level)
