"""Checks command lines in documents and container files against the command line as it is."""

import shlex
from typing import Any

import typer.main

from fedpareto.cli.main import app


def problem(line: str, *, complete: bool = True) -> str | None:
    """Why `fedpareto` would not take this line; None when it would.

    Args:
        line: a shell command that begins with "fedpareto".
        complete: False for a mention in running text, which may leave out arguments.
    """
    words = shlex.split(line, comments=True)
    if words[-1] == "...":
        words, complete = words[:-1], False
    command: Any = typer.main.get_command(app)
    context = command.make_context("fedpareto", [], resilient_parsing=True)
    path, words = words[:1], words[1:]
    while words and (commands := getattr(command, "commands", None)):
        if words[0].startswith("-"):
            break
        if words[0] not in commands:
            return f"{' '.join(path)} has no command {words[0]!r}"
        command = commands[words[0]]
        context = command.make_context(words[0], [], parent=context, resilient_parsing=True)
        path, words = [*path, words[0]], words[1:]
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:  # click's classes and Typer's differ between releases
        return f"{' '.join(path)}: {error}"
    if rest:
        return f"{' '.join(path)} takes no {rest}"
    if complete and not {"--help", "--version"} & set(words):
        missing = [p.name for p in command.params if p.required and p.name and values.get(p.name) in (None, ())]
        if missing or getattr(command, "commands", None):
            return f"{' '.join(path)} lacks {missing or 'a command'}"
    return None
