"""The parts that the commands of `fedpareto admin` share: options, the call, and the display of an answer."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from rich.console import RenderableType
    from rich.text import Text

    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.admin.client import connect
    from fedpareto.cli.document import dumps
    from fedpareto.cli.show.tables import console


Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="The administrator's directory; can also stand before the command.", show_default=False
    ),
]
_RUN: dict[str, Any] = {"metavar": "RUN", "help": "The run's id, the beginning of its id, or its name."}
RunName = Annotated[str, typer.Argument(**_RUN, autocompletion=completion.runs)]
OpenRunName = Annotated[str, typer.Argument(**_RUN, autocompletion=completion.open_runs)]
Reason = Annotated[str, typer.Option(help="Reason, for the record.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]
ClientName = Annotated[
    str, typer.Argument(metavar="MEMBER", help="The member's name.", autocompletion=completion.members)
]

Answer = tuple[Any, "str | Callable[[], RenderableType]"]  # for programs and for people


def connected(context: typer.Context, home: Path | None) -> "AbstractContextManager[AdminStub]":
    """The Admin service, as the administrator of `home`; see `fedpareto.cli.admin.client.connect`."""
    given, passphrase_file, proxy = context.obj
    return connect(home or given, passphrase_file=passphrase_file, proxy=proxy)


def command(function: Callable[..., Answer]) -> Callable[..., None]:
    """A command of `fedpareto admin` that calls the Admin service.

    The decorated function gets the service and the command's arguments, and returns the answer as a document for --json
    and, for people, as a sentence or as a function that makes a table. The options --home and --json are added.
    """

    def run(context: typer.Context, home: Home = None, as_json: JsonOption = False, **arguments: Any) -> None:
        with connected(context, home) as stub:
            document, picture = function(stub, **arguments)
        show(as_json, document, picture)

    _, *own = inspect.signature(function).parameters.values()
    context, *shared, _ = inspect.signature(run).parameters.values()
    typed: Any = run
    typed.__signature__ = inspect.Signature([context, *own, *shared])
    run.__doc__ = function.__doc__
    return run


def show(as_json: bool, document: Any, picture: "str | Callable[[], RenderableType]") -> None:
    """Prints one JSON document, or a sentence or picture for people."""
    if as_json:
        print_document(dumps(document))
    else:
        console().print(Text(picture) if isinstance(picture, str) else picture())


def confirm(yes: bool, question: Callable[[], str], *, why: str = "this cannot be undone") -> None:
    """Asks before an action that cannot be undone, unless --yes was given; `why` is the reason in the error.

    Raises:
        CommandFailure: there is no terminal to ask at, or the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailure(f"{why}, and there is no terminal to ask at: give --yes", code=USAGE)
    if not typer.confirm(question(), err=True):
        raise CommandFailure("nothing was changed")
