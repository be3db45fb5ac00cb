"""The supervisor: one conductor thread for each running run, and the operators' words to them.

Several runs go on at a time. Nothing here is worth saving: `start` reads from the database which runs are under way
and lets a conductor go on with each.
"""

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from coordinator.aggregation.rules import HyperparameterError
from coordinator.clock import utc_now
from coordinator.condition import Condition
from coordinator.rounds.conductor import Conductor
from coordinator.rounds.ending import end_conversation
from coordinator.rounds.evidence import RecordError, SignatureMemory
from coordinator.rounds.fleets.base import Held, RunFacts, Surroundings
from coordinator.rounds.fleets.remote import RemoteFleet
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.rounds.presence import Cancelled, Presence
from coordinator.rounds.states import (
    RUN_ENDED,
    end_assignment,
    interrupt_simulations,
    move_run,
)
from coordinator.rounds.submission import Submission
from federation.digests import digest
from federation.owners_code import described
from federation.refusals import Refusal
from storage import audit
from storage.blobs import BlobStore
from storage.database import Database
from storage.faults import Fault, explain_fault, fault_of
from storage.models import (
    Assignment,
    AssignmentState,
    Client,
    ClientState,
    Input,
    Phase,
    Round,
    Run,
    RunState,
)

log = logging.getLogger(__name__)

# After a restart, clients that attended shortly before get so long to come back before a round selects without them.
RECONNECT_GRACE = timedelta(seconds=30)
RECENTLY = timedelta(seconds=60)
RETRY_SECONDS = 1.0  # after which a conductor whose database failed begins again
# Faults that pass: a conductor tries again, and the monitor finds out when they are over.
_PASSING = frozenset({Fault.DATABASE, Fault.DISK, Fault.DESCRIPTORS})
DISK_REASON = "disk: "  # how the reason of a run begins that a full disk has paused


@dataclass(frozen=True)
class Submitted:
    """A run that was taken.

    Attributes:
        run_id: its id.
        warnings: what the operator should know about the specification.
    """

    run_id: str
    warnings: tuple[str, ...]


class Supervisor:
    """Conducts every run of the federation.

    Args:
        database: where facts are kept.
        blobs: where models and updates are kept.
        presence: who attends.
        signing_key: the coordinator's.
        federation_id: the federation.
        condition: where faults of the disk and the database are noted.
        device: where updates are aggregated, "cpu" or "cuda".
        keep_rounds: how many of the last rounds of each run keep their models and updates, beside the first and
            the best one; None keeps all.
        clock: the time, aware.
        new_id: makes ids of runs and assignments.

    Attributes:
        signatures: those that this process has verified or made.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        signing_key: Ed25519PrivateKey,
        federation_id: str,
        condition: Condition | None = None,
        device: str = "cpu",
        keep_rounds: int | None = None,
        clock: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._presence = presence
        self._signing_key = signing_key
        self._federation_id = federation_id
        self._condition = condition or Condition()
        self._device = device
        self._clock = clock
        self._new_id = new_id
        self.signatures = SignatureMemory()
        self._lock = threading.Lock()
        self._submitting = threading.Lock()  # a name is looked for and taken by one at a time
        self._signals: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._watchers: list[Callable[[str], None]] = []
        self._stopping = threading.Event()
        self._conducting = True
        self._expected: frozenset[str] = frozenset()
        self._grace_ends = clock()
        self._housekeeper = Housekeeper(
            database, blobs, presence, self._condition, keep_rounds=keep_rounds, clock=self._clock
        )
        presence.on_change(self._wake_all)

    # --- life

    def start(self, *, conduct: bool = True) -> None:
        """Goes on with every run that the database says is under way.

        Args:
            conduct: without it no run ever advances: the record can be read, and that is all.
        """
        with self._database.begin() as session:
            interrupt_simulations(session, self._clock())
        self._conducting = conduct
        if not conduct:
            log.info("held: no run advances")
            return
        with self._database.read() as session:
            self._expected = self._recently_attending(session)
            going = session.scalars(
                select(Run.run_id).where(Run.state.in_([RunState.PENDING, RunState.RUNNING])).order_by(Run.created)
            ).all()
            # A coordinator that died while it revoked a client may have left open what that client was asked for.
            revoked = session.scalars(
                select(Assignment.client_id)
                .join(Client, Client.client_id == Assignment.client_id)
                .where(Assignment.state == AssignmentState.OPEN, Client.state == ClientState.REVOKED)
                .distinct()
            ).all()
        for client_id in revoked:
            self.client_revoked(client_id)
        self._grace_ends = self._clock() + RECONNECT_GRACE
        self._housekeeper.start()
        for run_id in going:
            log.info("run %s: going on", run_id)
            self._conduct(run_id)

    def stop(self) -> None:
        """Lets every conductor come to rest. What is under way goes on at the next start."""
        self._stopping.set()
        self._wake_all()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
        self._housekeeper.stop()

    # --- operators' words

    def submit(
        self, spec: bytes, model: str, *, by: str, paused: bool = False, objectives: tuple[str, ...] = ()
    ) -> Submitted:
        """Takes a run.

        Args:
            spec: the TOML document.
            model: the digest of the initial model; its `models` row and its blob exist.
            by: who submits, for the record.
            paused: wait for `resume` before the first round.
            objectives: of the task, in its order, where the specification does not name them.

        Raises:
            Refusal: `spec`, `run-exists`.
        """
        submission = Submission.parse(spec, objectives)
        name = submission.spec.name
        run_id = self._new_id()[:12]
        now = self._clock()
        with self._submitting, self._database.begin() as session:
            submission.must_be_new(session)
            session.add(
                Run(
                    run_id=run_id,
                    name=name,
                    state=RunState.PAUSED if paused else RunState.PENDING,
                    spec=spec,
                    spec_digest=digest(spec),
                    initial_model=model,
                    model=model,
                    objectives=list(submission.objectives),
                    state_data={},
                    submitted_by=by,
                    created=now,
                )
            )
            audit.record(session, at=now, actor=by, action="run.submitted", subject=run_id, detail=name)
        if not paused:
            self._conduct(run_id)
        self.notify(run_id)
        return Submitted(run_id, submission.warnings)

    def pause(self, run_id: str, *, by: str) -> None:
        """Holds a run; replies to open assignments still count, and deadlines go on.

        Raises:
            Refusal: `run-state`.
        """
        self._move(run_id, RunState.PAUSED, by, "run.paused", f"paused by {by}")

    def pause_for_disk(self, cause: str) -> None:
        """Holds every run that is under way until `resume_after_disk` or an operator lets it go on.

        Args:
            cause: what the disk says.
        """
        with self._database.read() as session:
            going = session.scalars(
                select(Run.run_id).where(Run.state.in_([RunState.PENDING, RunState.RUNNING])).order_by(Run.created)
            ).all()
        for run_id in going:
            reason = f"{DISK_REASON}{cause}; free some space: then it goes on by itself, or with `admin resume`"
            self._give_up(run_id, RunState.PAUSED, reason)
            log.error("run %s: paused, %s", run_id, cause)

    def blob_failed(self, digest: str, error: Exception) -> None:
        """Holds every run whose clients were promised a blob that cannot be served.

        Args:
            digest: of the blob.
            error: what is wrong with it.
        """
        with self._database.read() as session:
            runs = session.scalars(
                select(Run.run_id)
                .join(Round)
                .join(Phase)
                .join(Assignment)
                .where(
                    Run.state == RunState.RUNNING,
                    Assignment.state == AssignmentState.OPEN,
                    or_(Assignment.base_model == digest, Assignment.inputs.any(Input.digest == digest)),
                )
                .distinct()
            ).all()
        for run_id in runs:
            self._pause_for_storage(run_id, error)

    def resume_after_disk(self) -> None:
        """Lets the runs go on that a full disk has paused, and that nobody has paused or stopped since."""
        if not self._conducting:
            return
        with self._database.read() as session:
            held = session.scalars(
                select(Run.run_id).where(Run.state == RunState.PAUSED, Run.reason.startswith(DISK_REASON))
            ).all()
        for run_id in held:
            log.info("run %s: goes on, the disk has space again", run_id)
            with suppress(Refusal):  # an operator was faster
                self._move(run_id, RunState.RUNNING, "coordinator", "run.resumed", "")
                self._conduct(run_id)

    def resume(self, run_id: str, *, by: str) -> None:
        """Lets a held run go on.

        Raises:
            Refusal: `run-state`.
        """
        self._move(run_id, RunState.RUNNING, by, "run.resumed", "")
        self._conduct(run_id)
        self._condition.look_again()

    def stop_run(self, run_id: str, *, by: str, reason: str = "") -> None:
        """Ends a run: open assignments are cancelled, the last completed model stays.

        Raises:
            Refusal: `run-state`.
        """
        self._move(run_id, RunState.STOPPED, by, "run.stopped", reason or f"stopped by {by}")

    # --- changes

    def watch(self, watcher: Callable[[str], None]) -> Callable[[], None]:
        """Calls `watcher` with the run's id after every change, from any thread. Returns the way to end that."""
        with self._lock:
            self._watchers.append(watcher)

        def unwatch() -> None:
            with self._lock:
                self._watchers.remove(watcher)

        return unwatch

    def notify(self, run_id: str) -> None:
        """Tells the run's conductor and its watchers that something changed. Callable from any thread."""
        self._signal(run_id).set()
        self._tell_watchers(run_id)

    def _tell_watchers(self, run_id: str) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            try:
                watcher(run_id)
            except Exception:
                log.exception("a watcher of run %s failed", run_id)  # no reason for the run to fail

    def client_revoked(self, client_id: str) -> None:
        """Cancels what a revoked client was asked for, so that no round waits for it."""
        now = self._clock()
        with self._database.begin() as session:
            held = session.scalars(
                select(Assignment)
                .where(Assignment.client_id == client_id, Assignment.state == AssignmentState.OPEN)
                .order_by(Assignment.assignment_id)
                .with_for_update()
            ).all()
            for assignment in held:
                end_assignment(assignment, AssignmentState.CANCELLED, now, "client-revoked")
            runs = {assignment.phase.round.run_id for assignment in held}
        for run_id in runs:
            self.notify(run_id)

    # --- inside

    def _move(self, run_id: str, to: RunState, by: str, action: str, reason: str) -> None:
        now = self._clock()
        with self._database.begin() as session:
            run = session.get_one(Run, run_id, with_for_update=True)
            if to is RunState.PAUSED is run.state and run.reason.startswith(DISK_REASON):
                run.reason = reason[:400]  # the operator's pause, which free space does not end
            else:
                move_run(run, to, now, reason)
            cancelled = end_conversation(session, run_id, reason, now) if to in RUN_ENDED else []
            audit.record(session, at=now, actor=by, action=action, subject=run_id, detail=reason)
        for assignment in cancelled:
            self._presence.say(assignment.client_id, Cancelled(assignment.assignment_id, assignment.reason))
        self.notify(run_id)

    def _conduct(self, run_id: str) -> None:
        """Starts a conductor after the one before it, if any, has come to rest."""
        if not self._conducting:
            return  # the next start that conducts finds the run in the database
        with self._lock:
            if self._stopping.is_set():
                return  # the next start finds the run in the database
            before = self._threads.get(run_id)
            thread = threading.Thread(
                target=self._conduct_after, args=(run_id, before), name=f"run-{run_id}", daemon=True
            )
            self._threads[run_id] = thread
        thread.start()

    def _conduct_after(self, run_id: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        while not self._stopping.is_set():
            try:
                self._conduct_now(run_id)
                break
            except Exception as error:
                # As after a crash: whatever was committed is there, and the next conductor goes on from it.
                if self._condition.note(error) is None:
                    raise
                self._stopping.wait(RETRY_SECONDS)
        self.notify(run_id)

    def _conduct_now(self, run_id: str) -> None:
        try:
            run, around = RunFacts.load(self._database, run_id), self._surroundings(run_id)
            fleet = RemoteFleet(
                run, around, presence=self._presence, new_id=self._new_id, pool_complete=self._pool_complete
            )
            Conductor(run, around, fleet).conduct()
        except Held:
            log.info("run %s: held", run_id)
        except RecordError as error:
            log.error("run %s: paused: the record differs from what was signed: %s", run_id, error)
            self._give_up(
                run_id,
                RunState.PAUSED,
                f"record: {error}; the row differs from what was signed: restore it, then resume the run",
            )
        except HyperparameterError as error:  # a plug-in that an earlier start of the coordinator could load
            log.error("run %s: paused: %s", run_id, error)
            self._give_up(run_id, RunState.PAUSED, f"algorithm.{error}; repair it, then resume the run")
        except (Exception, SystemExit) as error:  # a plug-in may try to end the process
            fault = fault_of(error)
            if fault in _PASSING:
                raise
            # Of a fault of the storage nothing is lost: an operator repairs it, then resumes.
            if fault is Fault.BLOB or isinstance(error, OSError | MemoryError):
                log.error("run %s: paused: %s", run_id, explain_fault(error))
                self._give_up(run_id, RunState.PAUSED, f"storage: {error}; repair it, then resume the run")
                return
            log.exception("run %s: failed", run_id)
            self._give_up(run_id, RunState.FAILED, described(error))

    def _pause_for_storage(self, run_id: str, error: BaseException) -> None:
        log.error("run %s: paused: %s", run_id, explain_fault(error))
        self._give_up(run_id, RunState.PAUSED, f"storage: {error}; repair it, then resume the run")

    def _give_up(self, run_id: str, to: RunState, reason: str) -> None:
        try:
            self._move(run_id, to, "coordinator", f"run.{to.lower()}", reason)
        except Refusal:
            log.info("run %s: had ended meanwhile", run_id)

    def _surroundings(self, run_id: str) -> Surroundings:
        signal = self._signal(run_id)

        def wait(seconds: float | None) -> None:
            if self._stopping.is_set():
                raise Held
            signal.wait(seconds)
            signal.clear()
            if self._stopping.is_set():
                raise Held

        return Surroundings(
            database=self._database,
            blobs=self._blobs,
            signing_key=self._signing_key,
            federation_id=self._federation_id,
            device=self._device,
            clock=self._clock,
            wait=wait,
            changed=lambda: self._tell_watchers(run_id),  # not its own signal: a conductor would wake itself
            signatures=self.signatures,
        )

    def _signal(self, run_id: str) -> threading.Event:
        with self._lock:
            return self._signals.setdefault(run_id, threading.Event())

    def _wake_all(self) -> None:
        with self._lock:
            signals = list(self._signals.values())
        for signal in signals:
            signal.set()

    def _recently_attending(self, session: Session) -> frozenset[str]:
        clients = session.scalars(
            select(Client).where(Client.state == ClientState.ACTIVE, Client.last_seen.is_not(None))
        ).all()
        seen = {client.client_id: client.last_seen for client in clients if client.last_seen is not None}
        if not seen:
            return frozenset()
        latest = max(seen.values())
        if self._clock() - latest > RECENTLY * 10:
            return frozenset()  # a long stop: whoever is still there will say so
        return frozenset(client for client, at in seen.items() if latest - at <= RECENTLY)

    def _pool_complete(self) -> bool:
        left = self._grace_ends - self._clock()
        # More than the whole grace is left when the clock was set back: no round waits until it catches up.
        waiting = timedelta(0) < left <= RECONNECT_GRACE
        return not waiting or self._expected <= self._presence.attending().keys()
