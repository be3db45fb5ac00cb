"""The computations that work needs of a client's model and data. A worker does one at a time; a simulation many."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from math import inf, isfinite
from typing import Any

import numpy as np

from federation.spec.accounting import LEAST_NOISE, Mechanism
from federation.spec.objective_names import Targets
from federation.spec.schedules import Schedule
from federation.vectors import Vector

SPLITS = ("train", "validation", "test")
OPTIMIZERS = ("sgd", "adam", "adamw")
PRECISIONS = ("float32", "bf16", "fp16")


class Ability(StrEnum):
    """The optional abilities of a trainer, besides training on one loss and evaluating models."""

    WEIGHTS = "weights"  # train on a weighted sum of objectives, or on a loss with a weight other than 1
    GRADIENTS = "gradients"  # give the gradient of each objective, and make the first step of training from them
    OPTIMIZERS = "optimizers"  # do more than plain SGD: momentum, Adam, weight decay, clip_norm, other rates by step
    PROXIMAL = "proximal"  # add the term of FedProx to the loss (train.proximal_mu)
    FROZEN = "frozen"  # leave some parameters as they are (parameters.frozen)
    NOISE = "noise"  # add noise to the gradient of each sample (DP-SGD)
    REPEATABLE = "repeatable"  # give the same bytes for the same computation, also after a restart


CANNOT: Mapping[Ability, str] = {
    Ability.WEIGHTS: "cannot train on a weighted sum of objectives",
    Ability.GRADIENTS: "cannot give gradients",
    Ability.OPTIMIZERS: "cannot train with more than plain SGD (train.optimizer, momentum, weight_decay, clip_norm, "
    "step_schedule)",
    Ability.PROXIMAL: "cannot add a proximal term (train.proximal_mu)",
    Ability.FROZEN: "cannot leave some parameters as they are (parameters.frozen)",
    Ability.NOISE: "cannot add noise to the gradients of samples",
    Ability.REPEATABLE: "cannot repeat its work with the same result",
}
"""The text for a trainer without an ability."""


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Local training, as the `[train]` section of a run specification and a TrainWork put it.

    Attributes:
        epochs: passes over the training split, each reshuffled; 0 if `steps` counts.
        steps: optimiser steps, across passes; 0 if `epochs` counts.
        batch_size: samples in a minibatch, the last one of a pass may be shorter; 0 is the whole split.
        micro_batch: samples of a minibatch that are in memory at a time; 0 is all of them. It changes nothing but
            rounding, where a loss is a mean over samples.
        learning_rate: eta_l, of this round.
        optimizer: "sgd", "adam" (Kingma and Ba, 2015) or "adamw" (Loshchilov and Hutter, 2019). It starts afresh in
            each training.
        proximal_mu: mu of the term mu/2 |w - w_t|^2 (FedProx).
        momentum: of heavy-ball SGD; its buffer starts at zero.
        beta1, beta2, epsilon: of Adam, as torch.optim.Adam has them.
        weight_decay: L2 penalty; for "adamw", each step first multiplies w by 1 - eta_l * weight_decay.
        clip_norm: the largest norm of a step's gradient, before decay and the proximal term are added; 0 is any.
        precision: of the forward and backward passes: "float32", or "bf16" or "fp16" where torch.autocast uses them.
        step_schedule, step_warm_up, step_decay, step_decay_every: of the learning rate over the steps; see `Schedule`.

    Raises:
        ValueError: both or neither of epochs and steps, a number out of range, or a name that does not exist.
    """

    epochs: int = 0
    steps: int = 0
    batch_size: int = 0
    micro_batch: int = 0
    learning_rate: float
    optimizer: str = "sgd"
    proximal_mu: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    precision: str = "float32"
    step_schedule: str = "constant"
    step_warm_up: int = 0
    step_decay: float = 0.1
    step_decay_every: int = 1

    def __post_init__(self) -> None:
        whole = (self.epochs, self.steps, self.batch_size, self.micro_batch)
        if min(whole) < 0 or (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either epochs or steps; got epochs = {self.epochs}, steps = {self.steps}")
        rates = (self.learning_rate, self.proximal_mu, self.weight_decay, self.clip_norm)
        shares = (self.momentum, self.beta1, self.beta2)
        if not (all(map(isfinite, rates)) and min(rates) >= 0 and all(0 <= share < 1 for share in shares)):
            raise ValueError(
                f"learning_rate, proximal_mu, weight_decay, clip_norm = {rates}, momentum, beta1, beta2 = {shares}: "
                "a rate is out of range"
            )
        if not 0 < self.epsilon < inf:
            raise ValueError(f"epsilon = {self.epsilon:g} is out of range")
        for name, choices in ((self.optimizer, OPTIMIZERS), (self.precision, PRECISIONS)):
            if name not in choices:
                raise ValueError(f"no {name!r}: there are {', '.join(choices)}")
        self.schedule  # noqa: B018 - its errors

    @classmethod
    def of(cls, settings: Any) -> "LocalSgd":
        """Reads a specification's `[train]` or a TrainWork, which have fields of the same names."""
        return cls(**{item.name: getattr(settings, item.name) for item in fields(cls)})

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
        """True if each step subtracts the gradient times one rate, and nothing else: see `Ability.OPTIMISERS`."""
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

    def rate(self, samples: int) -> float:
        """The part of a training split of this many samples that is in a minibatch."""
        return min(1.0, self.batch_size / samples) if self.batch_size else 1.0


@dataclass(frozen=True, kw_only=True)
class PrivateSgd:
    """Noise on the gradients of local training: DP-SGD (Abadi et al., 2016, algorithm 1).

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
        """The mechanism that local SGD applies to this number of training samples, once for each row of the update."""
        return Mechanism(self.noise, sgd.rate(samples), sgd.count(samples) * rows)


@dataclass(frozen=True, kw_only=True)
class NoisyTraining:
    """Training with noise that work asks for: `sgd` makes each of the update's `rows` with the noise of `private`."""

    private: PrivateSgd
    sgd: LocalSgd
    rows: int

    def mechanism(self, samples: int) -> Mechanism:
        """The mechanism that it applies to this number of training samples."""
        return self.private.mechanism(self.sgd, samples, self.rows)


@dataclass(frozen=True, kw_only=True)
class Descend:
    """Local training from the base model, once for each target: a row w_t - w, (d,), for each.

    Attributes:
        sgd: the local training.
        targets: the objectives that the rows descend.
        from_jacobian: the first step uses the gradients of `Differentiate`.
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
        conditions = {
            Ability.WEIGHTS: not alone,
            Ability.GRADIENTS: self.from_jacobian,
            Ability.OPTIMIZERS: not self.sgd.bare,
            Ability.PROXIMAL: self.sgd.proximal_mu > 0,
            Ability.FROZEN: bool(self.frozen),
            Ability.NOISE: self.private is not None,
        }
        return frozenset() if self.idle else frozenset(ability for ability, needed in conditions.items() if needed)


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
    """Loss, accuracy and these metrics of the task of the base model on some of the client's splits; no rows.

    `undefined` asks also for values that are not finite.
    """

    splits: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    undefined: bool = False

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
    """The result of `MeasureAlong`: the finite losses on the training split, by the name of their metric."""
    return {name: values["train/loss"] for name, values in metrics.items() if "train/loss" in values}


AtBase = Descend | Differentiate | Measure
Computation = AtBase | MeasureAlong
