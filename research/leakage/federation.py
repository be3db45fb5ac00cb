"""The federation that is attacked: data, local training of many clients at once, models, and shadow clients.

Training is that of the product but for its random generator: minibatch SGD on the task's model. With differential
privacy it is DP-SGD (Abadi et al., 2016, algorithm 1): Poisson sampling, gradients of single samples clipped to a norm
C, Gaussian noise of deviation sigma C on their sum, which is divided by the expected batch. The noise comes from a
seeded generator: it serves measurements and protects nobody.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from federation.digests import derived_seed
from federation.tasks import DataSource, Part, Pool, parameters
from federation.tasks.digits import Digits
from federation.tasks.partition import partition
from leakage.accounting import noise_multiplier
from leakage.specification import LeakageSpecification, LocalTraining

CLASSES = 10

Reals = NDArray[np.float64]


def unit_rows(vectors: Reals) -> Reals:
    """The rows divided by their lengths."""
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@dataclass(frozen=True)
class Clients:
    """Clients with n samples each: x (c, n, 64), y (c, n)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def histograms(self) -> Reals:
        """The share of each label, (c, 10)."""
        counts = torch.stack([torch.bincount(y, minlength=CLASSES) for y in self.y])
        return np.asarray(counts.double().numpy() / self.y.shape[1])


class Network:
    """The task's model as a function of its flat parameters, (d,)."""

    def __init__(self, seed: int) -> None:
        self._module = parameters.build(Digits(), seed)
        self._shapes = {name: value.shape for name, value in self._module.named_parameters()}
        self.start = torch.cat([value.detach().flatten() for value in self._module.parameters()])

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """The outputs, (n, 10), for inputs (n, 64)."""
        parts = torch.split(w, [shape.numel() for shape in self._shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        output: Tensor = functional_call(self._module, values, (x,))
        return output

    def loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The mean cross-entropy of a batch."""
        return cross_entropy(self.logits(w, x), y)

    def loss_of_one(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy of one sample, x (64,)."""
        return self.loss(w, x[None], y[None])


def local_updates(
    network: Network, w: Tensor, clients: Clients, train: LocalTraining, generator: torch.Generator, sigma: float = 0.0
) -> Tensor:
    """The updates of all clients, (c, d); with DP-SGD if the noise multiplier sigma is positive."""
    values = w.expand(len(clients), -1).clone()
    for _ in range(train.steps):
        if sigma:
            gradients = _private_gradients(network, values, clients, train, generator, sigma)
        else:
            chosen = torch.rand(clients.y.shape, generator=generator).argsort(1)[:, : train.batch]
            x, y = _taken(clients, chosen)
            gradients = vmap(grad(network.loss))(values, x, y)
        values -= train.learning_rate * gradients
    return w - values


def _private_gradients(
    network: Network, values: Tensor, clients: Clients, train: LocalTraining, generator: torch.Generator, sigma: float
) -> Tensor:
    drawn = torch.rand(clients.y.shape, generator=generator) < train.batch / clients.y.shape[1]
    chosen = drawn.float().argsort(1, descending=True)[:, : max(1, int(drawn.sum(1).max()))]
    x, y = _taken(clients, chosen)
    gradients = vmap(vmap(grad(network.loss_of_one), in_dims=(None, 0, 0)))(values, x, y)
    factors = train.clip / gradients.norm(dim=2).clamp(min=train.clip) * drawn.gather(1, chosen)
    noise = torch.randn(values.shape, generator=generator) * (sigma * train.clip)
    total: Tensor = (factors[..., None] * gradients).sum(1) + noise
    return total / train.batch


def _taken(clients: Clients, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return clients.x.gather(1, chosen[..., None].expand(-1, -1, clients.x.shape[2])), clients.y.gather(1, chosen)


class AttackedFederation:
    """The federation of one specification, and what its coordinator can prepare. All values are made once.

    Attributes:
        pool: all images, (1797, 64), with labels.
        shadow: the indices of the coordinator's own images.
        member_indices: the images of each client, (m, n).
        members: the clients.
        targets: the number of the first members, which are attacked; the others may collude.
        sampling_rate: the probability with which DP-SGD takes each sample into a batch.
    """

    def __init__(self, specification: LeakageSpecification) -> None:
        self.specification = specification
        self._train = specification.train
        self.targets = specification.members - specification.colluders_at_most
        self.pool: Pool = Digits().pool(DataSource())
        self.network = Network(derived_seed(repr((specification.seed, "network"))))
        order = np.random.default_rng([specification.seed, 0]).permutation(len(self.pool.y))
        self.shadow, rest = order[: specification.shadow], order[specification.shadow :]
        size = len(rest) // specification.members
        self.member_indices = np.stack([own[:size] for own in self._dealt(rest, specification.seed)])
        self.members = self._clients(self.member_indices)
        self.sampling_rate = self._train.batch / size
        self._models: dict[float | None, list[Tensor]] = {}
        self._made: dict[tuple[object, ...], Reals] = {}

    def model(self, number: int, epsilon: float | None = None) -> Tensor:
        """The model after a number of rounds of FedAvg; with epsilon for each round, the members train with DP-SGD."""
        models, sigma = self._models.setdefault(epsilon, [self.network.start]), self.noise_multiplier(epsilon)
        while len(models) <= number:
            generator = self._generator("rounds", len(models), epsilon)
            updates = local_updates(self.network, models[-1], self.members, self._train, generator, sigma)
            models.append(models[-1] - updates.mean(0))
        return models[number]

    def accuracy(self, number: int, epsilon: float | None = None) -> float:
        """The share of the coordinator's images that such a model names right."""
        with torch.no_grad():
            logits = self.network.logits(self.model(number, epsilon), self.pool.x[self.shadow])
        return float((logits.argmax(1) == self.pool.y[self.shadow]).float().mean())

    def updates(self, number: int, visit: int = 0, epsilon: float | None = None, *, shadow: bool = False) -> Reals:
        """The members' updates at the model after `number` rounds, base minus trained, (c, d).

        Each visit is trained with a seed of its own. Shadow clients' updates are made in the same way.
        """
        kind, clients = ("shadow", self.shadow_members) if shadow else ("members", self.members)
        key = (kind, number, visit, epsilon)
        if key not in self._made:
            generator, sigma = self._generator(*key), self.noise_multiplier(epsilon)
            raw = local_updates(self.network, self.model(number), clients, self._train, generator, sigma)
            self._made[key] = raw.double().numpy()
        return self._made[key]

    @cached_property
    def shadow_members(self) -> Clients:
        """Clients with the coordinator's images, drawn with replacement and dealt as the members' images are."""
        random = np.random.default_rng([self.specification.seed, 1])
        size = self.members.y.shape[1]
        dealt: list[NDArray[np.int64]] = []
        while len(dealt) < self.specification.shadow_clients:
            drawn = random.choice(self.shadow, len(self.pool.y) - len(self.shadow))
            dealt += [own[:size] for own in self._dealt(drawn, int(random.integers(2**31)))]
        return self._clients(np.stack(dealt[: self.specification.shadow_clients]))

    @cached_property
    def population(self) -> Reals:
        """The histogram of the coordinator's own images, (10,)."""
        return np.bincount(self.pool.y.numpy()[self.shadow], minlength=CLASSES) / len(self.shadow)

    def means(self, values: Tensor) -> Tensor:
        """The mean for each label, (10, ...), of values of the coordinator's own images, (n, ...)."""
        y = self.pool.y[self.shadow]
        return torch.stack([values[y == label].mean(0) for label in range(CLASSES)])

    def noise_multiplier(self, epsilon: float | None) -> float:
        """Sigma with which one round is (epsilon, delta)-private; 0 without epsilon."""
        return noise_multiplier(epsilon, self.sampling_rate, self._train.steps, self._train.delta)

    def _dealt(self, indices: NDArray[np.int64], seed: int) -> list[NDArray[np.int64]]:
        """Those of the images at `indices` that each client gets, in random order."""
        part = Part(0, self.specification.members, f"dirichlet:{self.specification.alpha}", seed)
        dealt = partition(Pool(self.pool.x[indices], self.pool.y[indices]), part)
        return [indices[np.random.default_rng([seed, 4]).permutation(own)] for own in dealt]

    def _clients(self, chosen: NDArray[np.int64]) -> Clients:
        indices = torch.from_numpy(chosen)
        return Clients(self.pool.x[indices], self.pool.y[indices].long())

    def _generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(repr((self.specification.seed, *names))))
