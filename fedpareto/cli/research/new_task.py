"""`fedpareto new`: a task of one's own to begin with."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.starter import made_data, starter_files


class DataKind(StrEnum):
    """The kinds of data."""

    TABULAR = "tabular"
    IMAGES = "images"
    TEXT = "text"


def new_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory, for all files.")],
    kind: Annotated[DataKind, typer.Option(help="The kind of data.")] = DataKind.TABULAR,
    as_json: JsonOption = False,
) -> None:
    """Write a task of your own that runs as it is.

    The task is a Python class of about 25 lines, with a test and a specification, on invented data of three sites. A
    patient has several rows, which stay in one split, and the splits keep the shares of the classes. Nothing is
    downloaded. Then change it to suit your data.

        fedpareto new mine --kind images

        python -m pytest mine
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CommandFailure(f"{directory} is there already: name a new directory; nothing was touched", code=USAGE)
    starter, where = starter_files.STARTERS[kind], shlex.quote(str(directory))
    members = " ".join(f"--member {site}={where}/data/{site}" for site in made_data.SITES)
    held = f" --statistics {where}/held.toml" if starter.describes else ""
    local = f"fedpareto local {where}/run.toml{held} {members} --code {where}"
    with failing(OSError):
        written = starter_files.write(kind, directory, local)
    commands = [f"python -m pytest {where}", local]
    document = {
        "directory": str(directory),
        "kind": str(kind),
        "task": f"{starter.module}:{starter.name}",
        "files": [str(path) for path in written],
        "commands": commands,
    }
    answer(as_json, document, *map(str, written), "", "Type next:", *(f"    {command}" for command in commands))
