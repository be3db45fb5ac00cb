"""The assignments that wait and that are in work.

Each lane does one assignment at a time. Work that trains or evaluates takes the lane `compute`; messages of a protocol
take the lane `protocol`, so that they do not wait behind a training of hours.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

from federation.directories import DirectoryGone
from federation.monitoring.events import Events
from federation.owners_code import TwoTexts, owners_frame, passes
from federation.process.assignment_log import about_assignment
from federation.refusals import Refusal
from federation.training import TrainingStopped
from federation.training.reasons import NOT_ASKED, texts_of
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.work.base import Lane
from federation.work.closing import SiteClosing
from federation.work.secure.orders import asked_session
from worker.connection.attendance import Attendance
from worker.home import WorkerHomeError, disk_texts
from worker.ledgers.left_ledger import LeftLedger, LeftState
from worker.progress import Progress
from worker.site.assignment_checks import (
    CheckedAssignment,
    Consent,
    Declined,
    OtherModel,
    check_assignment,
    check_cancel,
    claimed_id,
)
from worker.site.policy_file import WorkLimits
from worker.site.run_requests import Verdict
from worker.status import WorkNow
from worker.work.execution import Execution
from worker.work.own_errors import SILENT, log_owners
from worker.work.spool import Spool
from worker.work.work_control import Control

LOGGER = logging.getLogger("fedpareto.worker")
TIDY_SECONDS = 600.0


@dataclass(eq=False)
class _Job:
    order: CheckedAssignment
    began: datetime | None = None
    progress: float = 0.0
    unwanted: bool = False

    @property
    def name(self) -> str:
        """The identifier of the assignment."""
        return self.order.manifest.assignment_id


@dataclass(eq=False, kw_only=True)
class Runner:
    """Takes assignments in, and has them done in their lanes.

    `finished` is called when a new reply is in the spool; `limits` are the owner's bounds; `consent` returns the run
    of an assignment as it is kept here, or raises Declined if it is not accepted; `taken` is called with each order
    that is queued; `closing` returns why the site begins no work now, None while it is open; `disk_use` returns the
    bytes of the worker's files; `decline` is called with the envelope of a declined assignment.
    """

    execution: Execution
    spool: Spool
    left: LeftLedger
    attendance: Attendance
    progress: Progress
    limits: WorkLimits
    events: Events
    finished: Callable[[], None]
    consent: Consent
    taken: Callable[[CheckedAssignment], None]
    closing: Callable[[], SiteClosing | None]
    disk_use: Callable[[], int]
    decline: Callable[[Declined, SignedEnvelope], None]
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _waiting: deque[_Job] = field(default_factory=deque, init=False)
    # Assignments by id that wait until the owner has accepted a restore.
    _held: dict[str, SignedEnvelope] = field(default_factory=dict, init=False)
    _full: bool = field(
        default=False, init=False
    )  # an assignment was declined for lack of room since the last one taken in
    _current: dict[Lane, _Job] = field(default_factory=dict, init=False)
    _stopping: bool = field(default=False, init=False)
    _told: SiteClosing | None = field(default=None, init=False)  # as owner and coordinator know it

    def __post_init__(self) -> None:
        self._told = self.closing()
        if self._told is not None:
            self._tell_owner()

    # Called by the thread of the attendance

    def assigned(self, envelope: SignedEnvelope, inputs: Sequence[bytes] = ()) -> None:
        """Queues an assignment, or declines it. One that is here already is not queued again.

        `inputs` are the contents of its inputs, in their order, if they came with it.
        """
        with about_assignment(claimed_id(envelope)):
            self._assigned(envelope, inputs)

    def _assigned(self, envelope: SignedEnvelope, inputs: Sequence[bytes]) -> None:
        try:
            order = check_assignment(
                envelope,
                inputs,
                member=self.attendance.member,
                offers=self.execution.offers,
                limits=self.limits,
                site=self.execution.site,
                newest_round=self._newest_round,
                now=self.attendance.now(),
                consent=self.consent,
            )
            with self._changed:
                self._take_in(order)
        except OtherModel as other:
            self.decline(self.execution.fetcher.compared(other), envelope)
        except Declined as declined:
            self.decline(declined, envelope)
        except BaseException as error:  # a task is asked for its buffers, and the data for its length
            if passes(error) or (isinstance(error, Exception) and owners_frame(error) is None):
                raise
            log_owners("an assignment cannot be checked", error)
            self.decline(Declined("failed", SILENT), envelope)

    def _take_in(self, order: CheckedAssignment) -> None:
        """Queues an order, unless it is here already. Raises Declined if there is no room or time."""
        name, run_id = order.manifest.assignment_id, order.manifest.run_id
        # The spool is asked under the same lock under which a finished job leaves `_current`.
        if self.spool.holds(name) or self.spool.renew(name):
            self.finished()
            return
        if name in self._held or any(job.name == name for job in self._jobs()):
            return
        if (declined := self._not_before_deadline(order)) is not None:
            self.execution.memory.end_earlier(order)  # a site that leaves waits for no attempt that is over
            raise declined
        if len(self._waiting) + len(self._held) + len(self.spool.entries()) >= self.limits.waiting:
            message = f"{self.limits.waiting} assignments, or finished replies without a receipt, wait here already"
            raise self._no_room("limit:waiting", message)
        if (size := self.disk_use()) > self.limits.home_bytes:
            message = f"the files of this worker have {size} bytes; its policy allows {self.limits.home_bytes}"
            raise self._no_room("limit:disk", message)
        self._full = False
        if self.progress.waits(run_id):
            self._held[name] = order.envelope
            return
        self.progress.saw_round(run_id, order.manifest.round)
        self._waiting.append(_Job(order))
        self.taken(order)
        self._changed.notify_all()

    def _not_before_deadline(self, order: CheckedAssignment) -> Declined | None:
        """The decline of work that this site does not begin before its deadline; None if it may."""
        closing = self.closing() if order.work.lane is Lane.COMPUTE else None
        if closing is None or not closing.lasts_beyond(order.deadline):
            return None
        return Declined(closing.reason, f"this site is {closing}{', after the deadline' if closing.until else ''}")

    def _no_room(self, reason: str, message: str) -> Declined:
        repeated, self._full = self._full, True
        return Declined(reason, message, repeated=repeated)

    def _jobs(self) -> list[_Job]:
        return [*self._current.values(), *self._waiting]

    def _newest_round(self, run_id: str) -> int | None:
        """The newest round of a run; None while the run waits for the owner to accept a restore."""
        return None if self.progress.waits(run_id) else self.progress.newest_round(run_id)

    def restored(self) -> None:
        """Queues the assignments that were held until the owner accepted a restore."""
        with self._changed:
            held, self._held = self._held, {}
        for envelope in held.values():
            self.assigned(envelope)

    def cancelled(self, envelope: SignedEnvelope) -> None:
        """Drops an assignment that waits, is in work, or is in the spool, with the values that are kept for it.

        If its private round is over, the work that is here of its session is dropped, and its secrets are erased. The
        coordinator must have signed the cancellation, so that nobody else can end this member's part in a round.
        """
        try:
            manifest = check_cancel(envelope, self.attendance.member)
        except Refusal as refusal:
            message = f"a cancelled assignment goes on: {refusal.message}"
            self.events.warn("cancel-refused", message, reason=refusal.reason)
            return
        with about_assignment(manifest.assignment_id):
            self._drop(manifest.assignment_id, manifest.reason)
            if manifest.session:
                for name in self._of_session(manifest.session):
                    self._drop(name, manifest.reason)
                # Section 3, rule 2: secrets that nobody asks for any more do not stay. If the coordinator asks again,
                # the session is over here: each question is declined, and no other secrets are drawn for it.
                self.execution.memory.end_session(manifest.session)

    def _of_session(self, session: bytes) -> set[str]:
        """The assignments of a private round's session that wait or are in work.

        Finished replies stay in the spool: one of them may be on record, and its receipt is still to be fetched. The
        coordinator refuses the others before it takes a byte of their payloads.
        """
        with self._changed:
            envelopes = [*self._held.values(), *(job.order.envelope for job in self._jobs())]
        orders = [AssignmentManifest.FromString(envelope.manifest) for envelope in envelopes]
        return {order.assignment_id for order in orders if asked_session(order) == session}

    def _drop(self, assignment_id: str, reason: str) -> None:
        with self._changed:
            dropped = [entry.assignment for entry in self.spool.entries() if entry.assignment_id == assignment_id]
            if (envelope := self._held.pop(assignment_id, None)) is not None:
                dropped.append(envelope)
            for job in self._jobs():
                if job.name == assignment_id:
                    job.unwanted = True
                    dropped.append(job.order.envelope)
            self._waiting = deque(job for job in self._waiting if not job.unwanted)
        self.spool.remove(assignment_id)
        if dropped:
            with suppress(OSError):  # its entry then says that it may have left, which is right
                self.left.end(assignment_id, LeftState.CANCELLED, reason, self.attendance.now())
        for envelope in dropped:
            self.execution.forget(envelope)
        if dropped:
            self.events.tell(
                "cancelled",
                f"assignment {assignment_id}: no longer wanted ({reason})",
                assignment_id=assignment_id,
                reason=reason,
            )

    def withdrawn(self, run_id: str, verdict: Verdict) -> None:
        """Drops and declines all assignments of a run that the site refuses from now on."""
        with self._changed:
            envelopes = [entry.assignment for entry in self.spool.entries() if entry.manifest.run_id == run_id]
            envelopes += [job.order.envelope for job in self._jobs() if job.order.manifest.run_id == run_id]
            envelopes += [
                envelope
                for envelope in self._held.values()
                if AssignmentManifest.FromString(envelope.manifest).run_id == run_id
            ]
        for envelope in envelopes:
            name = AssignmentManifest.FromString(envelope.manifest).assignment_id
            with about_assignment(name):
                self._drop(name, verdict.reason)
                self.decline(Declined(verdict.reason, verdict.message), envelope)

    def idle(self) -> bool:
        """True if no work has begun or waits, no reply waits for its receipt, and no private round goes on.

        Assignments that are held until the owner accepts a restore have not begun.
        """
        with self._changed:
            busy = bool(self._jobs() or self.spool.entries())
        return not busy and not self.execution.memory.awaits_question(self.attendance.now())

    def drop_all(self, reason: str) -> None:
        """Drops all work that has begun or waits, the replies without a receipt, and what private rounds keep."""
        with self._changed:
            names = {job.name for job in self._jobs()} | set(self._held)
            names |= {entry.assignment_id for entry in self.spool.entries()}
        for name in names:
            self._drop(name, reason)
        self.execution.memory.erase_all()

    def look(self) -> None:
        """Reports that the site opened, closed or was paused, and wakes the lanes.

        Work that waits, and would not begin before its deadline, is declined, so that its round does not wait for it.
        """
        closing = self.closing()
        if closing == self._told:
            return
        self._told = closing
        self._tell_owner()
        self.attendance.beat(*self.working())
        with self._changed:
            late = [(job, self._not_before_deadline(job.order)) for job in self._waiting]
            self._waiting = deque(job for job, declined in late if declined is None)
            self._changed.notify_all()
        for job, declined in late:
            if declined is not None:
                with about_assignment(job.name):
                    self.decline(declined, job.order.envelope)

    def _tell_owner(self) -> None:
        if self._told is None:
            self.events.tell("open", "the site is open")
        else:
            self.events.tell(self._told.reason, f"the site is {self._told}, and begins no new work")

    def working(self) -> tuple[str, float]:
        """The assignment in work, empty when idle, and the share of it that is done."""
        with self._changed:
            job = next(iter(self._current.values()), None)  # the one that began first
        return (job.name, job.progress) if job is not None else ("", 0.0)

    # Called by other threads

    def work_now(self) -> tuple[WorkNow, ...]:
        """The work that has begun, the oldest first."""
        with self._changed:
            jobs = [(job.order, began) for job in self._current.values() if (began := job.began) is not None]
        return tuple(
            WorkNow(of.manifest.assignment_id, of.manifest.run_id, of.manifest.round, of.work.doing, began)
            for of, began in jobs
        )

    def stop(self) -> None:
        """Ends `run`. Assignments in work are dropped; the coordinator sends them again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self, lane: Lane) -> None:
        """Executes the assignments of a lane, in order of arrival, until `stop`."""
        while (job := self._next(lane)) is not None:
            with about_assignment(job.name):
                self._do(job, lane)

    def _do(self, job: _Job, lane: Lane) -> None:
        try:
            job.began = self.attendance.now()
            control = self._control(job)
            if control.stopped():
                raise TrainingStopped
            self.execution.do(job.order, control)
            self.finished()
        except Declined as declined:
            self.decline(declined, job.order.envelope)
        except OSError as error:  # exceptions of the owner's own code do not get here
            self.decline(Declined("disk", disk_texts(error)), job.order.envelope)
        except TrainingStopped:
            if not (self._stopping or job.unwanted):
                self.decline(self._late(job) or Declined("failed", NOT_ASKED), job.order.envelope)
        except (WorkerHomeError, DirectoryGone):  # without these files, nothing can be done
            raise
        except BaseException as error:  # sys.exit() in the owner's code shall not end the worker
            if passes(error):
                raise
            LOGGER.exception("assignment %s", job.name)
            texts = TwoTexts.same(SILENT) if job.order.work.conceals else texts_of(error)
            self.decline(Declined("failed", texts), job.order.envelope)
        finally:
            with self._changed:
                del self._current[lane]
            if job.unwanted:  # the work may have kept something since the cancel
                self.execution.forget(job.order.envelope)

    def _next(self, lane: Lane) -> _Job | None:
        """The next job of a lane, as soon as there is one; None when the worker stops."""

        def of_lane() -> _Job | None:
            if lane is Lane.COMPUTE and self.closing() is not None:
                return None  # work that has begun goes on, and so do the messages of private rounds
            return next((job for job in self._waiting if job.order.work.lane is lane), None)

        with self._changed:
            while not self._changed.wait_for(lambda: self._stopping or of_lane() is not None, timeout=TIDY_SECONDS):
                self.execution.memory.sweep(self.attendance.now())
            job = of_lane()
            if self._stopping or job is None:
                return None
            self._waiting.remove(job)
            self._current[lane] = job
            return job

    def _control(self, job: _Job) -> Control:
        def stopped() -> bool:
            return self._stopping or job.unwanted or self._late(job) is not None

        def pause(seconds: float) -> None:
            with self._changed:
                if self._changed.wait_for(stopped, timeout=seconds):
                    raise TrainingStopped

        return Control(partial(setattr, job, "progress"), stopped, pause, lambda: not job.unwanted)

    def _late(self, job: _Job) -> Declined | None:
        """The decline of a job whose time is over; None if it is not."""
        now = self.attendance.now()
        if now > job.order.deadline:
            return Declined("deadline", "its deadline passed before it was done")
        if job.began is not None and (now - job.began).total_seconds() > self.limits.hours * 3600:
            message = f"this worker works on an assignment for {self.limits.hours:g} hours"
            return Declined("limit:hours", message)
        return None
