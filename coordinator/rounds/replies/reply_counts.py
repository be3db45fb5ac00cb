"""Counts what the assignments of members have come to, for `/metrics`."""

from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Tally
from federation.refusals import REASONS

REPLIES = MonitoredNumber(
    "fedpareto_replies",
    "Replies that were accepted, refused or declined, by reason, and assignments that no reply came to (missing).",
    MonitoredKind.COUNTER,
    ("outcome", "reason"),
    most=300,  # a member chooses the reason of its decline
)
MEMBER_REPLIES = MonitoredNumber(
    "fedpareto_member_replies", "The same, of each member.", MonitoredKind.COUNTER, ("member", "outcome")
)


def begin_counts(tally: Tally) -> None:
    """Shows the outcomes and reasons that a coordinator gives from the start, as 0."""
    refused = (("refused", reason) for reason in REASONS)
    tally.begin(REPLIES, ("accepted", ""), ("missing", "absent"), ("missing", "deadline"), *refused)


def count_reply(tally: Tally, client_id: str, outcome: str, reason: str = "") -> None:
    """Counts the end of a member's assignment, or an attempt at it that was refused."""
    tally.add(REPLIES, outcome, reason.partition(":")[0])
    tally.add(MEMBER_REPLIES, client_id, outcome)
