"""Trainers that the owner names in place of the tasks' own, and `fedpareto worker trainer`, which serves one."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fedpareto.cli.shared_options import CodeOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.training.trainer_process import serve
    from federation.training.trainers import TrainerChoice
    from worker.config import WorkerConfig


def trainers_of(config: "WorkerConfig") -> "dict[str, TrainerChoice]":
    """The trainers that the owner names in place of the tasks' own.

    With several processes, a task without a command of its own is trained by these.
    """
    named, started = config.of_tasks("trainer"), config.of_tasks("trainer_command")
    if config.processes > 1:
        code = config.code
        started |= {
            task: torchrun(config.processes, named.pop(task, ""), code) for task in config.tasks if task not in started
        }
    return {
        **{task: TrainerChoice(name=name) for task, name in named.items()},
        **{task: TrainerChoice(command=command, silence=config.trainer_silence) for task, command in started.items()},
    }


def torchrun(processes: int, name: str, code: Sequence[str]) -> str:
    """The command that starts these processes of a trainer."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    served = ["-m", "fedpareto", "worker", "trainer", *([name] if name else [])]
    return shlex.join([*start, *served, *(part for directory in code for part in ("--code", directory))])


def trainer_command(
    name: Annotated[str, typer.Argument(help="The trainer: torch, or module:Class. Default: the task's own.")] = "",
    code: CodeOption = None,
) -> None:
    """Train for a worker, over standard input and output.

    The worker starts this command: worker run --set "trainer_command=fedpareto worker trainer".
    """
    serve(name, os.environ)
