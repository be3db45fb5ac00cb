"""`fedpareto worker pause`, `resume` and `status`: whether a site takes part now, and the owner's decision about it."""

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.member.member_command import member_command
from fedpareto.cli.shared_options import moment_of
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.work.closing import SiteClosing
    from fedpareto.formatting import moment
    from fedpareto.web.site.now import closing_document, closing_words, site_now
    from worker.home import WorkerHome
    from worker.site.pause import Pause, closing_now, end_pause, read_pause, write_pause
    from worker.site.policy_file import OpenHours, PolicyError


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
    answer(as_json, {"closing": closing_document(closing)}, f"This site is {closing_words(closing)}.")


@member_command(keys=False)
def resume_command(home: "WorkerHome", as_json: bool) -> None:
    """End a pause.

    A worker that runs tells the coordinator within seconds. Opening hours of policy.toml still count.
    """
    was_paused = closing_now(read_pause(home.pause)[0], OpenHours(), datetime.now(UTC)) is not None
    end_pause(home.pause)
    answer(as_json, {"was_paused": was_paused}, "The pause has ended." if was_paused else "This site was not paused.")


@member_command(PolicyError, keys=False)
def status_command(home: "WorkerHome", as_json: bool) -> None:
    """Say what the worker does now: connected, paused, at work.

    The command reads files of the worker's directory, needs no key, and takes no lock. With --json, `sentence` is the
    same line, and the other keys have its parts.
    """
    now = site_now(home, datetime.now(UTC))
    if not as_json:
        typer.echo(f"{now.sentence[:1].upper()}{now.sentence[1:]}.")
        return
    print_document(json.dumps(now.document(), default=_time))


def _time(value: datetime) -> str:
    return value.isoformat()
