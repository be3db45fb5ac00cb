"""`fedpareto worker leave`: a site withdraws from its federation."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from fedpareto.cli.failure import answer
from fedpareto.cli.member.member_command import connecting, member_command, site_config
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.formatting import moment
    from worker.home import WorkerHome
    from worker.site.leaving import Leave, write_leave
    from worker.site.withdrawing import LeavingError, withdraw
    from worker.work.memory import WorkerMemory, awaits_question
    from worker.work.spool import holds_replies


@member_command(LeavingError, keys=False)
def leave_command(
    home: "WorkerHome",
    as_json: bool,
    at_once: Annotated[
        bool,
        typer.Option("--now", help="Drop what the worker has begun. A round counts this site as one without a reply."),
    ] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="Also ask the federation's officers to remove the updates that this site has sent."
        ),
    ] = False,
) -> None:
    """Leave the federation, with a signed withdrawal.

    From now on no new work begins. A worker that runs first ends what it has begun, private rounds included, hands in
    its replies, then leaves and ends. Without one, the command itself leaves. Nobody can refuse it; while no
    coordinator answers, the wish waits in the directory, also over restarts.

    What this site has sent before stays in the record, and in the rounds that it has entered. Its keys and ledgers stay
    in the directory. To come back, join again under the same name, with a new join string and this directory.
    """
    leave = Leave(datetime.now(UTC), now=at_once, forget=forget)
    write_leave(home.leave, leave)
    document: dict[str, object] = {"left": None, "now": at_once, "forget": forget}
    if home.locked_by_another():
        what = "drops what it has begun" if at_once else "ends what it has begun"
        answer(
            as_json,
            document,
            f"The worker that runs {what}, leaves the federation, and ends. Until then, `fedpareto worker status` says "
            "what it waits for.",
        )
        return
    if not at_once and (holds_replies(home.spool) or awaits_question(home.memory, leave.since)):
        answer(
            as_json,
            document,
            "This site has begun work, and no worker runs: start it, and it ends this work, then leaves; or leave at "
            "once with --now.",
        )
        return
    settings = site_config(home.directory, None)
    with connecting(home.directory, settings.passphrase, settings.proxy or None) as site:
        since = withdraw(home, site.member, leave)
    WorkerMemory.erase_kept(home.memory)  # no later start would erase the secrets of private rounds
    answer(
        as_json,
        {**document, "left": since.isoformat()},
        f"{site.member.client_id} has left {site.member.federation_id}, since {moment(since)}.",
    )
