"""The supervisor: one conductor thread for each running run, and the operators' commands to them.

Its own state need not survive a crash: `start` reads the runs under way from the database, and conducts each.
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from coordinator.clock import utc_now
from coordinator.cluster.announcements import Announcements
from coordinator.cluster.leases import Lease, Leases, OneConductor
from coordinator.fault_state import FaultState
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductor import Conductor
from coordinator.rounds.fleets.base import Fenced, Held, RunContext, RunFacts
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.fleets.remote import RemoteFleet
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.rounds.replies.evidence import RecordError, SignatureMemory
from coordinator.rounds.replies.revoked import REVOKED
from coordinator.rounds.replies.uploads import Uploads
from coordinator.rounds.runs.submission import Submission, new_run
from coordinator.rounds.transitions import (
    RUN_ENDED,
    UNDER_WAY,
    end_assignment,
    end_conversation,
    move_run,
    open_assignments,
)
from coordinator.signing_keys import Signing
from federation.aggregation.interface import HyperparameterError
from federation.owners_code import described, passes
from federation.plugins import PluginError
from federation.record import log_entries
from federation.refusals import Refusal
from storage import audit
from storage.blobs import BlobStore
from storage.database import Database
from storage.faults import StorageFault, explain_fault, fault_of
from storage.models import Assignment, Client, Input, Phase, Round, Run
from storage.states import AssignmentState, ClientState, RunState

log = logging.getLogger(__name__)

# After a restart, a round waits this long for clients that attended shortly before.
RECONNECT_GRACE = timedelta(seconds=30)
RECENTLY = timedelta(seconds=60)
RETRY_SECONDS = 1.0  # before a conductor whose database failed starts again; after an unknown error twice as long,
MAX_RETRY_SECONDS = 60.0  # up to this
# Temporary faults: a conductor tries again, and the monitor notes when they are over.
_PASSING = frozenset({StorageFault.DATABASE, StorageFault.DISK, StorageFault.DESCRIPTORS, StorageFault.BLOB_STORE})
# Of a run that a fault has paused: how its reason begins, and what an operator can do.
_HELD = {
    StorageFault.DISK: ("disk: ", "free some space, or see to the disk"),
    StorageFault.BLOB_STORE: ("blob-store: ", "see to the bucket"),
    StorageFault.CLOCK: ("clock: ", "set the clock of the machine right"),
}
# Faults of this machine, because of which other coordinators shall conduct its runs.
_HELD_BACK = frozenset({StorageFault.DISK, StorageFault.BLOB_STORE, StorageFault.CLOCK})
HELD_REASONS = tuple(begins for begins, _ in _HELD.values())


class Supervisor:
    """Conducts every run of the federation.

    Args:
        database: the record.
        blobs: keeps models and updates.
        presence: the clients that attend.
        uploads: of their replies.
        signing: the coordinator's keys.
        faults: notes faults of the disk and the database.
        device: aggregates the updates, "cpu" or "cuda".
        keep_rounds: of each run, beside the first and the best round, that keep their blobs; None keeps all.
        clock: the time, aware.
        machine_clock: that of the machine, by which files are dated; None if it is `clock`.
        new_id: makes ids of runs and assignments.
        announcements: tell the conductors and watchers at other coordinators of changes, and those here.
        submitted: True if the audit log tells of the submission of a run, by its id and its specification's digest.
        leases: says which runs this coordinator may conduct; None: every run, since it has the database for itself.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        uploads: Uploads,
        signing: Signing,
        faults: FaultState | None = None,
        announcements: Announcements | None = None,
        device: str = "cpu",
        keep_rounds: int | None = None,
        clock: Callable[[], datetime] = utc_now,
        machine_clock: Callable[[], datetime] | None = None,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        submitted: Callable[[str, str], bool] = lambda run_id, spec: True,
        leases: Leases | None = None,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._presence = presence
        self._signing = signing
        self._faults = faults or FaultState()
        self.changes = RunChanges(announcements or Announcements(), lambda: self._runs(Run.state.in_(UNDER_WAY)))
        self._device = device
        self._clock = clock
        self._new_id = new_id
        self._submitted = submitted
        self._leases = leases or OneConductor()
        self.signatures = SignatureMemory()  # those that this process has verified or made
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._leased: dict[str, Lease] = {}  # the runs that this process conducts
        self._stopping = threading.Event()
        self._conducting = True
        self._expected: frozenset[str] = frozenset()
        self._grace_ends = clock()
        self._housekeeper = Housekeeper(
            database,
            blobs,
            presence,
            uploads,
            self._faults,
            end_revoked=self.end_revoked,
            keep_rounds=keep_rounds,
            clock=machine_clock or clock,
        )
        presence.on_change(self.changes.wake_all)

    # --- life

    def start(self, *, conduct: bool = True) -> None:
        """Goes on with every run that is under way, unless `conduct` is false: then no run advances."""
        self._conducting = conduct
        if not conduct:
            log.info("held: no run advances")
            return
        self.end_revoked()
        self._expect_members()
        self._housekeeper.start()
        for run_id in self._runs(Run.state.in_(UNDER_WAY)):
            log.info("run %s: going on", run_id)
            self._conduct(run_id)

    def stop(self) -> None:
        """Waits until every conductor has stopped. Their runs go on at the next start."""
        self._stopping.set()
        self.changes.wake_all()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
        self._housekeeper.stop()

    # --- commands of operators

    def submit(self, submission: Submission, model: str, *, by: str, paused: bool = False) -> str:
        """Takes a run, and returns its id. The initial model, named by its digest, has a row in `models` and a blob.

        A `paused` run waits for `resume` before its first round. `by` is the submitter, for the record.

        Raises:
            Refusal: `run-exists`.
        """
        now, spec, run_id = self._clock(), submission.spec, self._new_id()[:12]
        facts = submission.document, spec, submission.objectives, submission.metrics
        run = new_run(*facts, run_id=run_id, model=model, by=by, created=now)
        if paused:
            run.state = RunState.PAUSED
        detail, digest = f"{spec.name}, model {model}", run.spec_digest
        try:
            with self._database.begin() as session:
                submission.check_new(session)
                session.add(run)
                audit.record(
                    session,
                    at=now,
                    actor=by,
                    action=log_entries.SUBMITTED,
                    subject=run_id,
                    detail=detail,
                    digest=digest,
                )
        except IntegrityError:  # the name was taken at the same time, perhaps by way of another coordinator
            with self._database.read() as session:
                submission.check_new(session)
            raise
        if not paused:
            self._conduct(run_id)
        self.changes.notify(run_id)
        return run_id

    def pause(self, run_id: str, *, by: str) -> None:
        """Holds a run; replies to open assignments still count, and deadlines go on.

        Raises:
            Refusal: `run-state`.
        """
        self._move(run_id, RunState.PAUSED, by, "run.paused", f"paused by {by}")

    def pause_for_fault(self, fault: StorageFault, cause: str) -> None:
        """Holds every run that is under way until `resume_after_fault` or an operator resumes it.

        With several coordinators, the others take the runs, and only those that none has taken are held. `fault` is
        DISK, BLOB_STORE or CLOCK.
        """
        self.hold_back()
        begins, remedy = _HELD[fault]
        for run_id in self._runs(Run.state.in_(UNDER_WAY), self._leases.unclaimed()):
            reason = f"{begins}{cause}; {remedy}: then it goes on by itself, or with `admin resume`"
            self._give_up(run_id, RunState.PAUSED, reason)
            log.error("run %s: paused, %s", run_id, cause)

    def resume_after_fault(self) -> None:
        """Resumes the runs that `pause_for_fault` has paused, and that nobody has paused or stopped since."""
        if not self._conducting:
            return
        held = or_(*(Run.reason.startswith(begins) for begins in HELD_REASONS))
        for run_id in self._runs(Run.state == RunState.PAUSED, held):
            log.info("run %s: goes on, the fault is over", run_id)
            with suppress(Refusal):  # an operator was faster
                self._move(run_id, RunState.RUNNING, "coordinator", "run.resumed", "")
                self._conduct(run_id)

    def blob_failed(self, digest: str, error: Exception) -> None:
        """Holds every run whose clients were promised a blob that cannot be served, because of an error."""
        if self._faults.gone() is not None:
            return
        needs = or_(Assignment.base_model == digest, Assignment.inputs.any(Input.digest == digest))
        promised = (
            select(Round.run_id).join(Phase).join(Assignment).where(Assignment.state == AssignmentState.OPEN, needs)
        )
        for run_id in self._runs(Run.state == RunState.RUNNING, Run.run_id.in_(promised)):
            self._pause(run_id, f"storage: {error}; repair it, then resume the run", explain_fault(error))

    def resume(self, run_id: str, *, by: str) -> None:
        """Resumes a run. Of one that was paused because of the machine's clock, the operator vouches for the clock.

        Raises:
            Refusal: `run-state`.
        """
        clock_wrong = Run.reason.startswith(_HELD[StorageFault.CLOCK][0])
        vouches = bool(self._runs(Run.run_id == run_id, Run.state == RunState.PAUSED, clock_wrong))
        self._move(run_id, RunState.RUNNING, by, "run.resumed", "")
        if vouches:
            self._faults.clock_vouched = True
        self._conduct(run_id)
        self._faults.look_again()

    def stop_run(self, run_id: str, *, by: str, reason: str = "") -> None:
        """Ends a run: open assignments are cancelled, the last completed model stays.

        Raises:
            Refusal: `run-state`.
        """
        self._move(run_id, RunState.STOPPED, by, "run.stopped", reason or f"stopped by {by}")

    # --- leases

    def hold_back(self) -> None:
        """Ends the leases because of a fault; none is taken until it is over. Other coordinators take the runs."""
        if self._holds_back:
            self.changes.wake_all()

    @property
    def _holds_back(self) -> bool:
        """True if other coordinators shall conduct the runs, because of a fault here."""
        return self._leases.shared and not _HELD_BACK.isdisjoint(self._faults.present)

    def conducted(self) -> dict[str, Lease]:
        """The runs that this process conducts, with their leases."""
        with self._lock:
            return dict(self._leased)

    def take_over(self, runs: Mapping[str, str]) -> None:
        """Conducts runs whose leases are over: run -> the id of the coordinator that had it, or nothing."""
        with self._lock:
            new = {run_id for run_id in runs if run_id not in self._threads or not self._threads[run_id].is_alive()}
        if any(runs[run_id] for run_id in new):  # a coordinator has died: its members are coming to the others
            self._expect_members()
        for run_id in sorted(new):
            self._conduct(run_id)

    def lose(self, run_id: str) -> None:
        """Ends the conductor of a run that another coordinator has taken."""
        with self._lock:
            self._leased.pop(run_id, None)
        log.warning("run %s: the lease is lost, another coordinator conducts it", run_id)
        self.changes.bell(run_id).ring()

    def end_revoked(self) -> None:
        """Cancels the open assignments of revoked clients, so that no round waits for them.

        It is called after a revocation is committed, and again at the start and by the housekeeper: the coordinator may
        have died, or lost its database, in between.
        """
        theirs = Assignment.client_id.in_(select(Client.client_id).where(Client.state == ClientState.REVOKED))
        with self._database.read() as session:
            left = select(Assignment.assignment_id).where(Assignment.state == AssignmentState.OPEN, theirs)
            if session.scalar(left.limit(1)) is None:
                return
        now = self._clock()
        with self._database.begin() as session:
            cancelled = open_assignments(session, theirs)
            for assignment in cancelled:
                end_assignment(assignment, AssignmentState.CANCELLED, now, REVOKED)
            runs = {assignment.phase.round.run_id for assignment in cancelled}
        for run_id in runs:
            self.changes.notify(run_id)

    # --- inside

    def _runs(self, *where: ColumnElement[bool]) -> Sequence[str]:
        with self._database.read() as session:
            return session.scalars(select(Run.run_id).where(*where).order_by(Run.created)).all()

    def _move(
        self, run_id: str, to: RunState, by: str, action: str, reason: str, *, conducting: RunFacts | None = None
    ) -> None:
        """Moves a run. If its conductor does, `conducting` is what it conducts: it raises Fenced if it may not."""
        now = self._clock()
        with self._database.begin() as session:
            run = conducting.locked(session) if conducting else session.get_one(Run, run_id, with_for_update=True)
            if to is RunState.PAUSED is run.state and run.reason.startswith(HELD_REASONS):
                run.reason = reason  # the operator's pause lasts when the fault is over
            else:
                move_run(run, to, now, reason)
            cancelled = end_conversation(session, run_id, reason, now) if to in RUN_ENDED else []
            audit.record(session, at=now, actor=by, action=action, subject=run_id, detail=reason)
        self._presence.say_cancelled(run_id, cancelled)
        self.changes.notify(run_id)

    def _conduct(self, run_id: str) -> None:
        """Starts a conductor, which begins after the run's previous one has stopped."""
        with self._lock:
            if not self._conducting or self._holds_back or self._stopping.is_set():
                return  # the next start that conducts finds the run in the database, or another coordinator does
            arguments = (run_id, self._threads.get(run_id))
            thread = threading.Thread(target=self._conduct_after, args=arguments, name=f"run-{run_id}", daemon=True)
            self._threads[run_id] = thread
            thread.start()  # under the lock: `take_over` must not take it for one that has ended

    def _conduct_after(self, run_id: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        pause = RETRY_SECONDS
        while not (self._stopping.is_set() or self._holds_back):
            # As after a crash: the next conductor continues from the committed state.
            try:
                try:
                    self._conduct_now(run_id)
                    break
                except Exception as error:
                    if self._faults.note(error) is None:
                        raise
            except Exception:  # an unknown one, or one that was raised while another was handled
                log.exception("run %s: its conductor failed; it is tried again", run_id)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
            self._stopping.wait(pause)
        self.changes.notify(run_id)

    def _conduct_now(self, run_id: str) -> None:
        lease = self._leases.take(run_id)
        if lease is None:
            return  # another coordinator conducts it
        with self._lock:
            self._leased[run_id] = lease
        try:
            self._conduct_leased(run_id, lease)
        finally:
            with self._lock:
                self._leased.pop(run_id, None)
            try:
                self._leases.release(run_id, lease)
            except SQLAlchemyError as error:  # it ends by itself
                log.warning("run %s: could not end the lease: %s", run_id, explain_fault(error))

    def _conduct_leased(self, run_id: str, lease: Lease) -> None:
        run = None
        try:
            run, context = RunFacts.load(self._database, run_id, lease), self._run_context(run_id, lease)
            self._check_submitted(run_id)
            fleet = RemoteFleet(
                run, context, presence=self._presence, new_id=self._new_id, pool_complete=self._pool_complete
            )
            Conductor(fleet).conduct()
        except Fenced as refused:
            log.warning("run %s: a change by this coordinator was refused: %s", run_id, refused)
        except Held:
            log.info("run %s: held", run_id)
        except BaseException as error:  # a plug-in may try to end the process
            if passes(error):
                raise
            if self._faults.gone() is not None:
                return  # the next start goes on with the run
            if fault_of(error) in _PASSING:
                raise
            self._end_by(run_id, error, run)

    def _end_by(self, run_id: str, error: BaseException, run: RunFacts | None) -> None:
        """Pauses a run with the reason. An operator repairs the cause, if need be in the code, and resumes the run."""
        if isinstance(error, RecordError):
            reason = f"record: {error}; the row differs from what was signed: restore it, then resume the run"
            self._pause(run_id, reason, f"the record differs from what was signed: {error}", run)
        elif isinstance(error, HyperparameterError):  # a plug-in that an earlier start of the coordinator could load
            self._pause(run_id, f"algorithm.{error}; repair it, then resume the run", str(error), run)
        elif fault_of(error) is StorageFault.BLOB or isinstance(error, OSError | MemoryError):
            self._pause(run_id, f"storage: {error}; repair it, then resume the run", explain_fault(error), run)
        else:
            log.error("run %s: paused", run_id, exc_info=error)
            why = str(error) if isinstance(error, PluginError) else described(error)
            self._give_up(run_id, RunState.PAUSED, f"error: {why}", run)

    def _check_submitted(self, run_id: str) -> None:
        with self._database.read() as session:
            spec = session.get_one(Run, run_id).spec_digest  # loading the run has compared it with the document
        if not self._submitted(run_id, spec):
            why = "no entry of the audit log tells that this run was submitted with this specification"
            raise RecordError("runs", run_id, "spec", why)

    def _pause(self, run_id: str, reason: str, cause: str, conducting: RunFacts | None = None) -> None:
        log.error("run %s: paused: %s", run_id, cause)
        self._give_up(run_id, RunState.PAUSED, reason, conducting)

    def _give_up(self, run_id: str, to: RunState, reason: str, conducting: RunFacts | None = None) -> None:
        try:
            self._move(run_id, to, "coordinator", f"run.{to.lower()}", reason, conducting=conducting)
        except Refusal:
            log.info("run %s: had ended meanwhile", run_id)
        except Fenced as refused:
            log.warning("run %s: a change by this coordinator was refused: %s", run_id, refused)

    def _run_context(self, run_id: str, lease: Lease) -> RunContext:
        bell, look = self.changes.bell(run_id), self.changes.look_seconds

        def wait(seconds: float | None, replies: int = 1) -> None:
            self._check_conducts(run_id, lease)
            bell.wait(seconds if look is None else min(look, math.inf if seconds is None else seconds), replies)
            self._check_conducts(run_id, lease)

        return RunContext(
            database=self._database,
            blobs=self._blobs,
            signing=self._signing,
            device=self._device,
            clock=self._clock,
            wait=wait,
            changed=lambda: self.changes.tell_watchers(run_id),  # without its own bell: a conductor would wake itself
            signatures=self.signatures,
        )

    def _check_conducts(self, run_id: str, lease: Lease) -> None:
        """Raises Held if the coordinator stops, holds back, or has lost the lease."""
        if self._stopping.is_set() or self._holds_back or self._leased.get(run_id) != lease:
            raise Held

    def _expect_members(self) -> None:
        """From now on rounds wait a while for the members that have attended shortly before."""
        with self._database.read() as session:
            self._expected = self._recently_attending(session)
        self._grace_ends = self._clock() + RECONNECT_GRACE

    def _recently_attending(self, session: Session) -> frozenset[str]:
        active = select(Client.client_id, Client.last_seen).where(Client.state == ClientState.ACTIVE)
        seen = {client_id: at for client_id, at in session.execute(active) if at is not None}
        latest = max(seen.values(), default=self._clock())
        if self._clock() - latest > RECENTLY * 10:
            return frozenset()  # after a long stop no client is expected
        return frozenset(client_id for client_id, at in seen.items() if latest - at <= RECENTLY)

    def _pool_complete(self) -> bool:
        left = self._grace_ends - self._clock()
        # More than the whole grace is left if the clock was set back; then no round waits.
        waiting = timedelta(0) < left <= RECONNECT_GRACE
        return not waiting or self._expected <= self._presence.attending().keys()
