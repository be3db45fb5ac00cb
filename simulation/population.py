"""The clients of a simulation: their names, their data, and which of them attack."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from federation.attacks import Attack, AttackError, attack_seed, parse_attack, poisoned
from federation.spec.run_sections import SimulationSpec
from federation.spec.run_spec import RunSpec
from federation.tasks import Dataset, DataSource, Part, Splits, Task, task_code
from federation.tasks.partition import deal_all


@dataclass(frozen=True)
class Population:
    """The clients."""

    splits: Mapping[str, Splits]  # every client's data, poisoned for attackers that poison data; ordered by name
    attackers: Mapping[str, Attack]  # the attack of each client that is not honest
    serves: Mapping[str, tuple[str, ...]]  # the objectives of each client

    @cached_property
    def samples(self) -> dict[str, int]:
        """Training samples by client."""
        return {name: len(splits.train) for name, splits in self.splits.items()}


def populate(task: Task, run: RunSpec, source: DataSource) -> Population:
    """Deals a task's data to the clients of a specification.

    Raises:
        DataError: missing or malformed data, or too little of it for all clients.
        AttackError: no such attack, or its code raised an exception.
        PartError: no such partition.
    """
    spec, serve = run.simulation, run.objectives.serve
    names = client_names(spec.clients)
    splits = dict(zip(names, _deal(task, spec, source), strict=True))
    attackers: dict[str, Attack] = {}
    if spec.attackers and (attack := parse_attack(spec.attack)) is not None:
        attackers = dict.fromkeys(names[spec.clients - spec.attackers :], attack)
    for name, attack in attackers.items():
        if not isinstance(splits[name].train, Dataset) and type(attack).poison is not Attack.poison:
            raise AttackError(f"{attack} changes training data, and that of {task.name} is not in memory")
        splits[name] = poisoned(attack, splits[name], task, seed=attack_seed(run.seed, 0, name))
    serves = {name: serve.get(name, own) for name, own in zip(names, _served(task, spec), strict=True)}
    return Population(splits, attackers, serves)


def _served(task: Task, spec: SimulationSpec) -> list[tuple[str, ...]]:
    """The objectives of each client: all of them, or some in turn."""
    kind, _, count = spec.objectives.partition(":")
    M = len(task.objectives)
    selected = [
        set(range(M)) if kind == "all" else {(index + i) % M for i in range(int(count))}
        for index in range(spec.clients)
    ]
    return [tuple(name for index, name in enumerate(task.objectives) if index in indices) for indices in selected]


def client_names(count: int) -> list[str]:
    """client-000, client-001, ...: zero-padded so that they sort numerically."""
    width = max(3, len(str(count - 1)))
    return [f"client-{number:0{width}d}" for number in range(count)]


def _deal(task: Task, spec: SimulationSpec, source: DataSource) -> list[Splits]:
    parts = [
        Part(index, spec.clients, spec.partition, spec.partition_seed, spec.sizes) for index in range(spec.clients)
    ]
    if type(task).pool is Task.pool:  # a task that can only load one client's samples
        with task_code(task.name, "loading its data"):
            return [task.load(DataSource(source.directory, part, source.download)) for part in parts]
    with task_code(task.name, "loading its data"):
        pool = task.pool(source)
    return deal_all(pool, parts[0])
