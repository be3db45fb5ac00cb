"""What the commands of `fedpareto admin` share: who calls, the way to the coordinator, and how an answer is shown."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli.failure import USAGE, Failure

if TYPE_CHECKING:
    from rich.console import RenderableType

    from federation.v1.admin_pb2_grpc import AdminStub

DEFAULT_HOME = Path("fedpareto-demo/coordinator/admin")

app = typer.Typer(
    help="Operate a federation: its members, its runs, its rounds.\n\n"
    "A RUN is named by its id, by an unambiguous beginning of the id, or by its name.",
    no_args_is_help=True,
)

Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="The administrator's directory; can also stand before the command.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, the beginning of its id, or its name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]
ClientName = Annotated[str, typer.Argument(metavar="CLIENT", help="The client's name.")]


@dataclass(frozen=True)
class _Who:
    home: Path
    passphrase_file: Path | None


@app.callback()
def _options(
    context: typer.Context,
    home: Annotated[Path, typer.Option(envvar="FEDPARETO_ADMIN", help="The administrator's directory.")] = DEFAULT_HOME,
    passphrase_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the passphrase of the administrator's key.")
    ] = None,
) -> None:
    context.obj = _Who(home, passphrase_file)


def connected(context: typer.Context, home: Path | None, *, reads: bool = False) -> "AbstractContextManager[AdminStub]":
    """The Admin service, as the administrator of `home`; `reads` as for `fedpareto.cli.client.connect`."""
    from fedpareto.cli.client import connect

    who: _Who = context.obj
    return connect(home or who.home, passphrase_file=who.passphrase_file, reads=reads)


def show(as_json: bool, document: Any, picture: "Callable[[], RenderableType]") -> None:
    """One JSON document for programs, or a picture for people."""
    if as_json:
        from fedpareto.cli.document import dumps

        typer.echo(dumps(document))
    else:
        from fedpareto.cli.render import console

        console().print(picture())


def confirm(yes: bool, question: Callable[[], str]) -> None:
    """Asks before something that cannot be undone, unless the answer was given with --yes.

    Raises:
        Failure: there is no terminal to ask at, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure("this cannot be undone, and there is no terminal to ask at: give --yes", code=USAGE)
    if not typer.confirm(question(), err=True):
        raise Failure("nothing was changed")


def sentence(message: str) -> "Callable[[], RenderableType]":
    """A picture that is one line of text."""
    from rich.text import Text

    return lambda: Text(message)
