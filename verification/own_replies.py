"""One member's replies: its own receipts and its own withdrawal, compared with the record of a run."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import DecodeError

from federation.record.bundle import BundleError, BundleReader
from federation.record.joinings import JOININGS, LEFT, WITH_CERTIFICATES, is_of_newest_joining
from federation.record.results import RUN_ENDED
from federation.spec.run_spec import RunSpec
from federation.spec.sharing import BUFFERS
from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import AssignmentManifest, ReceiptManifest, ReplyManifest, StepManifest
from federation.v1.record_pb2 import Answer, Exchange, RoundRecord
from federation.work.secure.orders import Owner, order_problems, session_of
from federation.work.secure.sessions import TRAIN
from federation.work.site import DescribedEntry, SessionEntry
from verification.log import RunLog

_UNIT = 2.0**-32  # of the coefficients of a private round


@dataclass(frozen=True, kw_only=True)
class MemberReceipt:
    """A receipt that a member keeps, whose signatures were verified. Envelopes are named by their digests.

    Attributes:
        assignment_id: the assignment.
        round, phase: of the assignment.
        accepted: True if the reply counts.
        assignment, reply, receipt: the envelopes.
    """

    assignment_id: str
    round: int
    phase: int
    accepted: bool
    assignment: str
    reply: str
    receipt: str


@dataclass(frozen=True, kw_only=True)
class ReplyOutcome:
    """The outcome of one reply, according to the record.

    Attributes:
        round, phase: of the reply.
        kind: of the work; empty if the record does not have the assignment.
        words: the outcome, as a sentence.
        coefficients: of its rows in the step, in their order; empty if they entered no step.
        wrong: the part that is missing in the record or differs from the receipt; empty if there is none.
    """

    round: int
    phase: int
    kind: str
    words: str
    coefficients: tuple[float, ...] = ()
    wrong: str = ""


def reply_outcomes(bundle: BundleReader, client_id: str, receipts: Iterable[MemberReceipt]) -> Iterator[ReplyOutcome]:
    """Yields the outcome of each reply of a member to a run, in the order of the rounds.

    The receipts are compared with a record that was verified before; it is not verified again.

    Args:
        bundle: the record of the run.
        client_id: the member.
        receipts: the member's receipts of the run.

    Raises:
        BundleError: the file is damaged.
    """
    held = {receipt.assignment_id: receipt for receipt in receipts}
    for record in bundle.rounds():
        with _readable(record):
            yield from _outcomes_of_round(record, client_id, held)
    goes_on = bundle.about.state not in RUN_ENDED
    for lost in sorted(held.values(), key=lambda receipt: (receipt.round, receipt.phase)):
        later = goes_on and lost.round >= bundle.about.rounds
        wrong = f"the record does not know assignment {lost.assignment_id}, for which this member has a receipt"
        text = "of a later round than the bundle has" if later else ""
        yield ReplyOutcome(round=lost.round, phase=lost.phase, kind="", words=text, wrong="" if later else wrong)


@contextmanager
def _readable(record: RoundRecord) -> Iterator[None]:
    """Turns the errors of messages that nobody has verified yet into a BundleError."""
    try:
        yield
    except (DecodeError, LookupError, ValueError) as error:
        raise BundleError(f"round {record.number} has a message that cannot be read: {error}") from error


def _outcomes_of_round(record: RoundRecord, client_id: str, held: dict[str, MemberReceipt]) -> Iterator[ReplyOutcome]:
    """The outcomes of a member's replies in one round; takes the receipts of these out of `held`."""
    step = StepManifest.FromString(record.step.manifest) if record.HasField("step") else None
    rows = _rows(record)
    for phase in record.phases:
        for exchange in phase.exchanges:
            order = AssignmentManifest.FromString(exchange.assignment.manifest)
            if order.client_id == client_id:
                deciding = phase.decides and phase.attempt == record.attempt
                yield from _fate(exchange, order, held.pop(order.assignment_id, None), record, step, rows, deciding)


def private_problems(
    bundle: BundleReader, sessions: Iterable[SessionEntry | DescribedEntry], owner: Owner, spec: RunSpec
) -> Iterator[str]:
    """Compares the private rounds of a run's record with a member's own ledger and its owner's policy.

    Yields one sentence for each problem.

    Args:
        bundle: the record of the run, verified before.
        sessions: the ones that count at this member's site.
        owner: the member, and the requirements of its owner.
        spec: of the run.

    Raises:
        BundleError: the file is damaged.
    """
    named: set[str] = set()
    for record in bundle.rounds():
        with _readable(record):
            exchanges = [exchange for phase in record.phases for exchange in phase.exchanges]
            orders = [AssignmentManifest.FromString(exchange.assignment.manifest) for exchange in exchanges]
            answers = [
                ReplyManifest.FromString(answer.reply.manifest)
                for exchange in exchanges
                for answer in exchange.answers
                if answer.HasField("receipt") and ReceiptManifest.FromString(answer.receipt.manifest).accepted
            ]
            named |= {session_of(order) for order in orders if order.client_id == owner.client_id}
            for problem in order_problems(spec, orders, answers, owner):
                yield f"round {record.number}: {problem}"
    of_run = [entry for entry in sessions if entry.run_id == bundle.about.run_id and "/" not in entry.session]
    for entry in of_run:
        # Verify, own replies: by the member's own ledger: a session that was left out of the record has shown something
        # all the same.
        if entry.session not in named:
            yield (
                f"this member answered in the private session {entry.session[:16]} of {entry.work}, which the record "
                "lacks"
                + ("" if bundle.about.state in RUN_ENDED else "; if a round has begun since, ask for a newer bundle")
            )


@dataclass(frozen=True, kw_only=True)
class OwnWithdrawals:
    """The withdrawals that a member has signed since it joined last.

    Attributes:
        certificate: the serial number of the member's present certificate, hexadecimal.
        signed: the digests of the withdrawals' envelopes.
        left: when a coordinator acknowledged one, aware; None if none has.
    """

    certificate: str
    signed: frozenset[str] = frozenset()
    left: datetime | None = None


@dataclass(frozen=True)
class WithdrawalFindings:
    """What differs between a member's own withdrawals and a record, and what cannot be compared; each may be empty."""

    problem: str = ""
    missing: str = ""


def compared_withdrawal(log: RunLog, client_id: str, own: OwnWithdrawals) -> WithdrawalFindings:
    """Compares what the log of a run tells of a member's departure with the withdrawals in the member's home.

    A log that does not tell of the member at all is of a run without it, and nothing is compared.

    Args:
        log: of a record that was verified before.
        client_id: the member.
        own: from the member's home.
    """
    told = [entry for entry in log.entries if entry.subject == client_id and not entry.outcome]
    states = [entry for entry in told if entry.action in (*JOININGS, LEFT)]
    if states and states[-1].action == LEFT:
        named = states[-1].digest
        with_certificates = ((entry.action, entry.detail) for entry in told if entry.action in WITH_CERTIFICATES)
        # With a certificate that the log does not tell of, this member has joined again since.
        present = is_of_newest_joining(own.certificate, with_certificates)
        # Verify, own replies: by the home's own file: a withdrawal can be right in itself, and signed with a key that
        # leaked.
        if named in own.signed or not present:
            return WithdrawalFindings()
        return WithdrawalFindings(
            f"the log tells that this member has left, by the withdrawal {named}, which is not in this directory: if "
            "you did not leave, somebody else has its keys; tell a security officer"
        )
    if not states or own.left is None:
        return WithdrawalFindings()
    # Verify, own replies: a coordinator that hides a withdrawal with its entry shows a record that is right in itself.
    at = log.newest.created.ToDatetime(UTC)
    if at > own.left:
        return WithdrawalFindings(
            f"the record of {at:%Y-%m-%d %H:%M} UTC does not tell that this member has left, which the coordinator "
            f"acknowledged on {own.left:%Y-%m-%d %H:%M} UTC: keep the file, and inform all members. "
            "If the coordinator was restored from a backup since, `fedpareto worker leave` tells it again"
        )
    return WithdrawalFindings(
        missing=f"the withdrawal of this member is not compared: the record is of {at:%Y-%m-%d %H:%M} UTC, and this "
        f"member has left on {own.left:%Y-%m-%d %H:%M} UTC; ask for a newer bundle"
    )


def _fate(
    exchange: Exchange,
    order: AssignmentManifest,
    held: MemberReceipt | None,
    record: RoundRecord,
    step: StepManifest | None,
    rows: Mapping[str, int],
    deciding: bool,
) -> Iterator[ReplyOutcome]:
    """The outcomes of the replies to one assignment."""
    answered = [answer for answer in exchange.answers if answer.HasField("receipt")]
    position: dict[str, Any] = {"round": order.round, "phase": order.phase, "kind": order.kind}
    if held is None:
        for answer in answered:
            receipt = ReceiptManifest.FromString(answer.receipt.manifest)
            text = "accepted" if receipt.accepted else f"refused, {receipt.reason}"
            yield ReplyOutcome(**position, words=text, wrong="this member has no receipt for it")
        return
    # Verify, own replies: by digests of the envelopes that this member has: a record can be right in itself, and about
    # other messages.
    if held.assignment != envelope_digest(exchange.assignment):
        yield ReplyOutcome(
            **position, words="", wrong="the record has another assignment than the one that this member was sent"
        )
        return
    recorded = next((answer for answer in answered if envelope_digest(answer.reply) == held.reply), None)
    if recorded is None:
        text = "an accepted reply" if held.accepted else "a refused reply"
        yield ReplyOutcome(**position, words="", wrong=f"the record lacks {text} for which this member has a receipt")
        return
    if envelope_digest(recorded.receipt) != held.receipt:
        yield ReplyOutcome(
            **position, words="", wrong="the record has another receipt than the one that this member was sent"
        )
        return
    yield _entered(recorded, order, held, record, step, rows, deciding)


def _entered(
    answer: Answer,
    order: AssignmentManifest,
    held: MemberReceipt,
    record: RoundRecord,
    step: StepManifest | None,
    rows: Mapping[str, int],
    deciding: bool,
) -> ReplyOutcome:
    """The outcome of a reply whose record agrees with the member's receipt."""
    position: dict[str, Any] = {"round": order.round, "phase": order.phase, "kind": order.kind}
    if not held.accepted:
        reason = ReceiptManifest.FromString(answer.receipt.manifest).reason
        return ReplyOutcome(**position, words=f"refused, {reason}")
    if not deciding:
        return ReplyOutcome(**position, words="accepted; the step does not depend on it")
    if step is None:
        return ReplyOutcome(
            **position, words=f"accepted; the round has no step: {record.reason or record.state.lower()}"
        )
    if held.reply in step.replies:
        coefficients = _coefficients(step, held.reply, order.client_id, rows)
        return ReplyOutcome(**position, words="entered the step", coefficients=coefficients)
    if held.reply in step.consulted:
        return ReplyOutcome(**position, words="entered the weights of the step")
    if order.client_id in step.revoked:
        return ReplyOutcome(**position, words="accepted; left out, since this member was revoked")
    return ReplyOutcome(**position, words="accepted", wrong="the step leaves out this accepted reply")


def _coefficients(step: StepManifest, update: str, client_id: str, rows: Mapping[str, int]) -> tuple[float, ...]:
    """The coefficients of the rows of an update in the step; empty if the step has none."""
    for session in step.secure:
        if session.purpose == TRAIN and client_id in session.members and session.coefficients:
            return (session.coefficients[list(session.members).index(client_id)] * _UNIT,)
    start = 0
    for name in step.replies:
        count = rows.get(name, 1)
        if name == update:
            return tuple(step.coefficients[start : start + count])
        start += count
    return ()


def _rows(record: RoundRecord) -> dict[str, int]:
    """The number of rows of each update of a round, by the digest of its envelope."""
    counts = {}
    for phase in record.phases:
        for exchange in phase.exchanges:
            for answer in exchange.answers:
                rows = ReplyManifest.FromString(answer.reply.manifest).rows
                counts[envelope_digest(answer.reply)] = sum(row.name != BUFFERS for row in rows)
    return counts
