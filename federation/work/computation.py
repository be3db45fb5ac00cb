"""What work needs of a client's model and data. A worker computes one at a time; a simulation many at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf, isfinite
from typing import Any

import numpy as np

from federation.accounting import LEAST_NOISE, Mechanism
from federation.objectives import Targets
from federation.vectors import Vector

SPLITS = ("train", "validation", "test")


class Ability(StrEnum):
    """What a trainer may be able to do, besides training on one loss and evaluating models."""

    WEIGHTS = "weights"  # train on a weighted sum of objectives, or on a loss with a weight other than 1
    GRADIENTS = "gradients"  # give the gradient of each objective, and make the first step of training from them
    PROXIMAL = "proximal"  # add the term of FedProx to the loss (train.proximal_mu)
    FROZEN = "frozen"  # leave some parameters as they are (parameters.frozen)
    NOISE = "noise"  # add noise to the gradient of each sample (DP-SGD)
    REPEATABLE = "repeatable"  # give the same bytes for the same computation, also after a restart


CANNOT: Mapping[Ability, str] = {
    Ability.WEIGHTS: "cannot train on a weighted sum of objectives",
    Ability.GRADIENTS: "cannot give gradients",
    Ability.PROXIMAL: "cannot add a proximal term (train.proximal_mu)",
    Ability.FROZEN: "cannot leave some parameters as they are (parameters.frozen)",
    Ability.NOISE: "cannot add noise to the gradients of samples",
    Ability.REPEATABLE: "cannot repeat its work with the same result",
}
"""What a trainer without an ability cannot do, in words."""


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Local SGD, as the `[train]` section of a run specification and a TrainWork put it.

    Attributes:
        epochs: passes over the training split, reshuffled each; 0 when `steps` counts.
        steps: optimiser steps, across passes; 0 when `epochs` counts.
        batch_size: samples in a minibatch, the last one of a pass may be shorter; 0 is the whole split.
        learning_rate: eta_l.
        proximal_mu: mu of the term mu/2 |w - w_t|^2 (FedProx).
        momentum: of heavy-ball SGD; its buffer starts at zero.
        weight_decay: L2 penalty.

    Raises:
        ValueError: both or neither of epochs and steps, or a number out of range.
    """

    epochs: int = 0
    steps: int = 0
    batch_size: int = 0
    learning_rate: float
    proximal_mu: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if min(self.epochs, self.steps, self.batch_size) < 0 or (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either epochs or steps; got epochs = {self.epochs}, steps = {self.steps}")
        rates = (self.learning_rate, self.proximal_mu, self.momentum, self.weight_decay)
        if not (all(map(isfinite, rates)) and min(rates) >= 0 and self.momentum < 1):
            raise ValueError(f"learning_rate, proximal_mu, momentum, weight_decay = {rates}: a rate is out of range")

    @classmethod
    def of(cls, settings: Any) -> "LocalSgd":
        """From a specification's `[train]` or a TrainWork, which have fields of the same names."""
        return cls(**{item.name: getattr(settings, item.name) for item in fields(cls)})

    def count(self, samples: int) -> int:
        """The number of optimiser steps on a training split of this many samples."""
        return self.steps or self.epochs * -(-samples // (self.batch_size or samples))

    def rate(self, samples: int) -> float:
        """The part of a training split of this many samples that is in a minibatch."""
        return min(1.0, self.batch_size / samples) if self.batch_size else 1.0


@dataclass(frozen=True, kw_only=True)
class PrivateSgd:
    """Noise on the gradients of local SGD: DP-SGD (Abadi et al., 2016, algorithm 1).

    Attributes:
        noise: sigma, the standard deviation of the noise on a sum of gradients as a multiple of `clip`; at least
            `LEAST_NOISE`.
        clip: C, the norm to which the gradient of each sample is clipped.

    Raises:
        ValueError: a number out of range.
    """

    noise: float
    clip: float

    def __post_init__(self) -> None:
        if not (LEAST_NOISE <= self.noise < inf and 0 < self.clip < inf):
            raise ValueError(
                f"noise on gradients: sigma = {self.noise:g}, clip = {self.clip:g}; sigma is at least {LEAST_NOISE}, "
                "clip above 0"
            )

    def with_floor(self, floor: "PrivateSgd") -> "PrivateSgd":
        """The stricter of both: more noise, and the smaller bound on a sample."""
        return PrivateSgd(noise=max(self.noise, floor.noise), clip=min(self.clip, floor.clip))

    def mechanism(self, sgd: LocalSgd, samples: int, rows: int) -> Mechanism:
        """What local SGD releases of this number of training samples, once for each of the update's rows."""
        return Mechanism(self.noise, sgd.rate(samples), sgd.count(samples) * rows)


@dataclass(frozen=True, kw_only=True)
class Descend:
    """Local SGD from the base model, once for each target: a row w_t - w, (d,), for each.

    Attributes:
        sgd: how.
        targets: what the rows descend.
        from_jacobian: the first step is made of the gradients that `Differentiate` gives.
        measure: measure the base model on the whole training split before.
        idle: measure, and make no step: rows of zeros. Attackers that do not train ask for it.
        secret_seed: of minibatches and dropout, in place of one that follows from the run's seed; 0 to 2^63 - 1.
        private: the noise on the gradients; None is no noise.
        frozen: the columns of the model that stay as they are.
    """

    sgd: LocalSgd
    targets: Targets = field(hash=False)
    from_jacobian: bool = False
    measure: bool = True
    idle: bool = False
    secret_seed: int | None = None
    private: PrivateSgd | None = None
    frozen: tuple[slice, ...] = field(default=(), hash=False)

    def needs(self) -> frozenset[Ability]:
        """The abilities that a trainer needs for it."""
        alone = all(tuple(weights.values()) == (1.0,) for weights in self.targets.values())
        wanted = {
            Ability.WEIGHTS: not alone,
            Ability.GRADIENTS: self.from_jacobian,
            Ability.PROXIMAL: self.sgd.proximal_mu > 0,
            Ability.FROZEN: bool(self.frozen),
            Ability.NOISE: self.private is not None,
        }
        return frozenset() if self.idle else frozenset(name for name, needed in wanted.items() if needed)


@dataclass(frozen=True, kw_only=True)
class Differentiate:
    """The gradient of each of the client's objectives at the base model on its first minibatch: a row (d,) for each.

    Attributes:
        batch_size: samples in the minibatch; 0 is the whole training split.
        measure: measure the base model on the whole training split first.
        secret_seed: as of `Descend`.
        again: they must be the gradients of an earlier phase of the round.
    """

    batch_size: int
    measure: bool = True
    secret_seed: int | None = None
    again: bool = False

    def needs(self) -> frozenset[Ability]:
        """The abilities that a trainer needs for it."""
        return frozenset({Ability.GRADIENTS, Ability.REPEATABLE} if self.again else {Ability.GRADIENTS})


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Loss, accuracy and these metrics of the task of the base model on some of the client's splits; no rows."""

    splits: tuple[str, ...]
    metrics: tuple[str, ...] = ()

    def needs(self) -> frozenset[Ability]:
        """None: every trainer can evaluate."""
        return frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasureAlong:
    """The loss on the whole training split of several models along one direction: metrics, no rows.

    Attributes:
        direction: d, of the model's parameters; the averaged buffers after them stay as they are.
        steps: s_k; the models are w_t - s_k d.
        names: of the metrics, one for each step.
    """

    direction: Vector
    steps: tuple[float, ...]
    names: tuple[str, ...]

    def needs(self) -> frozenset[Ability]:
        """None: every trainer can evaluate."""
        return frozenset()

    def models(self, base: Vector) -> Iterator[tuple[str, Vector]]:
        """Each model by the name of its metric, from w_t, (d,); none that is not finite, which has no loss."""
        for name, step in zip(self.names, self.steps, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                moved = base[: len(self.direction)] - np.float32(step) * self.direction
                model: Vector = np.append(moved, base[len(self.direction) :])
            if np.isfinite(model).all():
                yield name, model


def training_losses(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What `MeasureAlong` comes to: the losses on the training split that are finite, by the name of their metric."""
    return {name: found["train/loss"] for name, found in metrics.items() if "train/loss" in found}


AtBase = Descend | Differentiate | Measure
Computation = AtBase | MeasureAlong
