"""The data set of a trainer, as statistics read it: without its model, and without its code."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from federation.statistics.data_columns import Column
from federation.statistics.held import HeldData
from federation.tasks import Dataset, Splits, Task, TaskError, columns_of
from federation.training.trainer import Trainer

_AT_A_TIME = 256  # samples that are not in memory


class HeldSplits(HeldData):
    """The splits of a task's data in this process."""

    def __init__(self, task: Task, splits: Splits) -> None:
        self._task, self._splits = task, splits

    @classmethod
    def of(cls, trainer: Trainer) -> "HeldSplits | None":
        """The data of a trainer; None if another process has them."""
        return cls(trainer.task, trainer.data) if isinstance(trainer.data, Splits) else None

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those that the task names. Raises TaskError: its code raised an exception."""
        return columns_of(self._task)

    def parts(self, split: str) -> Iterator[tuple[Any, Any]]:
        """The samples of a split. Raises TaskError: those that are not in memory differ in shape."""
        samples = getattr(self._splits, split)
        if isinstance(samples, Dataset):
            if len(samples):
                yield samples.x, samples.y
            return
        for start in range(0, len(samples), _AT_A_TIME):
            pairs = [samples[index] for index in range(start, min(start + _AT_A_TIME, len(samples)))]
            try:
                x, y = (np.stack([np.asarray(pair[part]) for pair in pairs]) for part in (0, 1))
            except ValueError as error:
                raise TaskError(f"task {self._task.name!r}: samples of the {split} split: {error}") from error
            yield x, y
