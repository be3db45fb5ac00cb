"""`fedpareto worker pause`, `resume` and `status`: whether a site takes part now, and the owner's decision about it."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from federation.text import escaped
from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.member.member_command import member_command
from fedpareto.cli.shared_options import moment_of
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.durable_files import sync_directory
    from federation.work.closing import SiteClosing
    from fedpareto.formatting import moment
    from worker.connection.approval import noted
    from worker.home import WorkerHome
    from worker.site.pause import Pause, closing_now, read_pause, write_pause
    from worker.site.policy_file import OpenHours, Policy, PolicyError
    from worker.status import SeenWorker, WorkerStatus, read_status


@member_command(keys=False)
def pause_command(
    home: "WorkerHome",
    as_json: bool,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End the pause by itself: after 90m, 12h or 7d, or at a time such as 2026-05-04T12:00. Default: only "
            "`worker resume` ends it.",
        ),
    ] = None,
) -> None:
    """Begin no new work, until you resume or until a time.

    The worker finishes the training or evaluation that it has begun, and answers the messages of private rounds. It
    tells the coordinator within seconds, which asks this site in no new round. The pause is kept over restarts; without
    a worker that runs, it waits for the next one. A second pause replaces the first.
    """
    now = datetime.now(UTC)
    ends = None if until is None else moment_of("--until", until, now, ahead=True)
    if ends is not None and ends <= now:
        raise CommandFailure(
            f"--until {until}: {moment(ends)} is past; it is {moment(now)} now. Give a time to come", code=USAGE
        )
    try:
        pause = Pause(ends)
    except ValueError as error:
        raise CommandFailure(f"--until {until}: {error}", code=USAGE) from None
    write_pause(home.pause, pause)
    closing = SiteClosing(pause.until, paused=True)
    answer(as_json, {"closing": _document(closing)}, f"This site is {_closing_words(closing)}.")


@member_command(keys=False)
def resume_command(home: "WorkerHome", as_json: bool) -> None:
    """End a pause.

    A worker that runs tells the coordinator within seconds. Opening hours of policy.toml still count.
    """
    was_paused = closing_now(read_pause(home.pause)[0], OpenHours(), datetime.now(UTC)) is not None
    home.pause.unlink(missing_ok=True)
    sync_directory(home.directory)
    answer(as_json, {"was_paused": was_paused}, "The pause has ended." if was_paused else "This site was not paused.")


@member_command(PolicyError, keys=False)
def status_command(home: "WorkerHome", as_json: bool) -> None:
    """Say what the worker does now: connected, paused, at work.

    The command reads files of the worker's directory, needs no key, and takes no lock. With --json, `sentence` is the
    same line, and the other keys have its parts.
    """
    now = datetime.now(UTC)
    seen = read_status(home.status)
    runs = seen is not None and seen.runs(now)
    status = seen.status if seen is not None and runs else WorkerStatus(None, ())
    pause, problem = read_pause(home.pause)
    closing = closing_now(pause, Policy.load(home.policy).open, now)
    approval = noted(home.pending) if runs else ""
    words = [*_connection_words(home, seen, status, runs=runs), *_site_words(closing, problem, approval)]
    words += [
        f"{work.doing} in round {work.round} of run {work.run_id} since {moment(work.since)}" for work in status.work
    ]
    sentence = escaped("; ".join(words))
    if not as_json:
        typer.echo(f"{sentence[:1].upper()}{sentence[1:]}.")
        return
    document = {
        "sentence": sentence,
        "runs": runs,
        "last_sign": None if seen is None else seen.last_sign,
        "connection": None if status.connection is None else asdict(status.connection),
        "closing": _document(closing),
        "approval": approval,
        "work": [asdict(work) for work in status.work],
    }
    print_document(json.dumps(document, default=_time))


def _connection_words(
    home: "WorkerHome", seen: "SeenWorker | None", status: "WorkerStatus", *, runs: bool
) -> Iterator[str]:
    if not runs:
        last = "" if seen is None else f", the last one has given no sign of life since {moment(seen.last_sign)}"
        yield f"no worker runs{last}: start it with `fedpareto worker run --home {home.directory}`"
    elif status.connection is None:
        yield "the worker has started, and is not connected yet"
    elif status.connection.connected:
        yield f"connected since {moment(status.connection.since)}"
    else:
        yield f"not connected since {moment(status.connection.since)}: {status.connection.problem}"


def _site_words(closing: "SiteClosing | None", problem: str, approval: str) -> Iterator[str]:
    if approval:
        yield approval
    if problem:
        yield problem
    elif closing is not None:
        yield _closing_words(closing)


def _closing_words(closing: "SiteClosing") -> str:
    """The state of a closed site, with the time in the local zone."""
    if closing.until is None:
        return "paused until you resume it (`fedpareto worker resume`), and begins no new work"
    why = "paused" if closing.paused else "closed, by the hours of policy.toml,"
    return f"{why} until {moment(closing.until)}, and begins no new work"


def _document(closing: "SiteClosing | None") -> dict[str, Any] | None:
    if closing is None:
        return None
    return {"paused": closing.paused, "until": None if closing.until is None else closing.until.isoformat()}


def _time(value: datetime) -> str:
    return value.isoformat()
