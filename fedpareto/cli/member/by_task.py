"""Options of `worker run` that differ by task: [TASK=]VALUE."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import CodeOption, by_task
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.training.trainer_process import serve
    from federation.training.trainers import TrainerChoice


ObjectivesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TASK=]NAMES",
        help="The objectives that this client serves, for a task with several: left,right. Default: all. "
        "With several tasks: TASK=left,right, repeated.",
    ),
]
TrainerOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TASK=]NAME",
        help="The trainer, in place of the task's own: torch, the name that a package gives, or module:Class. "
        "With several tasks: TASK=NAME, repeated.",
    ),
]
TrainerCommandOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[TASK=]COMMAND",
        help="Train in a process of its own, which this command starts. Write TASK= if the command has a =.",
    ),
]
ProcessesOption = Annotated[
    int, typer.Option(min=1, help="Processes of this machine that train together, one for each GPU; see torchrun.")
]
TrainerSilenceOption = Annotated[
    float, typer.Option(min=1.0, help="Seconds without a message after which that process is ended.")
]


def served(texts: Sequence[str] | None, tasks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The objectives that the owner serves, by task."""
    named = by_task("--objectives", texts or (), tasks)
    return {name: tuple(part.strip() for part in names.split(",") if part.strip()) for name, names in named.items()}


def choices(
    names: Sequence[str] | None,
    commands: Sequence[str] | None,
    silence: float,
    tasks: Sequence[str],
    *,
    processes: int = 1,
    code: Sequence[Path] = (),
) -> "dict[str, TrainerChoice]":
    """The trainers that the owner names in place of the tasks' own.

    With several processes, a task without a command of its own is trained by these. `code` is where they find the
    owner's code.

    Raises:
        CommandFailure: a trainer and a command for one task.
    """
    named, started = by_task("--trainer", names or (), tasks), by_task("--trainer-command", commands or (), tasks)
    if twice := sorted(named.keys() & started.keys()):
        raise CommandFailure(f"{twice[0]}: choose one of --trainer and --trainer-command", code=USAGE)
    if processes > 1:
        together = {task: torchrun(processes, named.pop(task, ""), code) for task in tasks if task not in started}
        started |= together
    return {
        **{task: TrainerChoice(name=name) for task, name in named.items()},
        **{task: TrainerChoice(command=command, silence=silence) for task, command in started.items()},
    }


def torchrun(processes: int, name: str, code: Sequence[Path]) -> str:
    """The command that starts these processes of a trainer."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    served = ["-m", "fedpareto", "worker", "trainer", *([name] if name else [])]
    return shlex.join([*start, *served, *(part for directory in code for part in ("--code", str(directory)))])


def trainer_command(
    name: Annotated[str, typer.Argument(help="The trainer: torch, or module:Class. Default: the task's own.")] = "",
    code: CodeOption = None,
) -> None:
    """Train for a worker, over standard input and output.

    The worker starts this command: worker run --trainer-command "fedpareto worker trainer".
    """
    serve(name, os.environ)
