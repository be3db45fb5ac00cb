"""The `fedpareto` command: its groups, and how errors are shown.

Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted, 141 the reader of the output has ended.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

import fedpareto
from federation.owners_code import described, owners_frame
from federation.text import escaped_lines
from federation.transport.tls import require_tls13
from fedpareto.cli.commands import TableGroup
from fedpareto.cli.failure import INTERRUPTED, CommandFailure
from fedpareto.cli.shared_options import DEFAULT_ADMIN_HOME, AdminHome, AdminPassphraseOption, ProxyOption
from fedpareto.standard_streams import OutputError, take_over

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

Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted, 141 the reader of the output has ended, as `head`
does.
"""

_ADMIN_HELP = """Operate a federation: its members, its runs, its rounds.

A RUN is named by its id, by an unambiguous beginning of the id, or by its name.
"""
_EXPERIMENT_HELP = """Run the papers' experiments.

The results are compared with the published numbers.

An experiment has a run specification, methods to compare, and several seeds. List the experiments, with their time
and whether their data was found:

    fedpareto experiment list --data DATA

Run the quick form in minutes, then the whole experiment. After Ctrl-C, the same command continues it:

    fedpareto experiment run fedfv-table3 --data DATA --quick

    fedpareto experiment run fedfv-table3 --data DATA

Results go to results/NAME (results/NAME-quick, with --rounds results/NAME-N-rounds): runs.jsonl with a line for each
run, table.md, figures.
"""


def _group(help_text: str, **settings: Any) -> typer.Typer:
    return typer.Typer(cls=TableGroup, help=help_text, no_args_is_help=True, rich_markup_mode=None, **settings)


app = _group(
    _HELP,
    name="fedpareto",
    pretty_exceptions_enable=False,  # a traceback with local variables could show a key
    context_settings={"help_option_names": ["-h", "--help"]},
)
admin = _group(_ADMIN_HELP)
worker = _group("A member's worker: join a federation, and train for it.")
worker.add_typer(_group("The members and keys that are trusted in private rounds."), name="roster")
app.add_typer(_group("The coordinator: make a federation, and run its daemon."), name="coordinator")
app.add_typer(worker, name="worker")
app.add_typer(admin, name="admin")
app.add_typer(_group(_EXPERIMENT_HELP), name="experiment")
app.add_typer(_group("Differential privacy: plan noise before a run."), name="privacy")
app.add_typer(_group("Show which samples each client would hold."), name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedpareto {fedpareto.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@admin.callback()
def _admin_options(
    context: typer.Context,
    home: AdminHome = DEFAULT_ADMIN_HOME,
    passphrase_file: AdminPassphraseOption = None,
    proxy: ProxyOption = None,
) -> None:
    context.obj = home, passphrase_file, proxy


@cache
def program() -> Callable[[], object]:
    """The entry point of the console script; its commands are loaded when they are called."""
    return typer.main.get_command(app)


def main() -> None:
    """The console script."""
    take_over()
    require_tls13()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its core tells standard error of every failed handshake
    if "_FEDPARETO_COMPLETE" in os.environ:
        os.environ["COLUMNS"] = "10000"  # Typer wraps the words beside an offer, and shells take each line for an offer
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        try:
            program()()
        finally:
            sys.stdout.flush()
            gc.freeze()  # Python would look for cycles in all that was imported before it ends: 0.2 CPU seconds
    except (CommandFailure, OutputError) as failure:
        _fail(failure)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as error:
        if owners_frame(error) is None:
            raise  # each command ends so
        _fail(CommandFailure(f"code of your own tried to end the command: {described(error)}"))


def _fail(failure: CommandFailure | OutputError) -> NoReturn:
    if failure.message:
        typer.echo(f"fedpareto: {escaped_lines(failure.message)}", err=True)
    sys.exit(failure.code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends the command, but not in the middle of an import: some libraries swallow the exception there."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _IMPORT_PAUSE)
            return
        frame = frame.f_back
    raise KeyboardInterrupt
