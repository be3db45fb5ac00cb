"""Plain FedAvg in PyTorch, for comparison in `simulate.py`. Flower's clients use the same local training.

It imports only the tasks of fedpareto, and so runs wherever PyTorch is installed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from federation.tasks import DataSource, Pool, task
from federation.tasks.vision import Cifar10
from federation.vectors import Vector

State = dict[str, Tensor]
BATCH_SIZE = 10  # the last batch of an epoch can be shorter


class MadeUpPhotographs(Cifar10):
    """As `cifar10`, with one picture plus noise for each class: 62 samples for each of ten clients, 50 for training."""

    def pool(self, source: DataSource) -> Pool:
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(620) % 10
        pictures = torch.randint(64, 192, (10, 3, 32, 32), generator=generator)
        noise = torch.randint(-64, 64, (620, 3, 32, 32), generator=generator)
        return Pool((pictures[y] + noise).to(torch.uint8), y)


@dataclass(frozen=True)
class Setting:
    """A task and its training.

    Attributes:
        task: its name.
        steps: SGD steps of each client in a round.
        rate: the learning rate of SGD.
        threads: of torch, if one process trains.
    """

    task: str
    clients: int
    steps: int
    rate: float
    rounds: int
    threads: int


@dataclass(frozen=True)
class Case(Setting):
    """The work of every contender.

    Attributes:
        initial: the initial model, (d,).
        x: the training samples of each client.
        y: their labels.
        seeds: of the order of the batches, for each round and client.
    """

    initial: Tensor
    x: list[Tensor]
    y: list[Tensor]
    seeds: list[list[int]]


@dataclass(frozen=True)
class Result:
    """The result of a contender.

    Attributes:
        model: the last model, (d,).
        ends: when each round ended, by `time.monotonic`.
        software: name and version.
    """

    model: Vector
    ends: list[float]
    software: str


class Client:
    """All clients of a case, in turn; they share one model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._task = task(case.task)
        self.model = self._task.model()

    def initial(self) -> State:
        vector_to_parameters(self.case.initial.clone(), self.model.parameters())  # they become views of it
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def train(self, state: State, client: int, round_: int) -> State:
        """The state after local SGD, which the next call overwrites."""
        self.model.load_state_dict(state)
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.case.rate)
        for x, y in islice(self._batches(client, round_), self.case.steps):
            optimizer.zero_grad()
            self._task.losses(self.model(x), y)["loss"].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return self.model.state_dict()

    def measure(self, state: State, client: int) -> None:
        """Computes the loss and the right answers of a state on the client's training samples, for what it costs."""
        self.model.load_state_dict(state)
        self.model.eval()
        with torch.no_grad():
            output, y = self.model(self.case.x[client]), self.case.y[client]
            self._task.losses(output, y)["loss"].item()
            self._task.correct(output, y)

    def vector(self, state: State) -> Vector:
        self.model.load_state_dict(state)
        return parameters_to_vector(self.model.parameters()).numpy(force=True)

    def _batches(self, client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.case.x[client], self.case.y[client]
        generator = torch.Generator().manual_seed(self.case.seeds[round_][client])
        while True:
            for chosen in torch.randperm(len(y), generator=generator).split(BATCH_SIZE):  # type: ignore[no-untyped-call]
                yield x[chosen], y[chosen]


@cache
def opened(path: Path) -> Client:
    """The clients of a case, read once per process, in which torch has one thread: Ray has a process for each core."""
    torch.set_num_threads(1)
    return Client(torch.load(path, weights_only=False))


def plain(path: Path, *, measure: bool) -> Result:
    """Trains every client from the model of the round, and averages the models weighted by samples.

    Args:
        path: of the case.
        measure: whether each client also measures the model of the round, like fedpareto's clients.
    """
    clients = opened(path)
    case = clients.case
    torch.set_num_threads(case.threads)
    samples = [len(y) for y in case.y]
    state, ends = clients.initial(), []
    for round_ in range(case.rounds):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client, count in enumerate(samples):
            if measure:
                clients.measure(state, client)
            for name, tensor in clients.train(state, client, round_).items():
                mean[name].add_(tensor, alpha=count / sum(samples))
        state = mean
        ends.append(time.monotonic())
    return Result(clients.vector(state), ends, f"PyTorch {torch.__version__}")
