"""The number of samples of each class that every client holds, before any training."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from federation.tasks import Dataset, DataSource, Part, PartError, Pool, Task, pool_of, task_code
from federation.tasks.partition import classes, deal_all, holders
from federation.training.pool_trial import tried_pool, try_splits
from federation.training.trainers import trainer_kind


@dataclass(frozen=True, eq=False)
class Census:
    """The samples of the clients of a partition.

    Attributes:
        sizes: (clients, 3), samples for training, validation and testing.
        classes: (C,) the classes, ascending; none where the targets are no classes.
        counts: (clients, C), samples of each class in all three splits.
        owners: the natural owner of each client; empty for other schemes.
    """

    sizes: NDArray[np.int64]
    classes: NDArray[np.int64]
    counts: NDArray[np.int64]
    owners: tuple[str, ...] = ()

    @property
    def heterogeneity(self) -> float:
        """Mean over clients of the total variation between its class shares and those of all clients together.

        0: all are alike. It is below 1, which clients of one class each come close to when there are many classes. NaN
        without classes.
        """
        if not len(self.classes):
            return float("nan")
        shares = self.counts / self.counts.sum(axis=1, keepdims=True)
        together = self.counts.sum(axis=0) / self.counts.sum()
        return float(np.abs(shares - together).sum(axis=1).mean() / 2)


def census(task: Task, source: DataSource, part: Part, *, tried: bool = False) -> Census:
    """Counts what each client of a partition gets; with `tried`, tries the task's model on the data too.

    Raises:
        DataError: missing or malformed data, or data that cannot be dealt in this way.
        TaskError: the task's code raised an exception.
    """
    owners: tuple[str, ...] = ()
    if type(task).pool is Task.pool:  # a task that only knows how to load one client's own
        parts = [replace(source, part=replace(part, index=index)) for index in range(part.count)]
        with task_code(task.name, "loading its data"):
            dealt = [task.load(own) for own in parts]
        for index, own in enumerate(dealt if tried else ()):
            try_splits(task, own, trainer_kind(task), whose=f"client {index}")
    else:
        pool = pool_of(task, source)
        if tried:
            pool = tried_pool(task, pool, trainer_kind(task))
        dealt = deal_all(_without_samples(pool), part)
        if part.scheme == "natural":
            owners = tuple(pool.owners[owner] for owner in holders(pool, part.count))
    sizes = np.array([[len(split) for split in own] for own in dealt])
    try:
        if not all(isinstance(split, Dataset) for own in dealt for split in own):
            raise PartError("labels that are not in memory are not counted")
        held = [np.concatenate([classes(Pool(split.x, split.y)) for split in own]) for own in dealt]
    except PartError:
        return Census(sizes, np.empty(0, np.int64), np.empty((part.count, 0), np.int64), owners)
    known = np.unique(np.concatenate(held))
    counts = np.array([np.bincount(np.searchsorted(known, own), minlength=len(known)) for own in held])
    return Census(sizes, known, counts, owners)


def _without_samples(pool: Pool) -> Pool:
    """The same pool with the classes in the place of samples and targets: nothing large is copied."""
    test = None if pool.test is None else _without_samples(pool.test)
    try:
        labels = classes(pool)
    except PartError:
        return replace(pool, x=pool.y, test=test)
    return replace(pool, x=labels, y=labels, test=test)
