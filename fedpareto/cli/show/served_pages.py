"""How a console reaches a person: the address that is printed, the browser, and the server until Ctrl-C."""

import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack

import typer

from fedpareto.cli.document import dumps
from fedpareto.standard_streams import print_document
from fedpareto.web.serving import web_server
from fedpareto.web.serving.security import App, EntranceKeys


def serve_pages(
    app: App,
    listening: socket.socket,
    keys: EntranceKeys,
    page: str,
    of: str,
    document: dict[str, str],
    *,
    as_json: bool,
    browser: bool,
    stopping: Callable[[], None],
) -> None:
    """Prints the address of a console of the federation or worker `of`, and serves until a signal.

    `document` adds to what --json prints; Enter on a terminal prints another address.
    """
    base = web_server.address(listening)
    with ExitStack() as stack:
        url = web_server.entrance(base, keys, page)
        if as_json:
            print_document(dumps({"url": url, "address": base + keys.root, **document}))
        else:
            typer.echo(f"The console of {of} is at {base}{keys.root}.")
            typer.echo("This address works once, within a minute:")
            typer.echo(f"    {url}")
            typer.echo("Enter prints another one; Ctrl-C ends the console.")
        sys.stdout.flush()
        if browser and not as_json and sys.stdout.isatty():
            stack.enter_context(web_server.browsing(url, webbrowser.open))
        _offer_keys(lambda: web_server.entrance(base, keys, page))
        web_server.run(app, listening, stopping)


def _offer_keys(new_url: Callable[[], str]) -> None:
    """Prints another address for each line on a terminal's standard input."""
    if not sys.stdin.isatty():
        return

    def read() -> None:
        for _ in sys.stdin:
            typer.echo(f"    {new_url()}")

    threading.Thread(target=read, name="console-keys", daemon=True).start()
