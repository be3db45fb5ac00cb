"""Trainers by name: the built-in ones, those of installed packages, and `module:Class`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from federation.owners_code import described, owners_frame, passes
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
        """The trainer. Errors as of the class, and of `make_trainer`."""
        more = {"command": self.command, "silence": self.silence} if self.command else {}
        return make_trainer(self.kind(task), task, data, device, threads, objectives, **more)


def make_trainer(kind: type[Trainer], *given: Any, **more: Any) -> Trainer:
    """A trainer of this class, made as `Trainer.__init__` says.

    Raises:
        PluginError: the class cannot be made so, its code raised an exception, or its `__init__` does not call that of
            `Trainer`.
    """
    with trainer_code(kind, "preparing it"):
        try:
            trainer = kind(*given, **more)
        except TypeError as error:
            if owners_frame(error) is not None:
                raise
            # The call itself failed: __init__ takes other arguments, or a method is missing.
            given_to = "; it is given a task, its data, a device, threads and objectives, as that of Trainer is"
            raise PluginError(f"trainer {_name(kind)!r}: {error}{given_to * ('__init__' in str(error))}") from error
    trainer.check_can_be_made()
    return trainer


def close_trainer(trainer: Trainer) -> None:
    """Closes a trainer. Raises PluginError: its code raised an exception."""
    with trainer_code(type(trainer), "closing it"):
        trainer.close()


@contextmanager
def trainer_code(kind: type[Trainer], doing: str) -> Iterator[None]:
    """Turns an error of an owner's own trainer into a PluginError that says where it was raised.

    `doing` is what the trainer is asked for, such as "preparing it". Other errors are passed on as they are, but for
    those that would end the process.
    """
    try:
        yield
    except (TaskError, DataError, PartError, MemoryError):
        raise
    except BaseException as error:
        if passes(error) or (isinstance(error, Exception) and owners_frame(error) is None):
            raise
        raise PluginError(f"trainer {_name(kind)!r}: {doing} failed: {described(error)}") from error


def _name(kind: type[Trainer]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
