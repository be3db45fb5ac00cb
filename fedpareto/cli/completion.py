"""Completion with Tab: `fedpareto completion`, which prints the script of a shell, and the names that it offers.

They are built-in names, those of installed packages and `--code`, and those of a federation.

Names of a federation come from its coordinator, with the login of the last command. Where there is none, or the
coordinator does not answer at once, Tab completes nothing and says nothing.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import without_links
from fedpareto.cli.commands import load
from fedpareto.cli.shared_options import DEFAULT_ADMIN_HOME

WAIT_SECONDS = 1.0  # for the coordinator
Offer = tuple[str, str]  # a name, and what shells show beside it
# Typer's own script gives the words as bash splits them, at "=" and ":", too. This one gives the line, as in fish, and
# takes off each offer what bash keeps: it replaces only what follows the last "=" or ":" of a word.
_BASH = """_fedpareto_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" offer
    local word="${line##* }"
    local kept="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS=$'\\t' read -r offer _; do
        COMPREPLY+=("${offer#"$kept"}")
    done < <(_FEDPARETO_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS="$line" "$1")
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
}
complete -o default -F _fedpareto_completion fedpareto"""


class Shell(StrEnum):
    """The shells that complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion_command(shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="Your shell.")]) -> None:
    """Print the script with which a shell completes commands by Tab.

    Tab then offers commands, options, tasks and algorithms; also runs and members, where --home or FEDPARETO_ADMIN
    names your directory and your login holds. In ~/.bashrc write:

        source <(fedpareto completion bash)

    In ~/.zshrc, after compinit:

        source <(fedpareto completion zsh)

    In ~/.config/fish/config.fish:

        fedpareto completion fish | source

    Or write the script once into the directory in which your shell looks for completions: a new terminal then opens
    sooner.
    """
    if shell is Shell.BASH:
        typer.echo(_BASH)
        return
    script = import_module("typer.completion").get_completion_script
    typer.echo(script(prog_name="fedpareto", complete_var="_FEDPARETO_COMPLETE", shell=shell.value))


def _names_of(module: str) -> Callable[[str], list[str]]:
    """Completes the names that the function `names` of a module returns; the module is loaded when Tab is pressed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in import_module(module).names() if name.startswith(incomplete)]

    return complete


algorithms = _names_of("federation.aggregation.registry")
attacks = _names_of("federation.attacks.catalogue")
reasons = _names_of("fedpareto.cli.reasons.known_reasons")
experiments = _names_of("fedpareto.experiments.loading")


def tasks(incomplete: str) -> list[str]:
    """Names of tasks."""
    return [offer.name for offer in import_module("federation.tasks").available() if offer.name.startswith(incomplete)]


def worker_keys(incomplete: str) -> list[Offer]:
    """Keys of worker.toml, with what each means; and attacks, as the value of their key."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [(f"attack={name}", "") for name in attacks(value)] if key == "attack" else []
    config = import_module("worker.config").WorkerConfig
    rows = [(f"{name}=", without_links(str(config.model_fields[name].description))) for name in config.names()]
    return [row for row in rows if row[0].startswith(incomplete)]


def _of_federation(kind: str) -> Callable[[typer.Context, str], list[Offer]]:
    """Completes names that a function of `offered_names` reads, without those that the line has already."""

    def complete(context: typer.Context, incomplete: str) -> list[Offer]:
        given = {word for value in context.params.values() if isinstance(value, list | tuple) for word in value}
        offers = _in_time(partial(_read, kind, context, incomplete))
        return [offer for offer in offers if offer[0] not in given]

    return complete


runs = _of_federation("runs")
open_runs = _of_federation("open_runs")
members = _of_federation("members")
pending = _of_federation("pending")
open_requests = _of_federation("open_requests")


def run_requests(context: typer.Context, incomplete: str) -> list[Offer]:
    """Runs that have asked the site of a worker: the file of its home has them."""

    def read() -> list[Offer]:
        path = import_module("worker.home").WorkerHome(Path(_given(context, "home"))).runs
        if not path.exists():
            return []
        with closing(import_module("worker.site.run_requests").RunsFile(path)) as file:
            asked = {run.run: run.name for run in file.runs()}
        names = Counter(asked.values())
        offers = [(name, run) if names[name] == 1 else (run, name) for run, name in asked.items()]
        return [offer for offer in offers if offer[0].startswith(incomplete)]

    return _in_time(read)


def _read(kind: str, context: typer.Context, incomplete: str) -> list[Offer]:
    home = _given(context, "home") or os.environ.get("FEDPARETO_ADMIN") or DEFAULT_ADMIN_HOME
    read: Callable[..., Iterable[Offer]] = getattr(import_module("fedpareto.cli.offered_names"), kind)
    with load("admin.client:logged_in")(Path(home), proxy=_given(context, "proxy")) as stub:
        return list(read(stub, incomplete))


def _given(context: Any, option: str) -> Any:
    """An option of the command or of its group."""
    while context is not None:
        if context.params.get(option):
            return context.params[option]
        context = context.parent
    return None


def _in_time(read: Callable[[], list[Offer]]) -> list[Offer]:
    """What a function returns; nothing if it fails, or takes longer than `WAIT_SECONDS`.

    It runs in a thread that does not keep the process alive: a name server may block for long.
    """
    found = list[Offer]()

    def call() -> None:
        with suppress(Exception):  # Tab has nowhere to say what is wrong; the command itself says it
            found.extend(read())

    thread = threading.Thread(target=call, name="completion", daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    return found if not thread.is_alive() else []
