"""The computations that work needs of a client's model and data. A worker does one at a time; a simulation many."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np

from federation.spec.accounting import LEAST_NOISE, Mechanism
from federation.spec.objective_names import Targets
from federation.spec.run_sections import PrivacySpec
from federation.spec.train_section import LocalSgd
from federation.vectors import Vector

SPLITS = ("train", "validation", "test")


def check_splits(splits: Sequence[str]) -> None:
    """Checks the splits that a member reads: at least one, each once, and known ones. Raises ValueError."""
    if not splits or not {*splits} <= {*SPLITS} or len({*splits}) < len(splits):
        raise ValueError(f"cannot read the splits {list(splits)}; there are {', '.join(SPLITS)}")


class Ability(StrEnum):
    """The optional abilities of a trainer, besides training on one loss and evaluating models."""

    WEIGHTS = "weights"  # train on a weighted sum of objectives, or on a loss with a weight other than 1
    GRADIENTS = "gradients"  # give the gradient of each objective, and make the first step of training from them
    OPTIMIZERS = "optimizers"  # do more than plain SGD: momentum, Adam, weight decay, clip_norm, other rates by step
    PROXIMAL = "proximal"  # add the term of FedProx to the loss (train.proximal_mu)
    FROZEN = "frozen"  # leave some parameters as they are (parameters.frozen)
    FIXED = "fixed"  # leave tensors as the run's model has them (parameters.fixed); see `with_fixed`
    NOISE = "noise"  # add noise to the gradient of each sample (DP-SGD)
    REPEATABLE = "repeatable"  # give the same bytes for the same computation, also after a restart


CANNOT: Mapping[Ability, str] = {
    Ability.WEIGHTS: "cannot train on a weighted sum of objectives",
    Ability.GRADIENTS: "cannot give gradients",
    Ability.OPTIMIZERS: "cannot train with more than plain SGD (train.optimizer, momentum, weight_decay, clip_norm, "
    "step_schedule)",
    Ability.PROXIMAL: "cannot add a proximal term (train.proximal_mu)",
    Ability.FROZEN: "cannot leave some parameters as they are (parameters.frozen)",
    Ability.FIXED: "cannot leave tensors as the run's model has them (parameters.fixed)",
    Ability.NOISE: "cannot add noise to the gradients of samples",
    Ability.REPEATABLE: "cannot repeat its work with the same result",
}
"""The text for a trainer without an ability."""


def with_fixed(abilities: Iterable[str]) -> frozenset[str]:
    """The abilities of a trainer as its worker tells them: one that leaves parameters frozen leaves tensors fixed, too.

    Version 0.1.0 does not tell the latter: its workers cannot take part in runs with fixed tensors.
    """
    told = frozenset(abilities)
    return told | {Ability.FIXED} if Ability.FROZEN in told else told - {Ability.FIXED}


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

    @classmethod
    def of(cls, privacy: PrivacySpec) -> "PrivateSgd | None":
        """The noise that `[privacy]` of a run asks for; None without noise."""
        return cls(noise=privacy.sample_noise, clip=privacy.sample_clip) if privacy.sample_noise else None

    def with_floor(self, floor: "PrivateSgd") -> "PrivateSgd":
        """The stricter of both: more noise, and the smaller bound on a sample."""
        return PrivateSgd(noise=max(self.noise, floor.noise), clip=min(self.clip, floor.clip))

    def mechanism(self, sgd: LocalSgd, samples: int, rows: int) -> Mechanism:
        """The mechanism that local SGD applies to this number of training samples, once for each row of the update."""
        return Mechanism(self.noise, sgd.sampling_rate(samples), sgd.count(samples) * rows)


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
