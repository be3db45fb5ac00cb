"""The `fedpareto` command: its groups, and how errors are shown.

Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Annotated

import typer

from federation.line.tls import require_tls13
from federation.text import escaped_lines
from fedpareto.cli.admin import runs
from fedpareto.cli.bundle import verify_command
from fedpareto.cli.coordinator import daemon
from fedpareto.cli.coordinator.backup import backup_command, restore_command
from fedpareto.cli.demo import demo_command
from fedpareto.cli.failure import INTERRUPTED, CommandFailure
from fedpareto.cli.member import roster, worker
from fedpareto.cli.member.by_task import trainer_command
from fedpareto.cli.member.doctor import doctor_command
from fedpareto.cli.member.next_keys import renew_command, rotate_coordinator_key_command, rotate_key_command
from fedpareto.cli.member.personal import export_command
from fedpareto.cli.member.run_requests import approve_command, refuse_command, runs_command
from fedpareto.cli.member.site_record import log_command, receipts_command
from fedpareto.cli.member.site_record import verify_command as verify_own_command
from fedpareto.cli.report import report_command
from fedpareto.cli.research import data, experiment
from fedpareto.cli.research.aggregate import aggregate_command
from fedpareto.cli.research.simulate import simulate_command

_IMPORT_PAUSE = 0.05  # seconds from an interrupt that arrives in an import to the next attempt
_HELP = """Federated learning that is fair to each member.

Members keep their data. A coordinator sends a model to their workers, receives signed updates, and combines them by
multi-gradient descent. Members that would gain least get more weight. Scaling an update does not make it count more.

A demonstration on this machine, in three minutes:

    fedpareto demo

Runs with simulated clients, and the papers' experiments:

\b
    fedpareto simulate run.toml
    fedpareto experiment list

A federation of your own, step by step:

\b
    fedpareto coordinator init --home coordinator
    fedpareto coordinator serve --home coordinator
    fedpareto admin --home coordinator/admin join-string hospital-a
    fedpareto worker join --home hospital-a
    fedpareto worker run --home hospital-a --task digits
    fedpareto admin --home coordinator/admin submit run.toml --watch
    fedpareto report RUN --home coordinator/admin

All keys of a run specification: `fedpareto admin submit --explain`.

Exit codes: 0 done, 1 the work failed, 2 bad usage.
"""

app = typer.Typer(
    name="fedpareto",
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a traceback with local variables could show a key
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo_command)
daemon.app.command("backup")(backup_command)
daemon.app.command("restore")(restore_command)
daemon.app.command("rotate-key")(rotate_coordinator_key_command)
app.add_typer(daemon.app, name="coordinator")
worker.app.add_typer(roster.app, name="roster")
worker.app.command("doctor")(doctor_command)
worker.app.command("renew")(renew_command)
worker.app.command("rotate-key")(rotate_key_command)
worker.app.command("export")(export_command)
worker.app.command("trainer")(trainer_command)
worker.app.command("runs")(runs_command)
worker.app.command("approve")(approve_command)
worker.app.command("refuse")(refuse_command)
worker.app.command("receipts")(receipts_command)
worker.app.command("log")(log_command)
worker.app.command("verify")(verify_own_command)
app.add_typer(worker.app, name="worker")
app.add_typer(runs.app, name="admin")
app.command("simulate")(simulate_command)
app.add_typer(experiment.app, name="experiment")
app.command("report")(report_command)
app.add_typer(data.app, name="data")
app.command("aggregate")(aggregate_command)
app.command("verify")(verify_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fedpareto import __version__

        typer.echo(f"fedpareto {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@cache
def program() -> Callable[[], object]:
    """The entry point of the console script; making all its commands takes 0.03 CPU seconds."""
    return typer.main.get_command(app)


def main() -> None:
    """The console script."""
    require_tls13()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its core tells standard error of every failed handshake
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        program()()
    except CommandFailure as failure:
        typer.echo(f"fedpareto: {escaped_lines(failure.message)}", err=True)
        sys.exit(failure.code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the command, but not in the middle of an import: some libraries swallow the exception there."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_PAUSE)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
