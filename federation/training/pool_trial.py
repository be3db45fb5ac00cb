"""Tries a task on all of its data, before any of it is dealt to clients: in `data show`, and before a simulation."""

from contextlib import ExitStack

from federation.tasks import DataError, Dataset, Pool, Splits, Task, TaskError
from federation.tasks.partition import deal
from federation.training.sample_tensors import pool_of_tensors
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from federation.training.trainers import close_trainer, make_trainer, trainer_code


def tried_pool(task: Task, pool: Pool, kind: type[Trainer], device: str = "auto", *, speaks: bool = True) -> Pool:
    """The data in the form that a trainer takes, once it was tried.

    `speaks` is false where later work logs the operations without a deterministic kernel.

    Raises:
        DataError: it holds no numbers, or a loss is not finite.
        TaskError: the task's code raised an exception on it, or returned something else than it must.
        PluginError: the same of an owner's own trainer.
    """
    if kind is not TorchTrainer:
        try_splits(task, deal(pool, None), kind, device, speaks=speaks)
        return pool
    pool = pool_of_tensors(pool)
    none = Dataset(pool.x[:0], pool.y[:0])
    data = {"the data": Dataset(pool.x, pool.y)}
    if pool.test is not None:
        data["the official test data"] = Dataset(pool.test.x, pool.test.y)
    trainer = TorchTrainer(task, Splits(none, none, none), device)
    trainer.kernels.speaks = speaks
    trainer.try_on(data, ["the data"])
    return pool


def try_splits(
    task: Task, splits: Splits, kind: type[Trainer], device: str = "auto", *, whose: str = "", speaks: bool = True
) -> None:
    """Tries the data of one client with a trainer as a worker makes it; `whose` is the client's name in messages.

    Errors are those of `tried_pool`.
    """
    try:
        with ExitStack() as stack:
            trainer = make_trainer(kind, task, splits, device)
            stack.callback(close_trainer, trainer)
            if isinstance(trainer, TorchTrainer):
                trainer.kernels.speaks = speaks
            with trainer_code(kind, "trying it on the data"):
                trainer.try_out()
    except (DataError, TaskError) as error:
        raise type(error)(f"{whose}: {error}" if whose else str(error)) from error
