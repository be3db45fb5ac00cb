"""The number of samples of each class that every client holds, before any training."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from federation.tasks import Dataset, DataSource, Part, PartError, Pool, Task, pool_of, task_code
from federation.tasks.partition import classes, deal_all, holders
from federation.tasks.splitting import SPLITS
from federation.training.pool_trial import tried_pool, try_splits
from federation.training.trainers import trainer_kind


@dataclass(frozen=True, eq=False)
class Census:
    """The samples of the clients of a partition.

    Attributes:
        sizes: (clients, 3), samples for training, validation and testing.
        classes: (C,) the classes, ascending; none where the targets are no classes.
        by_split: (clients, 3, C), samples of each class in each split.
        owners: the natural owner of each client; empty for other schemes.
        grouped: whether the pool names groups of samples that stay together; None if the task makes its own splits.
        stratified: whether each split keeps the shares of the classes.
    """

    sizes: NDArray[np.int64]
    classes: NDArray[np.int64]
    by_split: NDArray[np.int64]
    owners: tuple[str, ...] = ()
    grouped: bool | None = None
    stratified: bool = False

    @property
    def counts(self) -> NDArray[np.int64]:
        """(clients, C), samples of each class in all three splits."""
        counts: NDArray[np.int64] = self.by_split.sum(axis=1)
        return counts

    @property
    def lacking(self) -> list[dict[str, NDArray[np.int64]]]:
        """For each client: by split, the classes that the client holds and the split lacks; only splits that do.

        A split without samples is left out.
        """
        return [
            {
                name: self.classes[absent]
                for name, size, counts in zip(SPLITS, sizes, by_split, strict=True)
                if size and (absent := (by_split.sum(axis=0) > 0) & (counts == 0)).any()
            }
            for sizes, by_split in zip(self.sizes, self.by_split, strict=True)
        ]

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
    grouped, stratified = None, False
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
        grouped, stratified = pool.groups is not None, pool.stratify
        if part.scheme == "natural":
            owners = tuple(pool.owners[owner] for owner in holders(pool, part.count))
    sizes = np.array([[len(split) for split in own] for own in dealt])
    try:
        if not all(isinstance(split, Dataset) for own in dealt for split in own):
            raise PartError("labels that are not in memory are not counted")
        held = [[classes(Pool(split.x, split.y)) for split in own] for own in dealt]
    except PartError:
        return Census(sizes, np.empty(0, np.int64), np.empty((part.count, 3, 0), np.int64), owners, grouped, stratified)
    known = np.unique(np.concatenate([labels for own in held for labels in own]))
    by_split = np.array(
        [[np.bincount(np.searchsorted(known, labels), minlength=len(known)) for labels in own] for own in held]
    )
    return Census(sizes, known, by_split, owners, grouped, stratified)


def _without_samples(pool: Pool) -> Pool:
    """The same pool with the classes in the place of samples and targets: nothing large is copied."""
    test = None if pool.test is None else _without_samples(pool.test)
    try:
        labels = classes(pool)
    except PartError:
        return replace(pool, x=pool.y, test=test)
    return replace(pool, x=labels, y=labels, test=test)
