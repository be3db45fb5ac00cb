"""Local training: as work asks for it, and as the section `[train]` of a run specification describes it."""

from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from federation.spec.problems import Section
from federation.spec.run_sections import BelowOne, Count, Natural, NotNegative, Positive, Seconds
from federation.spec.schedules import Schedule, Shape

_ADAM = ("optimizer", ("adam", "adamw"))


class LocalSgd(Section):
    """Local training. A TrainWork has the same fields; `[train]` has them, and those of the run.

    The optimiser starts afresh in each training, the buffer of momentum at zero. `beta1`, `beta2` and `epsilon` are
    those of torch.optim.Adam (Kingma and Ba, 2015; Loshchilov and Hutter, 2019).
    """

    epochs: Natural = Field(1, description="Passes over the client's training split. Not together with `steps`.")
    steps: Natural = Field(0, description="Optimiser steps, in place of `epochs`.")
    batch_size: Natural = Field(
        10,
        description="Samples in a minibatch; 0 is the whole split. The last minibatch of a pass may have fewer; for "
        "[models with BatchNorm](research/personal-parameters.md#small-minibatches-and-batchnorm) it is evened out.",
    )
    micro_batch: Natural = Field(
        0,
        description="Gradient accumulation: a minibatch passes through the model in parts of at most this number of "
        "samples, whose gradients are added up; 0 is the whole minibatch. It needs less memory, and changes only "
        "rounding if the loss is a mean over samples and the model does not mix them (BatchNorm normalises each "
        "part; use parts that are not too small).",
    )
    learning_rate: NotNegative
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description='`"sgd"`, `"adam"` or `"adamw"`, as in `torch.optim`.'
    )
    momentum: BelowOne = Field(0.0, description="The momentum, at least 0 and less than 1.")
    beta1: BelowOne = Field(0.9, description="The share of the mean gradient that is kept in each step.")
    beta2: BelowOne = Field(
        0.999,
        description="The share of the mean squared gradient that is kept in each step.",
    )
    epsilon: Positive = Field(
        1e-8,
        description="The number that is added to the root of the mean squared gradient.",
    )
    weight_decay: NotNegative = Field(
        0.0,
        description='The L2 penalty. With `"adamw"`, each step multiplies the parameters by `1 - learning_rate * '
        "weight_decay` instead.",
    )
    proximal_mu: NotNegative = Field(
        0.0, description="mu of the proximal term `mu/2 ‖w - w_t‖²` (FedProx); 0 leaves it out."
    )
    clip_norm: NotNegative = Field(
        0.0,
        description="The largest norm of the gradient of a step: a longer one is shortened, before `weight_decay` "
        "and `proximal_mu` are applied. 0 is any length.",
    )
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32",
        description='`"bf16"` or `"fp16"` is mixed precision (`torch.autocast`) in training; parameters, gradients, '
        'steps and measurements stay float32. `"float32"` is not rounded to TF32 on a GPU. `"fp16"` scales the loss, '
        "so the first steps may be left out until the scale fits. It needs CUDA; workers without it decline with "
        "[`precision`](reference/reasons.md#reasons-of-a-worker).",
    )
    step_schedule: Shape = Field(
        "constant",
        description='How the rate of the round changes over the steps of each training: `"constant"`, `"decay"` or '
        '`"cosine"`.',
    )
    step_warm_up: Natural = Field(0, description="The number of steps in which the rate rises linearly at first.")
    step_decay: float = Field(0.1, gt=0, le=1, description="The factor of each reduction.")
    step_decay_every: Count = Field(1, description="The steps between two reductions.")

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_epochs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("steps") and "epochs" not in data:
            return {**data, "epochs": 0}
        return data

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either epochs or steps, not epochs = {self.epochs} and steps = {self.steps}")
        return self

    def changed(self, **values: Any) -> "LocalSgd":
        """The same training with other values. Raises ValueError as of `from_values`."""
        return LocalSgd.from_values({name: getattr(self, name) for name in LocalSgd.model_fields} | values)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the learning rate over the steps."""
        return Schedule(
            shape=self.step_schedule,
            warm_up=self.step_warm_up,
            decay=self.step_decay,
            decay_every=self.step_decay_every,
        )

    @property
    def plain(self) -> bool:
        """True if each step goes the same rate along a gradient: SGD with a constant rate."""
        return self.optimizer == "sgd" and self.schedule.flat

    @property
    def bare(self) -> bool:
        """True if each step subtracts the gradient times one rate, and nothing else: see `Ability.OPTIMIZERS`."""
        return self.plain and self.momentum == self.weight_decay == self.clip_norm == 0

    def without_noise(self) -> str:
        """The reason why it cannot be combined with noise on the gradients of samples; empty if it can."""
        if self.clip_norm:
            return "clip_norm: the gradient of each sample is clipped already; leave it out"
        if self.micro_batch:
            return "micro_batch: gradients are made sample by sample anyway; leave it out"
        if self.precision != "float32":
            return f'precision = "{self.precision}": gradients that get noise are made in "float32"'
        return ""

    def count(self, samples: int) -> int:
        """The number of optimiser steps on a training split of this many samples."""
        return self.steps or self.epochs * -(-samples // (self.batch_size or samples))

    def sampling_rate(self, samples: int) -> float:
        """The part of a training split of this many samples that is in a minibatch."""
        return min(1.0, self.batch_size / samples) if self.batch_size else 1.0


class TrainSpec(LocalSgd):
    """Local training at each selected client."""

    takers = {  # noqa: RUF012 - a ClassVar of the base
        "momentum": ("optimizer", ("sgd",)),
        "beta1": _ADAM,
        "beta2": _ADAM,
        "epsilon": _ADAM,
        "round_decay": ("round_schedule", ("decay",)),
        "round_decay_every": ("round_schedule", ("decay",)),
        "step_decay": ("step_schedule", ("decay",)),
        "step_decay_every": ("step_schedule", ("decay",)),
    }

    learning_rate: Positive = Field(0.1, description="The learning rate of the local training.")
    wire_dtype: Literal["float32", "bf16"] = Field(
        "float32",
        description='The number format in which members send updates: `"float32"`, or '
        '[`"bf16"`](reference/run-spec.md#updates-in-bfloat16) with half as many bytes.',
    )
    round_schedule: Shape = Field(
        "constant",
        description='How the learning rate changes over the rounds of the run: `"constant"`, `"decay"` or `"cosine"`.',
    )
    round_warm_up: Natural = Field(0, description="The number of rounds in which the rate rises linearly at first.")
    round_decay: float = Field(0.1, gt=0, le=1, description="The factor of each reduction.")
    round_decay_every: Count = Field(1, description="The rounds between two reductions.")
    measure: bool = Field(
        True,
        description="Whether clients measure the round's model on their whole training split before they train. "
        "Without it rounds are shorter, but `improved` and the losses before a step are not known. Algorithms that "
        "read losses need it.",
    )
    deadline_seconds: Seconds = Field(
        3600.0, description="A reply that arrives later is refused with [`deadline`](reference/reasons.md#replies)."
    )

    def rate(self, number: int, rounds: int) -> float:
        """The learning rate of a round, from 0, of a run of this many rounds."""
        schedule = Schedule(
            shape=self.round_schedule,
            warm_up=self.round_warm_up,
            decay=self.round_decay,
            decay_every=self.round_decay_every,
        )
        return self.learning_rate * schedule.factor(number, rounds)
