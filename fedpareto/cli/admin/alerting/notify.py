"""`fedpareto admin notify`: delivers alerts to the receivers that `notify.toml` names."""

import os
import signal
from functools import partial
from typing import Annotated

import typer

from fedpareto.cli.admin.app import Home
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.shared_options import LogFormatOption, LogLevelOption, json_option
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import event_stream

with on_first_use():
    from federation.monitoring.events import Events
    from federation.process.service_manager import ServiceManager
    from federation.transport.proxies import ProxyError
    from federation.trust.admin_files import Account
    from federation.trust.keys import IdentityError
    from fedpareto.cli.admin.client import find_home, opened_calls
    from fedpareto.cli.logs import to_standard_error
    from fedpareto.delivery import deliverer, targets_file
    from fedpareto.missing_packages import PackagesMissing


def notify(
    context: typer.Context,
    home: Home = None,
    test: Annotated[
        bool, typer.Option("--test", help="Send each receiver one message that says it is a test, and end.")
    ] = False,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
    as_json: Annotated[bool, json_option("Print one JSON object per event; with --test, one document.")] = False,
) -> None:
    """Deliver alerts by webhook, e-mail or chat.

    The receivers stand in notify.toml, in the administrator's directory. Each is told when an alert begins, gets worse
    and ends, and when no coordinator answers. The command runs until it is stopped (SIGTERM or Ctrl-C). What was told
    stands in the directory notify/ beside that file, so that a restart leaves nothing out.

    Exit code of --test: 0 when every receiver took the message, otherwise 1.
    """
    given, passphrase_file, proxy = context.obj
    directory = find_home(home or given)
    with failing(IdentityError, code=USAGE):
        federation_id = Account.load(directory).federation_id
    with failing(targets_file.TargetsError, code=USAGE):
        targets = targets_file.Targets.load(directory / targets_file.NAME)
    variables = dict(os.environ)
    if test:
        with failing(PackagesMissing, ProxyError, OSError, code=USAGE):
            problems = deliverer.try_all(targets, federation_id, variables)
        _show(problems, as_json=as_json)
        return
    to_standard_error(log_level, "%(asctime)s %(levelname)s %(message)s", log_format)
    manager = ServiceManager.of(os.environ)
    room, events = directory / deliverer.ROOM, Events(event_stream() if as_json else None)
    refused = failing(deliverer.RecordsInUse, PackagesMissing, ProxyError, IdentityError, OSError, code=USAGE)
    with refused, deliverer.locked(room):
        delivering = deliverer.Deliverer(room, federation_id, targets, events, variables)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: delivering.stop())
        names = ", ".join(sorted(targets.targets))
        events.tell("started", f"alerts of {federation_id} are delivered to {names}")
        manager.ready()
        source = partial(opened_calls, directory, passphrase_file=passphrase_file, proxy=proxy, served=True)
        delivering.run(source, manager.feed)
        manager.stopping()


def _show(problems: dict[str, str], *, as_json: bool) -> None:
    results = [{"target": name, "taken": not problem, "problem": problem} for name, problem in problems.items()]
    lines = [f"{name}: {problem or 'it has taken the message'}" for name, problem in problems.items()]
    answer(as_json, {"targets": results}, *lines)
    if failed := [name for name, problem in problems.items() if problem]:
        raise CommandFailure(
            f"{len(failed)} of {len(problems)} receivers did not take the message: {', '.join(failed)}"
        )
