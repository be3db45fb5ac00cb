"""The run specification of an attack: the federation, what the coordinator sees, and what it guesses."""

from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator


class View(StrEnum):
    """What the coordinator sees."""

    NOTHING = "nothing"
    RANDOM = "random"
    BIAS = "bias"
    UPDATE = "update"
    SKETCH = "sketch"
    GRAM = "gram"
    PRIVATE = "private"
    DIFFERENCE = "difference"
    NEXT = "next"


class LocalTraining(BaseModel, extra="forbid", frozen=True):
    """Local training by SGD: `steps` random minibatches of `batch` samples."""

    steps: int = Field(9, ge=1)
    batch: int = Field(16, ge=1)
    learning_rate: float = Field(0.1, gt=0)
    clip: float = Field(1.0, gt=0)
    delta: float = Field(1e-5, gt=0, lt=1)


class LeakageSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. research/README.md describes the keys.

    Attributes:
        rounds: rounds of training before the attack on a trained model.
        members: of the federation; the last `colluders_at_most` of them are not attacked, since they may collude.
        alpha: of the Dirichlet distribution of labels.
        shadow: labelled samples of the coordinator.
        shadow_clients: clients that the coordinator makes of these.
        sessions: consecutive rounds that the coordinator reads together.
        rows: k of the sketch.
        probes: vectors of the coordinator in a Gram matrix without noise.
        colluders: members that give the coordinator their secrets, and submit vectors of its choice.
        equal_weights: all coefficients are equal (mode `sum`); otherwise they are those of FedMGDA+.
        epsilon: of one round, with DP-SGD; None is without.
        batch: images in the client's one gradient.
        iterations: of gradient inversion.
    """

    name: str
    seed: int
    task: Literal["digits"] = "digits"
    attack: Literal["labels", "images"]
    view: View
    rounds: int = Field(10, ge=1)
    trained: bool = False
    sessions: int = Field(1, ge=1, le=4)
    members: int = Field(10, ge=5, le=100)
    colluders_at_most: int = Field(3, ge=0)
    alpha: float = Field(0.3, gt=0)
    shadow: int = Field(360, ge=20)
    shadow_clients: int = Field(300, ge=20)
    train: LocalTraining = LocalTraining()
    rows: int = Field(1024, ge=1)
    probes: int = Field(0, ge=0)
    colluders: int = Field(0, ge=0)
    equal_weights: bool = False
    epsilon: float | None = Field(None, gt=0)
    batch: int = Field(1, ge=1)
    restarts: int = Field(4, ge=1)
    iterations: int = Field(300, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.colluders > self.colluders_at_most:
            raise ValueError(f"colluders: at most {self.colluders_at_most}, got {self.colluders}")
        if 3 * self.colluders_at_most >= self.members:
            raise ValueError("colluders_at_most: fewer than a third of the members")
        if self.attack == "images" and self.view in (View.BIAS, View.GRAM, View.NEXT):
            raise ValueError(f"view: {self.view} is for labels")
        if self.epsilon is not None and self.view is not View.UPDATE:
            raise ValueError(f"epsilon: only with view {View.UPDATE}, got {self.view}")
        if self.sessions > 1 and (self.attack == "images" or self.view in (View.DIFFERENCE, View.NEXT)):
            raise ValueError(f"sessions: one, with attack {self.attack} and view {self.view}")
        return self
