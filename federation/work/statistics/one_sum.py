"""The unit of private statistics is the data set: which sums of it there may be, over all runs.

All numbers of a sum tell of the same samples. Two sums over sets of members that overlap, or of other columns, ranges
or bins, would tell of those who are in one of them only. Only the others protect these, so no owner can lift this.
"""

from collections.abc import Sequence

from federation.work.base import WorkError, WorkingClient
from federation.work.site import DescribedEntry


def check_ready(client: WorkingClient, session: str, question: str, invited: Sequence[str]) -> None:
    """Checks that the data set may be in one more sum, before its samples are read.

    Args:
        client: the member.
        session: the name of the session in the ledger.
        question: the digest of the columns, ranges, bins and splits.
        invited: the members that are invited.

    Raises:
        WorkError: `policy:statistics`, `statistics:approval`, or as `mask`.
    """
    task = client.origin.task
    if task not in client.site.summed:
        raise WorkError(
            f"the data of {task} are under [privacy.NAME] of policy.toml: they need noise, which private statistics "
            "do not have yet",
            reason="policy:statistics",
        )
    # Section 3, rule 8: the owner's own word: a data set answers one question, and the owner has seen its numbers.
    if not client.approved:
        raise WorkError(
            "statistics are summed privately only in a run that the owner has approved (fedpareto worker approve)",
            reason="statistics:approval",
        )
    with client.site.ledger.lock:
        for entry in _earlier(client, session, question):
            _require(set(entry.masked) <= set(invited), entry)


def mask(client: WorkingClient, session: str, question: str, members: Sequence[str]) -> None:
    """Records durably that the data set is masked for a sum over these members, W, if it may be.

    Raises:
        WorkError: `statistics:told`, `statistics:run`, `statistics:question`, `statistics:members`.
        OSError: the ledger cannot be written.
    """
    ledger, origin = client.site.ledger, client.origin
    # Section 3, rule 8: read and noted under one lock, or two coordinators at a time would each get the first sum.
    with ledger.lock:
        for entry in _earlier(client, session, question):
            # Section 3, rule 8: exactly that W: two overlapping sums show those who are in one of them.
            _require(entry.masked == tuple(members), entry)
        # Section 3, rule 8: on the disk before y exists: after a crash the ledger has too many, never too few.
        ledger.describe(DescribedEntry(session, origin.run_id, origin.task, question, tuple(members)))


def confirm(client: WorkingClient, session: str, question: str, members: Sequence[str]) -> None:
    """Records durably that the member confirms these survivors, V, if it has confirmed no others. Raises as `mask`."""
    ledger = client.site.ledger
    with ledger.lock:
        for entry in _earlier(client, session, question):
            # Section 3, rule 8: t_mask signatures open a sum, and two lists of signers share an honest member.
            _require(entry.confirmed in ((), tuple(members)), entry)
        ledger.confirm(session, tuple(members))


def tell(client: WorkingClient, question: str) -> None:
    """Records durably that the data set is described in the open, unless it has been in a private sum.

    Raises:
        WorkError: `statistics:summed`: its numbers, taken from that sum, would leave those of the others.
        OSError: the ledger cannot be written.
    """
    ledger, origin = client.site.ledger, client.origin
    with ledger.lock:
        if any(entry.masked for entry in ledger.described(client.site.tasks_beside(origin.task))):
            raise WorkError(
                "this data set has been in a private sum: in the open, its numbers would show those of the others",
                reason="statistics:summed",
            )
        ledger.describe(DescribedEntry(f"{origin.run_id}/{origin.task}", origin.run_id, origin.task, question, ()))


def _earlier(client: WorkingClient, session: str, question: str) -> Sequence[DescribedEntry]:
    """The other sums that this data set was masked for. Raises WorkError where one of them allows no further sum."""
    origin, ledger = client.origin, client.site.ledger
    earlier = [one for one in ledger.described(client.site.tasks_beside(origin.task)) if one.session != session]
    for entry in earlier:
        if not entry.masked:
            raise WorkError(
                f"this data set was described in the open in run {entry.run_id}: taken from a private sum, its numbers "
                "would leave those of fewer members",
                reason="statistics:told",
            )
        # Section 3, rule 8: an approval is for one sum: asked again in the same run, it would show new samples unseen.
        if entry.run_id == origin.run_id:
            raise WorkError(
                "this data set was masked in this run before; another sum needs another run, and its approval",
                reason="statistics:run",
            )
        if (entry.question, entry.task) != (question, origin.task):
            raise WorkError(
                f"this data set was masked in run {entry.run_id} for another task, or other columns, ranges, classes, "
                "bins or splits; others need noise, which private statistics do not have yet",
                reason="statistics:question",
            )
    return earlier


def _require(same: bool, entry: DescribedEntry) -> None:
    if not same:
        raise WorkError(
            f"this data set was masked in run {entry.run_id} for other members: two sums over sets that overlap show "
            "those who are in one of them",
            reason="statistics:members",
        )
