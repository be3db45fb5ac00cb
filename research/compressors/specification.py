"""The run specification of a compressor: whose Jacobians it compresses, and to what size."""

from typing import Literal

from pydantic import BaseModel, Field


class CompressorSpecification(BaseModel, extra="forbid", frozen=True):
    """One run. research/README.md describes the keys.

    Attributes:
        task: a task with several objectives.
        rounds: draws of minibatches, and of the sketch's own random numbers.
        clients: of whom every one sends a sketch, `partition` deals their data.
        batch: samples in the minibatch of a Jacobian.
        steps: of SGD, with the mean of the objectives, before the Jacobians are computed.
        learning_rate: of these steps.
        classes: the objectives are the classes of the first label, each against the rest, instead of the task's own.
    """

    name: str
    seed: int = Field(ge=0)
    task: str
    sketch: Literal["count", "svd", "svd-two-way", "top-k", "mask", "gram", "exact"]
    budget: float = Field(1.0, gt=0)
    rounds: int = Field(5, ge=1)
    clients: int = Field(10, ge=1)
    partition: str = "dirichlet:0.3"
    batch: int = Field(128, ge=1)
    steps: int = Field(0, ge=0)
    learning_rate: float = Field(0.1, gt=0)
    classes: bool = False
