"""`fedpareto explain`: what a reason means, who says it, and what to do."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.shared_options import JsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.text import did_you_mean, escaped, without_links
    from fedpareto.cli.reasons import known_reasons
    from fedpareto.cli.reasons.known_reasons import KnownReason

_WIDTH = 100


def explain_command(
    reason: Annotated[
        str,
        typer.Argument(
            help="A reason, such as limit:rate; without one, all are listed.", autocompletion=completion.reasons
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Explain all reasons.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a reason means, and what to do.

    Commands, logs and the console show the reason of each request that was refused, and of each assignment that a
    worker declined or that ended without a reply. Where two parties say the same reason, both meanings are shown:

        fedpareto explain deadline

        fedpareto explain limit:rate

    It needs no network and no directory.
    """
    if reason and every:
        raise CommandFailure("give a reason or --all, not both", code=USAGE)
    found = known_reasons.meanings(reason) if reason else list(known_reasons.known())
    if not found:
        near = did_you_mean(reason, known_reasons.names())
        raise CommandFailure(
            f"there is no reason {escaped(reason, 80)!r}{near or ': `fedpareto explain` lists them'}", code=USAGE
        )
    lines = _lines(found) if reason or every else _names(found)
    answer(as_json, [_plain(row) for row in found], *lines)


def _plain(row: "KnownReason") -> dict[str, object]:
    return asdict(row) | {"means": without_links(row.means), "remedy": without_links(row.remedy)}


def _lines(rows: "list[KnownReason]") -> Iterator[str]:
    for row in rows:
        yield ", ".join(row.reasons) + (f" ({row.status})" if row.status else "")
        remedy = row.remedy and f"What to do: {row.remedy}"
        longer = [name for reason in row.reasons for name in known_reasons.with_suffix(reason, row.said_by)]
        suffixes = f"With a suffix: {', '.join(longer)}." if longer else ""
        for text in filter(None, (f"Said by {row.said_by}.", row.means, remedy, suffixes)):
            yield from _indented(text)


def _names(rows: "list[KnownReason]") -> Iterator[str]:
    for said_by in dict.fromkeys(row.said_by for row in rows):
        yield f"Of {said_by}:"
        names = dict.fromkeys(name for row in rows if row.said_by == said_by for name in row.reasons)
        yield from _indented(", ".join(names))
    yield "`fedpareto explain REASON` says what one means."


def _indented(text: str) -> list[str]:
    indent = "    "
    return textwrap.wrap(
        without_links(text), _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
