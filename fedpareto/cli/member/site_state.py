"""`fedpareto worker restored` and `privacy`: facts that a worker keeps, and its owner decides about."""

from dataclasses import asdict
from typing import Annotated

import typer

from federation.spec.accounting import AccountingError
from federation.text import counted, escaped
from fedpareto.cli.failure import answer
from fedpareto.cli.member.member_command import MemberSite, member_command
from worker.home import WorkerHome
from worker.progress import accept_restore, pending_restore
from worker.site.policy import Policy, PolicyError
from worker.site.privacy import spent


@member_command()
def restored(
    site: MemberSite,
    as_json: bool,
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept the statement: work on the runs that go back to an earlier round.")
    ] = False,
) -> None:
    """Show or accept the statement that a backup was restored.

    The worker asks for this where policy.toml says restore = "ask".
    """
    pending = pending_restore(site.home.progress, site.member)
    if pending is None:
        answer(as_json, {"pending": None, "accepted": False}, "no restore waits for you")
        return
    if accept:
        accept_restore(site.home.accepted_restore, pending.digest)
    answer(
        as_json,
        {"pending": {"restored": pending.made.isoformat(), "runs": pending.runs}, "accepted": accept},
        f"The coordinator signed on {pending.made:%Y-%m-%d %H:%M} UTC that it was restored from a backup.",
        *(
            f"run {escaped(run)} goes back from round {seen} to round {kept}"
            for run, (seen, kept) in pending.runs.items()
        ),
        "Accepted." if accept else "Accept it with --accept; until then the worker does no work for these runs.",
    )


@member_command(PolicyError, AccountingError, keys=False)
def privacy(home: WorkerHome, as_json: bool) -> None:
    """Show what training with noise has spent of each data set."""
    accounts = spent(home.privacy, Policy.load(home.policy).privacy)
    lines = []
    for account in accounts:
        budget = f" of {account.budget:g}" if account.budget is not None else ", without a budget"
        lines.append(
            f"{account.data_set}: epsilon = {account.epsilon:.4g}{budget} (delta = {account.delta:g}; at most "
            f"{account.bound:.4g} by Renyi differential privacy) in {counted(len(account.entries), 'training')}"
        )
        for part in account.by_run:
            lines.append(
                escaped(f"  run {part.run}: {counted(part.steps, 'step')}, noise {part.noise:g}, rate {part.rate:.4g}")
            )
    answer(as_json, [asdict(account) for account in accounts], *lines or ["no training with noise is on record"])
