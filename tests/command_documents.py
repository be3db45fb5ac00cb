"""Compares the output of commands with --json with docs/schemas/output.json, in every test that runs one."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from tests.command_lines import fedpareto_command
from tests.paths import DOCS

FILE = DOCS / "schemas" / "output.json"


@cache
def validator(command: str) -> Any:
    """The schema of a command, ready to use."""
    with pytest.MonkeyPatch.context() as patch:
        # It is for checks of formats, which nobody asks for here, and takes a second to make its grammar.
        patch.setitem(sys.modules, "rfc3987_syntax", None)
        from jsonschema import Draft202012Validator

    schemas = json.loads(FILE.read_text())
    return Draft202012Validator({"$defs": schemas["$defs"], "$ref": f"#/$defs/{command.replace(' ', '%20')}"})


def command_of(arguments: Sequence[str]) -> str:
    """The command in a command line; options between a group and its command are passed over."""
    path: list[str] = []
    commands: Any = fedpareto_command().commands
    for word in arguments:
        if word in commands:
            path.append(word)
            commands = getattr(commands[word], "commands", {"verify": None} if path == ["admin", "audit"] else {})
    return " ".join(path)


def documents(output: str) -> Iterator[Any]:
    """The JSON documents of an output: one, or one on each line."""
    try:
        yield json.loads(output)
    except ValueError:
        yield from map(json.loads, output.splitlines())


def check_suits(arguments: Sequence[str], code: int, output: str) -> None:
    """Fails if a command with --json printed a document that its schema does not describe."""
    if "--json" not in arguments or "--help" in arguments or not output.strip() or code == 2:
        return
    command = command_of(arguments)
    for document in documents(output):
        error = next(validator(command).iter_errors(document), None)
        assert error is None, f"{command} --json: {error.message} at {error.json_path}"
