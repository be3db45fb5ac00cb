"""Commands that must fail; and command lines in documents and container files, checked against the real one."""

import os
import pty
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from fedpareto.cli import completion
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.main import app


@cache
def fedpareto_command() -> Any:
    """The command line; its commands are loaded one by one."""
    return typer.main.get_command(app)


def failure(*arguments: str) -> CommandFailure:
    """How a command ends that must fail."""
    done = CliRunner().invoke(app, [*arguments])
    assert isinstance(done.exception, CommandFailure), done.output
    return done.exception


def completed(home: Path, line: str, *, wait: float = 60.0) -> list[str]:
    """What Tab offers at the end of a command line, for the administrator whose directory is given.

    `wait` is how long it waits for the coordinator, in seconds.
    """
    environment = {
        "_FEDPARETO_COMPLETE": "complete_bash",
        "COMP_WORDS": f"fedpareto {line}",
        "COMP_CWORD": str(line.count(" ") + 1),
        "FEDPARETO_ADMIN": str(home),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "WAIT_SECONDS", wait)
        done = CliRunner().invoke(app, [], env=environment, prog_name="fedpareto")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout.split()


def command_paths(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every group and every command, from the table, which loads none of them."""
    paths = [path]
    for name, inner in getattr(command or fedpareto_command(), "commands", {}).items():
        paths += command_paths(inner, (*path, name))
    return paths if path else [*paths, ("admin", "audit", "verify")]  # `audit` is both a command and a group


def problem(line: str, *, complete: bool = True) -> str | None:
    """Why `fedpareto` would not take this line; None when it would.

    Args:
        line: a shell command that begins with "fedpareto".
        complete: False for a mention in running text, which may leave out arguments.
    """
    asked = words = shlex.split(line, comments=True)
    if words[-1] == "...":
        words, complete = words[:-1], False
    command: Any = fedpareto_command()
    name, words = words[0], words[1:]
    context, path = None, name
    while True:
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        command = context.command  # in place of a row of the table
        context.resilient_parsing = False  # from here on a wrong word is an error
        try:
            values, words, _ = command.make_parser(context).parse_args(list(words))
        except Exception as error:  # click's classes and Typer's differ between releases
            return f"{path}: {error}"
        commands = getattr(command, "commands", None)
        if commands is None or not words:
            break
        name = words[0]
        if name not in commands:
            return f"{path} has no command {name!r}"
        command, words, path = commands[name], words[1:], f"{path} {name}"
    if words:
        return f"{path} takes no {words}"
    if complete and not {"--help", "--version"} & set(asked):
        missing = [p.name for p in command.params if p.required and p.name and values.get(p.name) in (None, ())]
        if missing or (getattr(command, "commands", None) and not command.invoke_without_command):
            return f"{path} lacks {missing or 'a command'}"
    return None


def at_a_terminal(*arguments: str, answer: str, meanwhile: Callable[[], object] = lambda: None) -> tuple[int, str, str]:
    """Runs the command with a terminal as its standard input, and types an answer once it asks.

    `meanwhile` is called between the question and the answer.

    Returns:
        The exit code, what it wrote, and what the terminal showed of the answer.
    """
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedpareto", *arguments],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    kill = threading.Timer(60, process.kill)
    kill.start()
    written = b""
    while not re.search(rb"(: |\]: )$", written) and (piece := os.read(process.stdout.fileno(), 1000)):
        written += piece
    meanwhile()
    os.write(terminal, f"{answer}\n".encode())
    written += process.stdout.read()
    code = process.wait()
    kill.cancel()
    os.set_blocking(terminal, False)
    try:
        echo = os.read(terminal, 10_000)
    except BlockingIOError:
        echo = b""
    process.stdout.close()
    os.close(end)
    os.close(terminal)
    return code, written.decode(), echo.decode()
