"""Trainers by name: the built-in ones, those of installed packages, and `module:Class`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from federation.owners_code import described, owners_frame
from federation.plugins import PluginError, Plugins
from federation.tasks import DataError, PartError, Task, TaskError
from federation.training.external import SILENCE_SECONDS, ExternalTrainer
from federation.training.trainer import Trainer

BUILT_IN = {"torch": "federation.training.torch_trainer:TorchTrainer"}
TRAINERS: Plugins[Trainer] = Plugins("trainer", "fedpareto.trainers", Trainer, "fedpareto.Trainer", BUILT_IN)


def trainer_kind(task: Task, name: str = "") -> type[Trainer]:
    """The class that trains a task: the one that the owner of this machine named, or else the task's own.

    `name` is one of `BUILT_IN`, the name of an entry point, or `module:Class` on Python's path.

    Raises:
        PluginError: no such trainer, or its code raises an exception, or it is not a `Trainer`.
    """
    chosen = name or task.trainer
    if isinstance(chosen, type):
        if not issubclass(chosen, Trainer):
            raise PluginError(f"task {task.name!r}: its trainer {chosen.__name__} does not inherit from Trainer")
        return chosen
    try:
        return TRAINERS.find(BUILT_IN.get(chosen, chosen))
    except PluginError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "torch":
            raise error.__cause__ from None
        raise


@dataclass(frozen=True)
class TrainerChoice:
    """The owner's choice in place of a task's own trainer: a name, or the command of an external trainer.

    `silence` is that of `ExternalTrainer`, in seconds.
    """

    name: str = ""
    command: str = ""
    silence: float = SILENCE_SECONDS

    def kind(self, task: Task) -> type[Trainer]:
        """The class. Errors as of `trainer_kind`."""
        return ExternalTrainer if self.command else trainer_kind(task, self.name)

    def make(
        self, task: Task, data: Any, device: str, threads: int | None, objectives: Sequence[str] | None
    ) -> Trainer:
        """The trainer. Errors as of the class."""
        if self.command:
            external = partial(ExternalTrainer, command=self.command, silence=self.silence)
            return external(task, data, device, threads, objectives)
        return self.kind(task)(task, data, device, threads, objectives)


@contextmanager
def trainer_code(kind: type[Trainer], doing: str) -> Iterator[None]:
    """Turns an error of an owner's own trainer into a PluginError that says where it was raised.

    `doing` is what the trainer is asked for, such as "preparing it". Other errors are passed on as they are.
    """
    try:
        yield
    except (TaskError, DataError, PartError, MemoryError):
        raise
    except Exception as error:
        if owners_frame(error) is None:
            raise
        name = f"{kind.__module__}:{kind.__qualname__}"
        raise PluginError(f"trainer {name!r}: {doing} failed: {described(error)}") from error
