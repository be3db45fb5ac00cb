"""Server optimisers: what makes the server's step from a direction, and what it remembers from round to round.

The direction g = c U is gradient-like: the new model is w - rate * step. In Reddi et al., 2021 ("Adaptive Federated
Optimization", Algorithm 2), Delta is a change of the model, and is added: g = -Delta throughout, and so are the first
moments; the second moments are the same.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from coordinator.aggregation.rules import HyperparameterError, Vector


@dataclass(frozen=True, kw_only=True)
class Optimiser(ABC):
    """Works element by element, on float64 blocks of the direction and of its state vectors (d,), float32 on disk.

    Attributes:
        slots: the names of the state vectors.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def initial(self, slot: str) -> float:
        """What every element of a state vector is before the first step."""
        return 0.0

    @abstractmethod
    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """The step for a block of the direction.

        Args:
            direction: a block of it.
            slots: the same block of each state vector.

        Returns:
            The step, and the state vectors after it; the arguments are not changed.
        """


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimiser):
    """The step is the direction."""

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """See the class."""
        return direction, {}


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimiser):
    """Heavy ball (FedAvgM; Hsu et al., 2019): v <- beta1 v + g, and the step is v."""

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    beta1: float = 0.9

    def __post_init__(self) -> None:
        _must_be_a_decay("beta1", self.beta1)

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """See the class."""
        momentum = self.beta1 * slots["momentum"] + direction
        return momentum, {"momentum": momentum}


@dataclass(frozen=True, kw_only=True)
class Adaptive(Optimiser):
    """m <- beta1 m + (1 - beta1) g, and the step is m / (sqrt(v) + tau); v is what they differ in.

    Without bias correction: m begins at 0 and v at tau^2, as in Algorithm 2.
    """

    slots: ClassVar[tuple[str, ...]] = ("first", "second")

    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _must_be_a_decay("beta1", self.beta1)
        if not (math.isfinite(self.tau) and self.tau > 0):
            raise HyperparameterError(f"tau must be finite and positive; got {self.tau!r}")

    def initial(self, slot: str) -> float:
        """See the base."""
        return self.tau**2 if slot == "second" else 0.0

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """See the class."""
        first = self.beta1 * slots["first"] + (1 - self.beta1) * direction
        second = self.second(slots["second"], direction**2)
        return first / (np.sqrt(second) + self.tau), {"first": first, "second": second}

    @abstractmethod
    def second(self, before: Vector, square: Vector) -> Vector:
        """The second moment after a direction whose elements have these squares."""


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Adaptive):
    """v <- v + g^2."""

    def second(self, before: Vector, square: Vector) -> Vector:
        """See the class."""
        return before + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) g^2."""

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _must_be_a_decay("beta2", self.beta2)

    def second(self, before: Vector, square: Vector) -> Vector:
        """See the class."""
        return self.beta2 * before + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """v <- v - (1 - beta2) g^2 sign(v - g^2)."""

    def second(self, before: Vector, square: Vector) -> Vector:
        """See the class."""
        after: Vector = before - (1 - self.beta2) * square * np.sign(before - square)
        return after


@dataclass(frozen=True, kw_only=True)
class FedFaMomentum(Optimiser):
    """The momentum of FedFa (Huang et al., 2020): v <- gamma v + (1 - gamma) g, and the step is g +- eta v.

    "minus" is what the public implementations do, w' - eta v with v a mean of changes of the model: it brakes, in the
    long run to (1 - eta) of the direction. "plus" accelerates, to (1 + eta).
    """

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    gamma: float = 0.5
    eta: float = 0.1
    sign: str = "minus"

    def __post_init__(self) -> None:
        _must_be_a_decay("gamma", self.gamma)
        if not (math.isfinite(self.eta) and self.eta >= 0):
            raise HyperparameterError(f"eta must be finite and not negative; got {self.eta!r}")
        if self.sign not in ("minus", "plus"):
            raise HyperparameterError(f'sign must be "minus" or "plus"; got {self.sign!r}')

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """See the class."""
        momentum = self.gamma * slots["momentum"] + (1 - self.gamma) * direction
        rate = self.eta if self.sign == "plus" else -self.eta
        return direction + rate * momentum, {"momentum": momentum}


OPTIMISERS: Mapping[str, type[Optimiser]] = MappingProxyType(
    {"sgd": Sgd, "momentum": Momentum, "adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}
)


def _must_be_a_decay(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise HyperparameterError(f"{name} must lie in [0, 1); got {value!r}")
