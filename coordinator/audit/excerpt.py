"""The part of the audit log that is about a run, with the hashes that lead from its entries to signed checkpoints."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Select, and_, or_, select
from sqlalchemy.orm import Session

from coordinator.rounds.runs.disclosure import parsed_spec
from coordinator.rounds.transitions import RUN_ENDED
from federation.record import log_entries
from federation.record.log_entries import EPOCH, FIRST
from federation.record.merkle import Tree
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.record_pb2 import LoggedEntry, LogNode, LogRecord
from storage import audit
from storage.audit import ChainedEntry
from storage.models import Assignment, AuditEntry, Checkpoint, Consent, Phase, Round, Run, Withdrawal

# Besides entries with the digest of a key or a certificate.
_OF_MEMBERS = ("client.approved", "client.revoked", "client.forgotten")
_OF_KEYS = ("key.set", "coordinator.restored")


def excerpt(session: Session, run_id: str, rounds: int, key: SignedEnvelope) -> LogRecord:
    """The part of the log about the first rounds of a run.

    Args:
        session: a snapshot in which every entry about these rounds has a place in the log.
        run_id: the run.
        rounds: their number.
        key: the coordinator's signed certificate of the key of the log.
    """
    entries = _entries(session, run_id, rounds)
    sizes = session.scalars(select(Checkpoint.size).order_by(Checkpoint.size)).all()
    checkpoint_sizes = {*sizes[-1:], *_covering(sizes, entries)}
    tree = Tree(lambda start, stop: audit.chained_leaves(session, start, stop))
    previous = {0: FIRST}
    needed = {chained.entry.number for chained in entries}
    for leaf in audit.read_leaves(session, 0, sizes[-1]):
        tree.append(leaf)
        if tree.size in needed:
            previous[tree.size] = leaf
    nodes = tree.around(needed, sorted(checkpoint_sizes))
    signed = select(Checkpoint.envelope).where(Checkpoint.size.in_(checkpoint_sizes)).order_by(Checkpoint.size)
    return LogRecord(
        key=key,
        checkpoints=[SignedEnvelope.FromString(envelope) for envelope in session.scalars(signed)],
        entries=[_message(chained, previous[chained.entry.number]) for chained in entries],
        nodes=[LogNode(start=start, stop=stop, hash=root) for (start, stop), root in sorted(nodes.items())],
    )


def marked(session: Session, run: Run, number: int | None) -> int | None:
    """The number of entries of the log up to and including the entry of a run's end.

    While the run goes on: up to the entry of the step of round `number`, or of its end if it only measures a model, or
    of the run's submission where `number` is None. None where the log has no numbered entry of it, as for runs on
    simulated clients.
    """
    if run.state in RUN_ENDED:
        action, subject = f"run.{run.state.lower()}", run.run_id
    elif number is None:
        action, subject = log_entries.SUBMITTED, run.run_id
    else:
        spec = parsed_spec(run.spec)
        action = (
            log_entries.STEPPED if spec.trains else log_entries.MEASURED if spec.measures else log_entries.DESCRIBED
        )
        subject = f"{run.run_id}/{number}"
    entry_number = audit.newest_number(session, action, subject)
    return None if entry_number is None else entry_number + 1


def _entries(session: Session, run_id: str, rounds: int) -> Sequence[ChainedEntry]:
    """The entries of the run and of its first rounds, of its members' keys and states, and of the federation's keys."""
    assignments = _of_rounds(run_id, rounds).with_only_columns(Assignment.assignment_id)
    unasked = _unasked(session, run_id, rounds)
    members = members_of(session, run_id, rounds)
    of_members = or_(AuditEntry.digest != "", AuditEntry.action.in_(_OF_MEMBERS))
    entries = audit.chained_where(
        session,
        or_(
            AuditEntry.subject == run_id,
            AuditEntry.subject.startswith(f"{run_id}/"),
            AuditEntry.subject.in_(assignments),
            and_(AuditEntry.subject.in_(sorted(members)), AuditEntry.outcome == "", of_members),
            and_(AuditEntry.subject.in_(sorted(unasked)), AuditEntry.action == "client.revoked"),
            AuditEntry.action.in_(_OF_KEYS),
        ),
    )
    return [chained for chained in entries if not _later(chained.entry.subject, run_id, rounds)]


def members_of(session: Session, run_id: str, rounds: int) -> set[str]:
    """The clients of which the record of the first rounds of a run has messages.

    The rounds have asked them, they have answered the run, or they left after they had been selected.
    """
    asked = _of_rounds(run_id, rounds).with_only_columns(Assignment.client_id)
    answered = select(Consent.client_id).where(Consent.run_id == run_id)
    left = select(Withdrawal.client_id).where(Withdrawal.client_id.in_(sorted(_unasked(session, run_id, rounds))))
    return set(session.scalars(asked.union(answered, left)))


def _of_rounds(run_id: str, rounds: int) -> Select[Any]:
    return select(Assignment).join(Phase).join(Round).where(Round.run_id == run_id, Round.number < rounds)


def _unasked(session: Session, run_id: str, rounds: int) -> set[str]:
    """The clients that were revoked or left after they had been selected, and so were not asked."""
    chosen = session.scalars(select(Round.selected).where(Round.run_id == run_id, Round.number < rounds))
    asked = _of_rounds(run_id, rounds).with_only_columns(Assignment.client_id)
    return {name for selected in chosen for name in selected}.difference(session.scalars(asked.distinct()))


def _later(subject: str, run_id: str, rounds: int) -> bool:
    """True if an entry is about a round of the run after the first ones."""
    run, slash, number = subject.partition("/")
    return run == run_id and bool(slash) and number.isdecimal() and int(number) >= rounds


def _covering(sizes: Sequence[int], entries: Iterable[ChainedEntry]) -> set[int]:
    """The sizes of the first checkpoints that cover the steps, the measured models or data and the end of a run."""
    ends = {f"run.{state.lower()}" for state in RUN_ENDED}
    indices = (
        bisect_right(sizes, chained.entry.number)
        for chained in entries
        if chained.entry.action in {log_entries.STEPPED, log_entries.MEASURED, log_entries.DESCRIBED, *ends}
    )
    return {sizes[index] for index in indices if index < len(sizes)}


def _message(chained: ChainedEntry, previous: bytes) -> LoggedEntry:
    entry = chained.entry
    return LoggedEntry(
        number=entry.number,
        entry_id=entry.entry_id,
        at=(entry.at - EPOCH) // timedelta(microseconds=1),
        actor=entry.actor,
        action=entry.action,
        subject=entry.subject,
        outcome=entry.outcome,
        detail=entry.detail,
        digest=entry.digest,
        times=entry.times,
        previous=previous,
    )
