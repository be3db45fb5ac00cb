"""Declines of assignments: warn the owner, count it, send the signed decline, and keep evidence of an attack."""

from contextlib import suppress
from dataclasses import dataclass

from federation.monitoring.events import Events
from federation.owners_code import TwoTexts
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from worker.connection.attendance import Attendance
from worker.ledgers.left_ledger import LeftLedger
from worker.site.assignment_checks import Declined, UnverifiedAssignment, claimed_id
from worker.site.refused_orders import ATTACKS, RefusedOrders


@dataclass(frozen=True, eq=False)
class Declines:
    """Declines assignments for a worker. Any thread may call.

    With `tells_all`, as the owner's policy says, a decline tells the coordinator what the log says.
    """

    attendance: Attendance
    evidence: RefusedOrders
    left: LeftLedger
    events: Events
    tells_all: bool = False

    def decline(self, declined: Declined, envelope: SignedEnvelope) -> None:
        """Declines an assignment in its envelope.

        Raises:
            DirectoryGone: the worker's directory is, so it has no reason of its own to decline.
        """
        self.events.home.check_there()
        assignment_id = claimed_id(envelope)
        reason, message = declined.reason, declined.texts.local
        verified = None if isinstance(declined, UnverifiedAssignment) else envelope
        if not declined.repeated:
            run_id = "" if verified is None else AssignmentManifest.FromString(verified.manifest).run_id
            self.events.warn(
                "declined",
                f"assignment {assignment_id or '(unreadable)'}: declined, {reason}: {message}",
                assignment_id=assignment_id,
                run_id=run_id,
                reason=reason,
            )
            with suppress(OSError):  # a decline does not wait for the disk; the log has it
                self.left.decline(reason, message, run=run_id, assignment=assignment_id, at=self.attendance.now())
        if verified is not None and reason in ATTACKS:
            self.evidence.alert(verified, reason, message)
        if assignment_id:
            told = TwoTexts.same(message) if self.tells_all else declined.texts
            self.attendance.decline(assignment_id, reason, told.wire, verified)
