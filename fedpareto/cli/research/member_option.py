"""The option --member NAME=DIR: members with data of their own, for `local` and `simulate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.trust.identity import NAME_PATTERN


MemberOption = Annotated[
    list[str] | None,
    typer.Option(
        "--member",
        metavar="NAME=DIR",
        help="A member, and the directory of its own data; repeat it for each.",
        show_default=False,
    ),
]


def members_of(texts: Sequence[str] | None) -> dict[str, Path]:
    """The directory of each member, by name, from the values of --member."""
    members: dict[str, Path] = {}
    for text in texts or ():
        name, equals, directory = text.partition("=")
        if not equals or not NAME_PATTERN.fullmatch(name):
            raise CommandFailure(
                f"--member {text}: write NAME=DIR, with a name of lower-case letters, digits and hyphens", code=USAGE
            )
        if name in members:
            raise CommandFailure(f"--member {text}: {name} is named already; give each member its own name", code=USAGE)
        if not directory or not Path(directory).is_dir():
            raise CommandFailure(f"--member {text}: {directory or 'an empty text'} is not a directory", code=USAGE)
        members[name] = Path(directory).absolute()
    return members
