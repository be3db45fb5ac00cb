"""Declines of assignments: the owner is told, the coordinator gets them signed, and evidence of an attack is kept."""

from dataclasses import dataclass

from federation.v1.common_pb2 import SignedEnvelope
from worker.events import Events
from worker.line.attendance import Attendance
from worker.site.assignments import Declined, UnverifiedAssignment, claimed_id
from worker.site.refused_orders import ATTACKS, RefusedOrders


@dataclass(frozen=True, eq=False)
class Declines:
    """Declines assignments for a worker. Any thread may call."""

    attendance: Attendance
    evidence: RefusedOrders
    events: Events

    def decline(self, declined: Declined, envelope: SignedEnvelope) -> None:
        """Declines an assignment in its envelope."""
        assignment_id = claimed_id(envelope)
        reason, message = declined.reason, declined.message
        if not declined.repeated:
            self.events.warn(
                "declined",
                f"assignment {assignment_id or '(unreadable)'}: declined, {reason}: {message}",
                assignment_id=assignment_id,
                reason=reason,
            )
        asked = None if isinstance(declined, UnverifiedAssignment) else envelope
        if asked is not None and reason in ATTACKS:
            self.evidence.alert(asked, reason, message)
        if assignment_id:
            self.attendance.decline(assignment_id, reason, message, asked)
