"""Attacks of one client from its own update alone, or without any."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from federation.attacks.base import Attack, Matrix, Vector
from federation.spec.options import option

if TYPE_CHECKING:
    from federation.spec.objective_names import Targets


@dataclass(frozen=True)
class Inflation(Attack):
    """Scaling c u and c F, and bias F + b: a heavier update, a higher reported loss (Hu et al., 2022, FedMGDA+).

    Averages follow the scaled update; rules that weigh clients by their losses follow the bias.
    """

    name = ""

    scale: float = option(1.0, "multiplies the update and every reported loss")
    bias: float = option(0.0, "is added to every reported loss of the base model")

    def __str__(self) -> str:
        return super().__str__() or "scale=1"

    @property
    def stretch(self) -> float:
        return abs(self.scale) or 1.0

    def on_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        return {objective: self.scale * loss + self.bias for objective, loss in losses.items()}

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return own if self.scale == 1.0 else own * np.float32(self.scale)


@dataclass(frozen=True)
class LossScaling(Attack):
    """Trains on c f in place of its loss f, and reports c F (Hu et al., 2022, FedMGDA+).

    Each gradient of the loss is c times as long, so that local training takes other steps; proximal terms and weight
    decay are no part of the loss. With one local step this is the update c u but for rounding; with several it is not.
    """

    name = "loss-scaling"

    factor: float = option(10.0, "c, multiplies the loss that the client trains on and reports", "[1e-9, inf)")

    def on_targets(self, targets: "Targets") -> "Targets":
        return {
            row: {name: self.factor * weight for name, weight in weights.items()} for row, weights in targets.items()
        }

    def on_losses(self, losses: Mapping[str, float]) -> dict[str, float]:
        return {objective: self.factor * loss for objective, loss in losses.items()}

    def on_gradient(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return own * np.float32(self.factor)


@dataclass(frozen=True)
class SignFlip(Attack):
    """Ascends: -c u (Li et al., 2019, RSA)."""

    name = "sign-flip"

    scale: float = option(1.0, "c, multiplies the flipped update", "[0, inf)")

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return own * np.float32(-self.scale)


@dataclass(frozen=True)
class Gaussian(Attack):
    """Sends noise N(0, s^2 I) in place of an update (Blanchard et al., 2017, with s = 200)."""

    name = "gaussian"
    trains = False

    deviation: float = option(200.0, "s, standard deviation of every entry", "[1e-12, inf)")

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return _noise(len(own), self.deviation, seed)


@dataclass(frozen=True)
class ModelReplacement(Attack):
    """Replaces the common model by its own: w_adv = w + m delta (Bagdasaryan et al., 2020).

    With delta = w_i - w = -u this is the update -m delta = m u. Plain averaging over m clients turns it into w_i where
    the other clients have nearly converged. The client's data decides what its own model has learned.
    """

    name = "model-replacement"
    from_participants = "boost"

    boost: float = option(0.0, "multiplies the update; 0: m, the number of participants", "[0, inf)")

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return own * np.float32(self.boost or m)


@dataclass(frozen=True)
class FreeRider(Attack):
    """Takes part without work: noise as long as the global model's last change.

    After Lin et al. (2019) and Fraboni et al. (2021). An update of zeros would be refused.
    """

    name = "free-rider"
    trains = False

    deviation: float = option(
        1e-3, "standard deviation of every entry while the model has not changed yet", "[1e-12, inf)"
    )

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        size = float(np.linalg.norm(own.astype(np.float64))) / len(own) ** 0.5
        return _noise(len(own), size or self.deviation, seed)


@dataclass(frozen=True)
class NotANumber(Attack):
    """Sends NaN, to poison every sum that it enters."""

    name = "nan"
    trains = False
    value: ClassVar[float] = np.nan

    def on_update(self, own: Vector, *, peers: Matrix, m: int, seed: int) -> Vector:
        return np.full_like(own, self.value)


@dataclass(frozen=True)
class Infinite(NotANumber):
    """Sends infinities, to poison every sum that they enter."""

    name = "inf"
    value = np.inf


def _noise(d: int, deviation: float, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(d, dtype=np.float32) * np.float32(deviation)
