"""The section `[train]` of a run specification: the local training of each selected client."""

from typing import Any, Literal

from pydantic import Field, model_validator

from federation.spec.problems import Section
from federation.spec.run_sections import BelowOne, Count, Natural, NotNegative, Positive, Seconds
from federation.spec.schedules import Schedule, Shape

_ADAM = ("optimizer", ("adam", "adamw"))
_DECAY = Field(0.1, gt=0, le=1, description="the factor of each reduction")
_WARM_UP = "in which the learning rate rises linearly at first"


class TrainSpec(Section):
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

    epochs: Natural = Field(1, description="passes over the training split; not together with `steps`")
    steps: Natural = Field(0, description="optimiser steps, in place of `epochs`")
    batch_size: Natural = Field(10, description="samples in a minibatch; 0 is the whole split")
    micro_batch: Natural = Field(0, description="samples of one pass (gradient accumulation); 0 is the whole minibatch")
    learning_rate: Positive = 0.1
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="the optimiser; its state is not kept between trainings"
    )
    momentum: BelowOne = 0.0
    beta1: BelowOne = Field(0.9, description="the share of the mean gradient that is kept in each step")
    beta2: BelowOne = Field(0.999, description="the share of the mean squared gradient that is kept in each step")
    epsilon: Positive = Field(1e-8, description="the number that is added to the root of the mean squared gradient")
    weight_decay: NotNegative = Field(0.0, description="the L2 penalty; with adamw, the decay of the parameters")
    proximal_mu: NotNegative = Field(0.0, description="mu of the proximal term (FedProx, MGDA-Prox)")
    clip_norm: NotNegative = Field(0.0, description="the largest norm of the gradient of a step; 0: no limit")
    precision: Literal["float32", "bf16", "fp16"] = Field(
        "float32", description="mixed precision of the forward and backward passes; fp16 needs CUDA"
    )
    wire_dtype: Literal["float32", "bf16"] = Field(
        "float32", description="the number format of updates as members send them; bf16 has half as many bytes"
    )
    round_schedule: Shape = Field(
        "constant", description="the schedule of the learning rate over the rounds of the run"
    )
    round_warm_up: Natural = Field(0, description=f"rounds {_WARM_UP}")
    round_decay: float = _DECAY
    round_decay_every: Count = Field(1, description="rounds between two reductions")
    step_schedule: Shape = Field(
        "constant", description="the schedule of the learning rate over the steps of each training"
    )
    step_warm_up: Natural = Field(0, description=f"steps {_WARM_UP}")
    step_decay: float = _DECAY
    step_decay_every: Count = Field(1, description="steps between two reductions")
    measure: bool = Field(
        True, description="whether clients first measure the round's model on the training split: losses, `improved`"
    )
    deadline_seconds: Seconds = Field(3600.0, description="later replies are refused")

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_epochs(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("steps") and "epochs" not in data:
            return {**data, "epochs": 0}
        return data

    @model_validator(mode="after")
    def _one_measure(self) -> "TrainSpec":
        if (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either epochs or steps, not epochs = {self.epochs} and steps = {self.steps}")
        return self

    def rate(self, number: int, rounds: int) -> float:
        """The learning rate of a round, from 0, of a run of this many rounds."""
        schedule = Schedule(
            shape=self.round_schedule,
            warm_up=self.round_warm_up,
            decay=self.round_decay,
            decay_every=self.round_decay_every,
        )
        return self.learning_rate * schedule.factor(number, rounds)
