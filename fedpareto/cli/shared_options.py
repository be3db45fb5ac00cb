"""Options that several commands share."""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.code_path import VARIABLE, append
from fedpareto.standard_streams import separate_documents

_DISTANCE = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def _use(context: typer.Context, directories: list[Path] | None) -> list[Path] | None:
    """Makes the directories importable; warns of modules in them that Python does not import."""
    if directories and context.resilient_parsing:  # completion of a line that is not finished
        with suppress(OSError):
            append(directories)
    elif directories:
        use_code(directories, "--code")
    return directories


def use_code(directories: Sequence[Path], named_by: str) -> None:
    """Makes directories of an owner's code importable; warns of modules in them that Python does not import.

    Raises:
        CommandFailure: one of them is not a directory; `named_by` begins the message.
    """
    if not directories:
        return
    try:
        hidden = append(directories)
    except OSError as error:
        raise CommandFailure(f"{named_by}: {error}", code=USAGE) from None
    for item in hidden:
        typer.echo(
            f"warning: {item.path} is hidden: `import {item.name}` gives {item.hidden_by}. Rename yours if your code "
            "imports it",
            err=True,
        )


CodeOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--code",
        metavar="DIR",
        envvar=VARIABLE,
        callback=_use,
        help=f"Directory of your own modules, for classes named module:Class; repeat it for several. Also: {VARIABLE}.",
        show_envvar=False,
    ),
]


def moment_of(option: str, text: str, now: datetime, *, ahead: bool) -> datetime:
    """The time that an option names, UTC: "90m", "12h" or "7d" before `now`, or `ahead` of it, or ISO 8601.

    A time without a zone is local.

    Raises:
        CommandFailure: the text names no time, or one that no calendar has.
    """
    try:
        if (found := _DISTANCE.fullmatch(text)) is not None:
            distance = timedelta(**{_UNITS[found[2]]: int(found[1])})
            return now + distance if ahead else now - distance
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise CommandFailure(
            f"{option} {text}: expected 90m, 12h, 7d, or a time as in 2026-05-04T12:00", code=USAGE
        ) from None


def _documents_alone(as_json: bool) -> bool:
    if as_json:
        separate_documents()
    return as_json


def json_option(help_text: str) -> Any:
    """The option --json. With it, what an owner's code prints goes to standard error."""
    return typer.Option("--json", callback=_documents_alone, help=help_text)


JsonOption = Annotated[bool, json_option("Print one JSON document.")]
ProgressJsonOption = Annotated[bool, json_option("Print one JSON document; progress on stderr.")]
PassphraseOption = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File whose first line is the passphrase of the private keys.")
]
AdminPassphraseOption = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="File whose first line is the passphrase of the administrator's key."),
]
DEFAULT_ADMIN_HOME = Path("fedpareto-demo/coordinator/admin")
AdminHome = Annotated[Path, typer.Option(envvar="FEDPARETO_ADMIN", help="The administrator's directory.")]
ProxyOption = Annotated[
    str | None,
    typer.Option(
        "--proxy",
        metavar="URL",
        help="The proxy on the way to the coordinator, http://HOST:PORT; @FILE reads the URL, which may hold "
        "USER:PASSWORD@, from the first line of a file; direct is none. Default: https_proxy and no_proxy of the "
        "environment.",
    ),
]
AskOption = Annotated[bool, typer.Option(help="Ask for a passphrase for the private keys.")]
DataOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the task's data.")]
DownloadOption = Annotated[bool, typer.Option("--download", help="Let the task fetch a public data set into --data.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the file.")]
ToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="NAME:ADDRESS",
        help="Send each round's numbers there: tensorboard:DIR, mlflow:URI, wandb:PROJECT, or a sink of an installed "
        "package; repeat it for several. Needs the extra tracking.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error; to standard error.")]
LogFormatOption = Annotated[str, typer.Option(help="text, or json: one JSON object a line.")]
