"""The updates whose sums are read: ideal ones, and those of members that train on digits."""

from dataclasses import dataclass

import numpy as np

from cover_search.specification import SearchSpecification
from federation.spec.train_section import LocalSgd
from federation.tasks import Dataset, Splits
from federation.tasks.digits import Digits
from federation.training.plans import TrainingPlan
from federation.training.torch_trainer import TorchTrainer
from federation.vectors import Vector
from leakage.federation import CLASSES, AttackedFederation, Reals, unit_rows
from leakage.specification import LeakageSpecification as Attack

# One step on all samples:
_SIGNS = LocalSgd(epochs=1, batch_size=0, learning_rate=1.0, optimizer="adam", epsilon=1e-30)
_VALUES = 2000  # different coordinates of ideal updates whose signs are decoded
_SIZE = 2**20  # their coordinates in all, at most, with copies
_HIDDEN = 64  # units of the model of digits


@dataclass(frozen=True)
class Updates:
    """Updates of m members.

    Attributes:
        visits: in each sum, (m, d).
        copies: as many neighbouring coordinates have the same value.
    """

    visits: tuple[Reals, ...]
    copies: int = 1


def updates(specification: SearchSpecification) -> Updates:
    """The members' updates in each sum."""
    if specification.updates == "ideal":
        return _ideal(specification)
    federation = trained_federation(specification)
    if specification.updates == "digits":
        visits = [federation.updates(specification.rounds, visit) for visit in range(specification.sums)]
        return Updates(tuple(visits if specification.raw else map(unit_rows, visits)))
    if specification.updates == "adam":
        return Updates((_signs(federation, federation.model(specification.rounds).numpy()),) * specification.sums)
    return Updates((_of_constant_layer(federation),) * specification.sums, _HIDDEN + 1)


def trained_federation(specification: SearchSpecification) -> AttackedFederation:
    """The members, who have digits."""
    same = specification.model_dump(include={"name", "seed", "members", "alpha", "train"})
    return AttackedFederation(Attack(attack="labels", view="update", colluders_at_most=0, shadow=20, **same))


def _ideal(specification: SearchSpecification) -> Updates:
    """Uncorrelated updates: one coordinate for each member, or random signs if these are to be decoded."""
    if specification.reader == "linear":
        return Updates((np.eye(specification.members),) * specification.sums)
    random, copies = np.random.default_rng([specification.seed, 2]), specification.copies
    values = random.choice([-1.0, 1.0], (specification.members, min(_VALUES, _SIZE // copies)))
    values *= random.random(values.shape) >= specification.zeros
    return Updates((unit_rows(np.repeat(values, copies, axis=1)),) * specification.sums, copies)


def _signs(federation: AttackedFederation, base: Vector) -> Reals:
    """Unit updates of one step of Adam, by a worker's trainer: signs of the gradient up to rounding, (m, d)."""
    trained = []
    for x, y in zip(federation.members.x, federation.members.y, strict=True):
        data = Dataset(x, y)
        trainer = TorchTrainer(Digits(), Splits(data, data, data))
        plan = TrainingPlan(sgd=_SIGNS, weights=dict.fromkeys(trainer.objectives, 1.0), seed=0, samples=len(y))
        trained.append(base - trainer.train(base, plan))
    return unit_rows(np.array(trained, np.float64))


def _of_constant_layer(federation: AttackedFederation) -> Reals:
    """The same from a model whose hidden outputs are all 1 and whose other parameters are 0, (m, 650).

    A class has one gradient for its 64 weights and its bias; all other gradients are zero, and left out.
    """
    hidden = slice(_HIDDEN * _HIDDEN, _HIDDEN * _HIDDEN + _HIDDEN)  # the biases
    base = np.zeros(len(federation.network.start), np.float32)
    base[hidden] = 1.0
    rows = _signs(federation, base)
    weights, biases = rows[:, hidden.stop : -CLASSES], rows[:, -CLASSES:]
    by_class = np.concatenate([weights.reshape(len(rows), CLASSES, _HIDDEN), biases[:, :, None]], axis=2)
    return by_class.reshape(len(rows), -1)
