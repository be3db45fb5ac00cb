"""The members' parts in a run: replies, failures and their reasons."""

from federation.text import counted
from federation.v1.admin_pb2 import MemberOutcome, MemberSummary, Run
from fedpareto.admin_messages import name_of

REASON_WIDTH = 200  # characters of a reason
COUNTS = ("asked", "replied", "declined", "refused", "missing", "not_needed", "evaluations_missed")  # fields
_FAILURES = ("declined", "refused", "missing", "evaluations_missed")
_FAILED = (
    MemberOutcome.MEMBER_OUTCOME_DECLINED,
    MemberOutcome.MEMBER_OUTCOME_REFUSED,
    MemberOutcome.MEMBER_OUTCOME_MISSING,
)


def failures(member: MemberSummary) -> int:
    """Rounds and evaluations that a member was asked for and did not give."""
    return sum(getattr(member, name) for name in _FAILURES)


def asked_last(run: Run) -> list[MemberSummary]:
    """The members that the last ended round asked for something and did not find unnecessary."""
    return [
        member
        for member in run.members
        if member.last_round + 1 == run.rounds_done and member.last_outcome != MemberOutcome.MEMBER_OUTCOME_NOT_NEEDED
    ]


def silent(run: Run) -> list[MemberSummary]:
    """The members that the last ended round asked, and whose reply did not come or does not count."""
    return [member for member in asked_last(run) if member.last_outcome in _FAILED]


def said(member: MemberSummary) -> str:
    """A member's last failure in words: "site-c declined: failed: ..."."""
    outcome = name_of(member, "last_outcome").lower()
    verb = {"declined": "declined", "refused": "was refused", "missing": "did not reply"}.get(outcome, outcome)
    return f"{member.client_id} {verb}: {reason(member)}"


def tally(member: MemberSummary) -> str:
    """A member's replies and failures in one sentence."""
    counts = ", ".join(
        f"{counted(count, 'evaluation')} missed" if name == "evaluations_missed" else f"{count} {name}"
        for name in _FAILURES
        if (count := getattr(member, name))
    )
    return (
        f"{member.client_id} replied in {member.replied} of {counted(member.asked, 'round')}, {counts}; "
        f"round {member.last_reason_round}: {reason(member)}"
    )


def reason(member: MemberSummary) -> str:
    """The reason why its last reply did not come or count, cut to `REASON_WIDTH` characters."""
    text = member.last_reason
    return (text if len(text) <= REASON_WIDTH else f"{text[: REASON_WIDTH - 1]}…") or "no reason given"
