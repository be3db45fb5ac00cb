"""Local training: as work asks for it, and as the section `[train]` of a run specification describes it."""

from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from federation.spec.problems import Section
from federation.spec.run_sections import BelowOne, Count, Natural, NotNegative, Positive, Seconds
from federation.spec.schedules import Schedule, Shape

_ADAM = ("optimizer", ("adam", "adamw"))
_DECAY = Field(0.1, gt=0, le=1, description="the factor of each reduction")
_WARM_UP = "in which the learning rate rises linearly at first"


class LocalSgd(Section):
    """Local training. A TrainWork has the same fields; `[train]` has them, and those of the run.

    The optimiser starts afresh in each training, the buffer of momentum at zero. `beta1`, `beta2` and `epsilon` are
    those of torch.optim.Adam (Kingma and Ba, 2015; Loshchilov and Hutter, 2019).
    """

    epochs: Natural = Field(1, description="passes over the training split; not together with `steps`")
    steps: Natural = Field(0, description="optimiser steps, in place of `epochs`")
    batch_size: Natural = Field(10, description="samples in a minibatch; 0 is the whole split")
    micro_batch: Natural = Field(0, description="samples of one pass (gradient accumulation); 0 is the whole minibatch")
    learning_rate: NotNegative
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="the optimiser; its state is not kept between trainings"
    )
    momentum: BelowOne = 0.0
    beta1: BelowOne = Field(0.9, description="the share of the mean gradient that is kept in each step")
    beta2: BelowOne = Field(0.999, description="the share of the mean squared gradient that is kept in each step")
    epsilon: Positive = Field(1e-8, description="the number that is added to the root of the mean squared gradient")
    weight_decay: NotNegative = Field(0.0, description="the L2 penalty; with adamw, the decay of the parameters")
    proximal_mu: NotNegative = Field(0.0, description="mu of the proximal term (FedProx, MGDA-Prox)")
    clip_norm: NotNegative = Field(
        0.0, description="the largest norm of a step's gradient, before decay and the proximal term; 0: no limit"
    )
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32", description="mixed precision of the forward and backward passes; fp16 needs CUDA"
    )
    step_schedule: Shape = Field(
        "constant", description="the schedule of the learning rate over the steps of each training"
    )
    step_warm_up: Natural = Field(0, description=f"steps {_WARM_UP}")
    step_decay: float = _DECAY
    step_decay_every: Count = Field(1, description="steps between two reductions")

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

    learning_rate: Positive = 0.1
    wire_dtype: Literal["float32", "bf16"] = Field(
        "float32", description="the number format of updates as members send them; bf16 has half as many bytes"
    )
    round_schedule: Shape = Field(
        "constant", description="the schedule of the learning rate over the rounds of the run"
    )
    round_warm_up: Natural = Field(0, description=f"rounds {_WARM_UP}")
    round_decay: float = _DECAY
    round_decay_every: Count = Field(1, description="rounds between two reductions")
    measure: bool = Field(
        True, description="whether clients first measure the round's model on the training split: losses, `improved`"
    )
    deadline_seconds: Seconds = Field(3600.0, description="later replies are refused")

    def rate(self, number: int, rounds: int) -> float:
        """The learning rate of a round, from 0, of a run of this many rounds."""
        schedule = Schedule(
            shape=self.round_schedule,
            warm_up=self.round_warm_up,
            decay=self.round_decay,
            decay_every=self.round_decay_every,
        )
        return self.learning_rate * schedule.factor(number, rounds)
