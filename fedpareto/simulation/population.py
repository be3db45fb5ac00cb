"""The clients of a simulation: their names, their data, and which of them attack."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from federation.attacks import Attack, AttackError, attack_seed, parse_attack, poisoned
from federation.spec.run_spec import RunSpec
from federation.tasks import Dataset, DataSource, Part, Splits, Task, TaskError, pool_of, task_code
from federation.tasks.partition import deal_all
from federation.training.data_trial import not_finite
from federation.training.generators import generators_kept
from federation.training.pool_trial import tried_pool, try_splits
from federation.training.run_trial import FirstTraining
from federation.training.sample_tensors import splits_of_tensors
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.work.base import WorkError
from federation.work.minibatch_sizes import Forming
from fedpareto.simulation import SimulationError


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


def populate(
    task: Task,
    run: RunSpec,
    source: DataSource,
    trainer: type[Trainer] = TorchTrainer,
    device: str = "cpu",
    members: Mapping[str, Path] | None = None,
) -> Population:
    """Deals a task's data to the clients of a specification, after the built-in trainer was tried on it.

    Or it loads the data of `members`, by name from the directory of each, and tries it for each of them.

    The trial is one of all data, not of each client, and random generators stay as they were. A task that can only load
    one client's samples is tried on those of the first client that trains, and of clients with values that are not
    finite.

    Raises:
        DataError: missing or malformed data, too little of it for all clients, or a loss that is not finite.
        TaskError: the task's code raised an exception, or returned something else than it must.
        AttackError: no such attack, or its code raised an exception.
        PartError: no such partition.
    """
    spec, serve = run.simulation, run.objectives.serve
    names = sorted(members) if members else client_names(spec.clients)
    if spec.attackers > len(names):
        raise AttackError(f"simulation.attackers = {spec.attackers}, but there are {len(names)} members")
    sources = [DataSource(members[name], download=source.download) for name in names] if members else []
    dealt = _loaded(task, sources, names, trainer, device) if members else _deal(task, run, source, trainer, device)
    splits = dict(zip(names, dealt, strict=True))
    attackers: dict[str, Attack] = {}
    if spec.attackers and (attack := parse_attack(spec.attack)) is not None:
        attackers = dict.fromkeys(names[len(names) - spec.attackers :], attack)
    for name, attack in attackers.items():
        if not isinstance(splits[name].train, Dataset) and type(attack).poison is not Attack.poison:
            raise AttackError(f"{attack} changes training data, and that of {task.name} is not in memory")
        splits[name] = poisoned(attack, splits[name], task, seed=attack_seed(run.seed, 0, name))
    served = zip(names, _served(task, len(names), spec.objectives), strict=True)
    serves = {name: serve.get(name, own) for name, own in served}
    return Population(splits, attackers, serves)


def try_smallest(task: Task, run: RunSpec, population: Population, device: str) -> None:
    """Tries the smallest minibatch that an honest client forms in a run, with the built-in trainer.

    Raises:
        SharingError: `[parameters]` of the run does not suit the model.
        SimulationError: the client would decline, or the task's code raised an exception on so few samples.
    """
    sgd = run.train

    def smallest(name: str, *, even: bool) -> int:
        count = population.samples[name]
        forming = Forming(samples=count, batch_size=sgd.batch_size, steps=sgd.count(count), micro_batch=sgd.micro_batch)
        return forming.smallest_part(even=even)

    asked = [
        name
        for name, count in population.samples.items()
        if count and name not in population.attackers and run.selection.admits(name)
    ]
    # Only the trainer knows if it evens minibatches out, so the client with the smallest one is tried for both cases.
    for name in dict.fromkeys(min(asked, key=partial(smallest, even=even)) for even in (False, True) if asked):
        trainer = TorchTrainer(task, population.splits[name], device, objectives=population.serves[name])
        trainer.kernels.speaks = False
        try:
            with generators_kept(), closing(trainer):
                FirstTraining.of(trainer, run).try_smallest(trainer)
        except (TaskError, WorkError) as error:
            raise SimulationError(f"{name}: {error}") from error


def _served(task: Task, clients: int, objectives: str) -> list[tuple[str, ...]]:
    """The objectives of each client: all of them, or some in turn."""
    kind, _, count = objectives.partition(":")
    M = len(task.objectives)
    selected = [
        set(range(M)) if kind == "all" else {(index + i) % M for i in range(int(count))} for index in range(clients)
    ]
    return [tuple(name for index, name in enumerate(task.objectives) if index in indices) for indices in selected]


def client_names(count: int) -> list[str]:
    """client-000, client-001, ...: zero-padded so that they sort numerically."""
    width = max(3, len(str(count - 1)))
    return [f"client-{number:0{width}d}" for number in range(count)]


def _deal(task: Task, run: RunSpec, source: DataSource, trainer: type[Trainer], device: str) -> list[Splits]:
    spec = run.simulation
    parts = [
        Part(index, spec.clients, spec.partition, spec.partition_seed, spec.sizes) for index in range(spec.clients)
    ]
    if type(task).pool is not Task.pool:
        pool = pool_of(task, source)
        if trainer is TorchTrainer and not run.describes:  # which needs no finite loss
            with generators_kept():
                pool = tried_pool(task, pool, trainer, device, speaks=False)
        return deal_all(pool, parts[0])
    sources = [DataSource(source.directory, part, source.download) for part in parts]
    return _loaded(task, sources, client_names(spec.clients), trainer, device, once=True)


def _loaded(
    task: Task,
    sources: Sequence[DataSource],
    names: Sequence[str],
    trainer: type[Trainer],
    device: str,
    *,
    once: bool = False,
) -> list[Splits]:
    """The data of each client from its own source; with `once`, not each of them is tried."""
    with task_code(task.name, "loading its data"):
        dealt = [task.load(source) for source in sources]
    if trainer is not TorchTrainer:
        return dealt
    dealt = [splits_of_tensors(own) for own in dealt]
    first = next((own for own in dealt if len(own.train)), None)
    for name, own in zip(names, dealt, strict=True):
        if not once or own is first or _has_values_that_are_not_finite(own):
            with generators_kept():
                try_splits(task, own, trainer, device, whose=name, speaks=False)
    return dealt


def _has_values_that_are_not_finite(splits: Splits) -> bool:
    in_memory = [split for split in splits if isinstance(split, Dataset)]
    return any(len(not_finite(part)) for split in in_memory for part in (split.x, split.y))
