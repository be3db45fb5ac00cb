"""`fedpareto worker console`: the member's console, in a browser on this machine."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from federation.text import escaped
from fedpareto.cli.failure import USAGE, failing
from fedpareto.cli.member.member_command import member_command, site_config
from fedpareto.cli.shared_options import use_code
from fedpareto.on_first_use import on_first_use
from fedpareto.web.serving import DEFAULT_PORT

with on_first_use():
    from fedpareto.cli.member.site.own_statistics import own_statistics
    from fedpareto.cli.show.served_pages import serve_pages
    from fedpareto.web.serving import web_server
    from fedpareto.web.serving.security import EntranceKeys
    from fedpareto.web.site.site_pages import SiteConsole
    from worker.home import WorkerHome
    from worker.site.policy_file import Policy
    from worker.site.run_requests import RunRequest


@member_command(keys=False)
def console_command(
    home: "WorkerHome",
    as_json: bool,
    host: Annotated[str, typer.Option(help="The address to listen on, of this machine alone.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"The port. Default: {DEFAULT_PORT}, or any if that is taken."),
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
) -> None:
    """Show your site in a browser: what it does, was asked, has sent and spent.

    The pages read the files of the worker's directory, also while the worker or the coordinator is down. The page of a
    run that describes data reads your data when you ask it for the numbers that would leave. The console holds no key
    and takes no lock of the directory. Pause, resume, approve and refuse write your decision into it, as the commands
    of these names do; a worker that runs reads it within two seconds.

    Only this machine reaches the pages. The address that is printed works once, within a minute; Enter prints another
    one. From another machine: ssh -L 8446:127.0.0.1:8446 THIS-MACHINE.
    """
    with failing(ValueError, OSError, code=USAGE, what=f"cannot listen on {host}"):
        listening = web_server.listen(host, port)
    keys = EntranceKeys(time.monotonic)
    with listening:
        app = SiteConsole(home, keys, partial(_numbers, home)).guarded(listening.getsockname()[1])
        where = str(home.directory)
        serve_pages(
            app, listening, keys, "/", escaped(where), {"home": where},
            as_json=as_json, browser=not no_browser, stopping=lambda: None,
        )  # fmt: skip


def _numbers(home: "WorkerHome", run: "RunRequest") -> Sequence[str] | None:
    """What this site would tell in a run that describes data, as lines; None for other runs."""
    site = site_config(home.directory, None)
    use_code([Path(directory) for directory in site.code], "worker.toml: code")
    own = own_statistics(run, site, Policy.load(home.policy))
    return None if own is None else [*own.lines()]
