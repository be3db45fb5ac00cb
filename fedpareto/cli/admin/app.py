"""The parts that the commands of `fedpareto admin` share: options, the call, and the display of an answer."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.shared_options import AdminPassphraseOption, JsonOption, ProxyOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from federation.v1.admin_pb2_grpc import AdminStub

DEFAULT_HOME = Path("fedpareto-demo/coordinator/admin")

app = typer.Typer(
    help="Operate a federation: its members, its runs, its rounds.\n\n"
    "A RUN is named by its id, by an unambiguous beginning of the id, or by its name.",
    no_args_is_help=True,
)

AdminHome = Annotated[Path, typer.Option(envvar="FEDPARETO_ADMIN", help="The administrator's directory.")]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home", help="The administrator's directory; can also stand before the command.", show_default=False
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, the beginning of its id, or its name.")]
Reason = Annotated[str, typer.Option(help="Reason, for the record.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask first.")]
ClientName = Annotated[str, typer.Argument(metavar="CLIENT", help="The client's name.")]

Answer = tuple[Any, "str | Callable[[], RenderableType]"]  # for programs and for people


class Late:
    """A module that loads slowly: it is imported when one of its names is first used, so that `--help` is quick."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


@app.callback()
def _options(
    context: typer.Context,
    home: AdminHome = DEFAULT_HOME,
    passphrase_file: AdminPassphraseOption = None,
    proxy: ProxyOption = None,
) -> None:
    context.obj = home, passphrase_file, proxy


def connected(context: typer.Context, home: Path | None) -> "AbstractContextManager[AdminStub]":
    """The Admin service, as the administrator of `home`; see `fedpareto.cli.admin.client.connect`."""
    from fedpareto.cli.admin.client import connect

    given, passphrase_file, proxy = context.obj
    return connect(home or given, passphrase_file=passphrase_file, proxy=proxy)


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Answer]], None]:
    """Adds a command of `fedpareto admin` that calls the Admin service.

    The decorated function gets the service and the command's arguments, and returns the answer as a document for --json
    and, for people, as a sentence or as a function that makes a table. The options --home and --json are added.

    Args:
        name: the command's name; the default is the function's.
        settings: Typer's settings of the command.
    """

    def add(function: Callable[..., Answer]) -> None:
        def run(context: typer.Context, home: Home = None, as_json: JsonOption = False, **arguments: Any) -> None:
            with connected(context, home) as stub:
                document, picture = function(stub, **arguments)
            show(as_json, document, picture)

        _, *own = inspect.signature(function).parameters.values()
        context, *shared, _ = inspect.signature(run).parameters.values()
        typed: Any = run
        typed.__signature__ = inspect.Signature([context, *own, *shared])
        run.__doc__ = function.__doc__
        app.command(name or function.__name__.replace("_", "-"), **settings)(run)

    return add


def show(as_json: bool, document: Any, picture: "str | Callable[[], RenderableType]") -> None:
    """Prints one JSON document, or a sentence or picture for people."""
    if as_json:
        from fedpareto.cli.document import dumps

        typer.echo(dumps(document))
    else:
        from rich.text import Text

        from fedpareto.cli.show.tables import console

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
