"""`fedpareto console`: the operators' console, in a browser on this machine."""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated
from urllib.parse import urlencode

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.shared_options import (
    DEFAULT_ADMIN_HOME,
    AdminHome,
    AdminPassphraseOption,
    JsonOption,
    ProxyOption,
)
from fedpareto.on_first_use import on_first_use
from fedpareto.web.serving import DEFAULT_PORT

with on_first_use():
    from federation.trust.admin_files import Account
    from federation.trust.keys import IdentityError
    from fedpareto.cli.admin.client import find_home, opened_calls
    from fedpareto.cli.show.served_pages import serve_pages
    from fedpareto.web.console.application import Console
    from fedpareto.web.console.federation_reader import Reader
    from fedpareto.web.console.page_events import ChangeBell
    from fedpareto.web.console.render import ConsoleSite
    from fedpareto.web.console.screens import compare_page
    from fedpareto.web.serving import web_server
    from fedpareto.web.serving.security import EntranceKeys


def console_command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            autocompletion=completion.runs,
            help="The page to open: of one run, or the comparison of two to six. Default: the federation.",
            show_default=False,
        ),
    ] = None,
    home: AdminHome = DEFAULT_ADMIN_HOME,
    host: Annotated[str, typer.Option(help="The address to listen on, of this machine alone.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"The port. Default: {DEFAULT_PORT}, or any if that is taken."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    passphrase_file: AdminPassphraseOption = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the federation in a browser, live and read-only.

    The console runs on your machine, with your administrator's certificate and no more rights than your role. Its pages
    change nothing: where something has to be done, they show the command to copy. It may end at any time, and the
    federation does not notice.

    Only this machine reaches the pages. The address that is printed works once, within a minute; Enter prints another
    one. From another machine: ssh -L 8446:127.0.0.1:8446 THIS-MACHINE.
    """
    names = runs or []
    if len(names) > compare_page.MOST:
        raise CommandFailure(f"{len(names)} runs: the console compares at most {compare_page.MOST}", code=USAGE)
    directory = find_home(home)
    with failing(IdentityError, code=USAGE):
        account = Account.load(directory)
    with failing(ValueError, OSError, code=USAGE, what=f"cannot listen on {host}"):
        listening = web_server.listen(host, port)
    bell, keys = ChangeBell(), EntranceKeys(time.monotonic)
    reader = Reader(partial(opened_calls, home, passphrase_file=passphrase_file, proxy=proxy), bell.ring, keys.root)
    console = Console(_site(account, home), reader, bell, keys)
    with ExitStack() as stack:
        stack.callback(listening.close)
        stack.callback(reader.stop)
        reader.start()
        serve_pages(
            console.guarded(listening.getsockname()[1]), listening, keys, _page(names), account.federation_id,
            {"federation": account.federation_id}, as_json=as_json, browser=not no_browser, stopping=bell.stop,
        )  # fmt: skip


def _page(names: list[str]) -> str:
    if not names:
        return "/"
    return f"/runs/{quote(names[0])}" if len(names) == 1 else f"/compare?{urlencode([('run', name) for name in names])}"


def _site(account: "Account", home: Path) -> "ConsoleSite":
    if home == DEFAULT_ADMIN_HOME:
        return ConsoleSite(account.federation_id, account.name)
    where = f" --home {quote(str(home))}"
    return ConsoleSite(account.federation_id, account.name, f"fedpareto admin{where}", where)
