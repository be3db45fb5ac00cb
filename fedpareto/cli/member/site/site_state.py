"""`fedpareto worker restored`, `privacy` and `failures`: facts that a worker keeps, and its owner decides about."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer

from federation.text import counted, escaped
from fedpareto.cli.failure import answer
from fedpareto.cli.member.member_command import MemberSite, member_command
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.spec.accounting import AccountingError
    from federation.work import site
    from worker.home import WorkerHome
    from worker.ledgers.round_ledger import RoundLedger
    from worker.progress import accept_restore, pending_restore
    from worker.site.policy_file import Policy, PolicyError
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
def privacy(home: "WorkerHome", as_json: bool) -> None:
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


@member_command(PolicyError, keys=False)
def failures(
    home: "WorkerHome",
    as_json: bool,
    reset: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help="Forget the failures of the data set of this task, after you have found their cause."
        ),
    ] = None,
) -> None:
    """Show or forget what failed in private rounds.

    The coordinator is not told of such a failure, since its model may have caused it on purpose. After three in a row,
    a data set takes part in no private round (the worker declines with `failing`) until you give --reset. A running
    worker notices it at once.
    """
    policy = Policy.load(home.policy)
    with closing(RoundLedger(home.rounds)) as ledger:
        found = ledger.all_failures()
        if reset is not None:
            ledger.succeed(policy.data_sets.get(reset, frozenset({reset})))
        left = ledger.all_failures()
    data_sets = []
    for tasks in dict.fromkeys(policy.data_sets.get(entry.task, frozenset({entry.task})) for entry in found):
        of_data_set = [entry for entry in found if entry.task in tasks]
        kept = sum(entry.task in tasks for entry in left)
        document = {
            "tasks": sorted(tasks),
            "failures": [asdict(entry) for entry in of_data_set],
            "failing": kept >= site.FAILURES,
            "reset": not kept,
        }
        data_sets.append(document)
    answer(as_json, data_sets, *_failure_lines(data_sets))


def _failure_lines(data_sets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for found in data_sets:
        tasks, number = ", ".join(found["tasks"]), len(found["failures"])
        yield escaped(f"{tasks}: {counted(number, 'computation')} of private rounds failed in a row")
        for entry in found["failures"]:
            yield escaped(f"  run {entry['run_id']} round {entry['round']}, {entry['task']}: {entry['error']}")
        if found["reset"]:
            yield "  These failures are forgotten; the data set takes part again."
        elif found["failing"]:
            yield escaped(
                "  The data set takes part in no private round. Find the cause: the data, the device, or a model that "
                f"somebody made on purpose. Then give --reset {found['tasks'][0]}"
            )
    if not data_sets:
        yield "no computation of a private round has failed since the last that did not"
