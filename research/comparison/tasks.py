"""The six tasks: ten members each. The seed of the partition deals the data, and says which members are the minority.

Half of a member's samples are for training, a fifth for validation (rates are chosen on them), three tenths for the
test. The sizes of members differ by one at most, those of `shards` by two.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from comparison.catalogue import MEMBERS
from federation.tasks import Dataset, DataSource, Part, Pool, Splits, Task
from federation.tasks.digits import bundled, inputs
from federation.tasks.pairs import TwoDigits
from federation.tasks.partition import classes, partition
from federation.tasks.river_flow import RiverFlow
from federation.tasks.scanners import turned
from federation.tasks.vision import FashionMnist, Mnist, Vision

if TYPE_CHECKING:
    import torch
    from torch import nn

_CUT, _MINORITY = 1, 2  # random streams of a seed
_SAMPLES = 4000  # of MNIST and Fashion-MNIST, drawn by the seed
_EVERY = 3  # hours between rows of the river
_HIDDEN = 32

Samples = tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]


class Dealt(Task):
    """A task of ten members, dealt by the seed of the part.

    Attributes:
        scheme: the partition.
        minority: the number of members whose inputs differ.
    """

    scheme: ClassVar[str] = "iid"
    minority: ClassVar[int] = 0

    def load(self, source: DataSource) -> Splits:
        """A member's own samples."""
        part = source.part or Part(0, MEMBERS)
        return _dealt(type(self).__name__, source.directory, part.seed)[part.index]

    def samples(self, directory: Path | None, random: np.random.Generator) -> Samples:
        """All samples: inputs (n, ...), targets (n, ...), and the classes that the partition deals by, (n,)."""
        raise NotImplementedError

    def differing(self, x: NDArray[Any]) -> NDArray[Any]:
        """The inputs as a member of the minority has them."""
        return x


def minority(kind: type[Dealt], seed: int) -> tuple[int, ...]:
    """The members of the minority: numbers from 0 to 9, ascending, drawn by the seed."""
    return tuple(sorted(np.random.default_rng([seed, _MINORITY]).permutation(MEMBERS)[: kind.minority].tolist()))


@lru_cache(maxsize=1)
def _dealt(name: str, directory: Path | None, seed: int) -> tuple[Splits, ...]:
    import torch  # noqa: PLC0415

    kind: type[Dealt] = globals()[name]
    task, random = kind(), np.random.default_rng([seed, _CUT])
    x, y, labels = task.samples(directory, random)
    chosen = np.sort(random.permutation(len(y))[: len(y) // MEMBERS * MEMBERS])
    x, y, labels = x[chosen], y[chosen], labels[chosen]
    unlike, members = minority(kind, seed), []
    for index, own in enumerate(partition(Pool(x, y, labels), Part(0, MEMBERS, kind.scheme, seed))):
        own_x = task.differing(x[own]) if index in unlike else x[own]
        cuts = np.split(random.permutation(len(own)), [len(own) * 5 // 10, len(own) * 7 // 10])
        parts = [Dataset(torch.from_numpy(own_x[cut].copy()), torch.from_numpy(y[own][cut].copy())) for cut in cuts]
        members.append(Splits(*parts))
    return tuple(members)


def _perceptron(inputs: int, outputs: int) -> "nn.Module":
    from torch import nn  # noqa: PLC0415

    from federation.tasks.networks import layers  # noqa: PLC0415

    return layers(hidden=nn.Linear(inputs, _HIDDEN), relu=nn.ReLU(), out=nn.Linear(_HIDDEN, outputs))


class TurnedDigits(Dealt):
    """`scanners`, dealt anew by each seed: two of ten hospitals turn their images by 90 degrees. 650 weights."""

    minority = 2

    def model(self) -> "nn.Module":
        """A fresh model."""
        from federation.tasks.networks import digits_linear  # noqa: PLC0415

        return digits_linear()

    def samples(self, directory: Path | None, random: np.random.Generator) -> Samples:
        """As of `Dealt`."""
        x, y = bundled()
        return inputs(x), y, y

    def differing(self, x: NDArray[Any]) -> NDArray[Any]:
        """As of `Dealt`."""
        return turned(x)


class ShardedDigits(TurnedDigits):
    """The digits, two shards of a label-sorted set for each member; a hidden layer of 64, 4,810 weights."""

    scheme = "shards:2"
    minority = 0

    def model(self) -> "nn.Module":
        """A fresh model."""
        from federation.tasks.networks import digits_mlp  # noqa: PLC0415

        return digits_mlp()


class ServedDigits(Dealt, TwoDigits):
    """`two-digits`: two members, drawn by the seed, serve the right digit; the other eight the left. 4,788 weights."""

    minority = 2

    def samples(self, directory: Path | None, random: np.random.Generator) -> Samples:
        """As of `Dealt`."""
        pool = TwoDigits().pool(DataSource())
        y = pool.y.numpy()
        return pool.x.numpy(), y, y[:, 0].copy()

    load = Dealt.load
    pool = Task.pool


class _Pictures(Dealt):
    """4000 images of a published set, drawn by the seed; one hidden layer of 32, 25,450 weights."""

    published: ClassVar[type[Vision]]

    def model(self) -> "nn.Module":
        """A fresh model."""
        return _perceptron(28 * 28, 10)

    def samples(self, directory: Path | None, random: np.random.Generator) -> Samples:
        """As of `Dealt`."""
        x, y = self.published().images(DataSource(directory), "train")
        drawn = random.permutation(len(y))[:_SAMPLES]
        return x[drawn].reshape(-1, 28 * 28).astype(np.float32) / 255, y[drawn], y[drawn]


class TurnedGarments(_Pictures):
    """Fashion-MNIST at ten shops, three of which hold the camera upside down."""

    published = FashionMnist
    minority = 3

    def differing(self, x: NDArray[Any]) -> NDArray[Any]:
        """As of `Dealt`."""
        return np.ascontiguousarray(x[:, ::-1])


class SkewedMnist(_Pictures):
    """MNIST with `dirichlet:0.1`."""

    published = Mnist
    scheme = "dirichlet:0.1"


class SkewedRiver(Dealt):
    """`river-flow` as one regression on eight targets, every third row, `dirichlet:0.3` by the water level.

    A loss of 1 is that of always predicting the mean. One hidden layer of 32, 2,344 weights.
    """

    scheme = "dirichlet:0.3"

    def model(self) -> "nn.Module":
        """A fresh model."""
        return _perceptron(64, 8)

    def samples(self, directory: Path | None, random: np.random.Generator) -> Samples:
        """As of `Dealt`."""
        pool = RiverFlow().pool(DataSource(directory))
        return pool.x.numpy()[::_EVERY], pool.y.numpy()[::_EVERY], classes(pool)[::_EVERY]

    def losses(self, output: Any, y: "torch.Tensor") -> "dict[str, torch.Tensor]":
        """The mean squared error over the eight targets."""
        return {"loss": (output - y).square().mean()}

    def correct(self, output: Any, y: "torch.Tensor") -> None:
        """None: no prediction of a number is right."""
