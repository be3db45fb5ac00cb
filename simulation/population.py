"""The clients of a simulation: their names, their data, and which of them attack."""

from collections.abc import Mapping
from dataclasses import dataclass

from federation.attacks import Attack, attack_seed, parse_attack
from federation.runs import SimulationSpec
from federation.tasks import DataSource, Part, Splits, Task, task_code
from federation.tasks.partition import deal_all


@dataclass(frozen=True)
class Population:
    """Who takes part.

    Attributes:
        splits: every client's data, poisoned where its owner does that; ordered by name.
        attackers: the attack of each client that is not honest.
        serves: the objectives of each client.
    """

    splits: Mapping[str, Splits]
    attackers: Mapping[str, Attack]
    serves: Mapping[str, tuple[str, ...]]

    @property
    def samples(self) -> dict[str, int]:
        """Training samples by client."""
        return {name: len(splits.train) for name, splits in self.splits.items()}


def populate(
    task: Task,
    spec: SimulationSpec,
    source: DataSource,
    *,
    seed: int,
    serve: Mapping[str, tuple[str, ...]] | None = None,
) -> Population:
    """Deals a task's data to the clients that a specification asks for.

    Args:
        task: what is learned.
        spec: how many clients there are, what they hold, and who attacks.
        source: where the data is.
        seed: of the run, for what attackers draw at random.
        serve: which objectives some of them serve, by name; of the others, `spec` says it.

    Raises:
        DataError: missing or malformed data, or too little of it for so many clients.
        AttackError: no such attack.
        PartError: no such partition.
    """
    names = client_names(spec.clients)
    dealt = _deal(task, spec, source)
    attack = parse_attack(spec.attack) if spec.attackers else None
    attackers = dict.fromkeys(names[spec.clients - spec.attackers :], attack) if attack is not None else {}
    splits = {}
    for name, own in zip(names, dealt, strict=True):
        splits[name] = (
            own
            if attack is None or name not in attackers
            else attack.poison(own, task, seed=attack_seed(seed, 0, name))
        )
    serves = {name: (serve or {}).get(name, own) for name, own in zip(names, _served(task, spec), strict=True)}
    return Population(splits, {name: one for name, one in attackers.items() if one is not None}, serves)


def _served(task: Task, spec: SimulationSpec) -> list[tuple[str, ...]]:
    """The objectives of each client: all of them, or some in turn."""
    kind, _, count = spec.objectives.partition(":")
    M = len(task.objectives)
    chosen = [
        set(range(M)) if kind == "all" else {(at + i) % M for i in range(int(count))} for at in range(spec.clients)
    ]
    return [tuple(name for at, name in enumerate(task.objectives) if at in own) for own in chosen]


def client_names(count: int) -> list[str]:
    """client-000, client-001, ...: as wide as it takes for their order to be that of their numbers."""
    width = max(3, len(str(count - 1)))
    return [f"client-{number:0{width}d}" for number in range(count)]


def _deal(task: Task, spec: SimulationSpec, source: DataSource) -> list[Splits]:
    parts = [
        Part(index, spec.clients, spec.partition, spec.partition_seed, spec.sizes) for index in range(spec.clients)
    ]
    if type(task).pool is Task.pool:  # a task that only knows how to load one client's own
        with task_code(task.name, "loading its data"):
            return [task.load(DataSource(source.directory, part, source.download)) for part in parts]
    with task_code(task.name, "loading its data"):
        pool = task.pool(source)
    return deal_all(pool, parts[0])
