"""Server optimisers: they make the server's step from a direction, and keep state vectors from round to round.

The direction g = c U is gradient-like: the new model is w - rate * step. In Reddi et al., 2021 ("Adaptive Federated
Optimization", Algorithm 2), Delta is a change of the model, and is added: g = -Delta throughout, and so are the first
moments; the second moments are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from federation.aggregation.interface import HyperparameterError, Vector
from federation.spec.options import Options, option


@dataclass(frozen=True, kw_only=True)
class Optimizer(Options, ABC):
    """Works element by element, on float64 blocks of the direction and of its state vectors (d,), float32 on disk.

    Attributes:
        slots: the names of the state vectors.
    """

    refusal = HyperparameterError
    slots: ClassVar[tuple[str, ...]] = ()

    def initial(self, slot: str) -> float:
        """The value of every element of a state vector before the first step."""
        return 0.0

    @abstractmethod
    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        """The step for a block of the direction and the same block of each state vector, and these blocks after it."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """The step is the direction."""

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        return direction, {}


@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """Heavy ball (FedAvgM; Hsu et al., 2019): v <- beta1 v + g, and the step is v."""

    slots = ("momentum",)

    beta1: float = option(0.9, "the decay of the momentum", "[0, 1)")

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        momentum = self.beta1 * slots["momentum"] + direction
        return momentum, {"momentum": momentum}


@dataclass(frozen=True, kw_only=True)
class Adaptive(Optimizer):
    """m <- beta1 m + (1 - beta1) g, and the step is m / (sqrt(v) + tau); subclasses define v.

    Without bias correction: m begins at 0 and v at tau^2, as in Algorithm 2.
    """

    slots = ("first", "second")

    beta1: float = option(0.9, "the decay of the first moments", "[0, 1)")
    tau: float = option(1e-3, "the adaptivity: smaller is more", "(0, inf)")

    def initial(self, slot: str) -> float:
        return self.tau**2 if slot == "second" else 0.0

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
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
        return before + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(Adaptive):
    """v <- beta2 v + (1 - beta2) g^2."""

    beta2: float = option(0.99, "the decay of the second moments", "[0, 1)")

    def second(self, before: Vector, square: Vector) -> Vector:
        return self.beta2 * before + (1 - self.beta2) * square


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """v <- v - (1 - beta2) g^2 sign(v - g^2)."""

    def second(self, before: Vector, square: Vector) -> Vector:
        after: Vector = before - (1 - self.beta2) * square * np.sign(before - square)
        return after


@dataclass(frozen=True, kw_only=True)
class FedFaMomentum(Optimizer):
    """The momentum of FedFa (Huang et al., 2020): v <- gamma v + (1 - gamma) g, and the step is g +- eta v.

    The public implementations do "minus", w' - eta v with v a mean of changes of the model: it brakes, in the long run
    to (1 - eta) of the direction. "plus" accelerates, to (1 + eta). The options are those of `FedFa`.
    """

    slots = ("momentum",)

    gamma: float = 0.5
    eta: float = 0.1
    sign: Literal["minus", "plus"] = "minus"

    def apply(self, direction: Vector, slots: Mapping[str, Vector]) -> tuple[Vector, dict[str, Vector]]:
        momentum = self.gamma * slots["momentum"] + (1 - self.gamma) * direction
        rate = self.eta if self.sign == "plus" else -self.eta
        return direction + rate * momentum, {"momentum": momentum}


OPTIMIZERS: Mapping[str, type[Optimizer]] = MappingProxyType(
    {"sgd": Sgd, "momentum": Momentum, "adam": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}
)
