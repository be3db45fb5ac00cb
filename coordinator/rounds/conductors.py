"""The conductors: one thread for each run that is under way, and the leases under which they conduct.

Their own state need not survive a crash: `start` reads the runs under way from the database, and conducts each.
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import datetime

from sqlalchemy.exc import SQLAlchemyError

from coordinator.cluster.leases import Lease, Leases
from coordinator.fault_state import FaultState
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductor import Conductor
from coordinator.rounds.fleets.base import Fenced, Held, RunContext, RunFacts
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.fleets.remote import RemoteFleet
from coordinator.rounds.fleets.returning import ReturningMembers
from coordinator.rounds.replies.evidence import RecordError, SignatureMemory
from coordinator.rounds.runs.run_states import RunStates
from coordinator.rounds.transitions import UNDER_WAY, run_ids
from coordinator.signing_keys import Signing
from federation.aggregation.interface import HyperparameterError
from federation.owners_code import described, passes
from federation.plugins import PluginError
from storage.blobs import BlobStore
from storage.database import Database
from storage.faults import StorageFault, explain_fault, fault_of
from storage.models import Run

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # before a conductor whose database failed starts again; after an unknown error twice as long,
MAX_RETRY_SECONDS = 60.0  # up to this
# Temporary faults: a conductor tries again, and the monitor notes when they are over.
_PASSING = frozenset({StorageFault.DATABASE, StorageFault.DISK, StorageFault.DESCRIPTORS, StorageFault.BLOB_STORE})
# Faults of this machine, because of which other coordinators shall conduct its runs.
_HELD_BACK = frozenset({StorageFault.DISK, StorageFault.BLOB_STORE, StorageFault.CLOCK})


class Conductors:
    """Conducts every run of the federation that is under way, in a thread of its own. Any thread may call.

    Args:
        database: the record.
        blobs: keeps models and updates.
        presence: the clients that attend.
        changes: wake the conductors.
        states: pauses a run that cannot go on.
        signing: the coordinator's keys.
        signatures: those that this process has verified or made.
        faults: notes faults of the disk and the database.
        leases: says which runs this coordinator may conduct.
        submitted: True if the audit log tells of the submission of a run, by its id and its specification's digest.
        device: aggregates the updates, "cpu" or "cuda".
        clock: the time, aware.
        new_id: makes the ids of assignments.
        conducts: False if no run shall advance.

    Attributes:
        conducts: as given.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        changes: RunChanges,
        states: RunStates,
        signing: Signing,
        signatures: SignatureMemory,
        faults: FaultState,
        leases: Leases,
        submitted: Callable[[str, str], bool],
        device: str,
        clock: Callable[[], datetime],
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        conducts: bool = True,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._presence = presence
        self._changes = changes
        self._states = states
        self._signing = signing
        self._signatures = signatures
        self._faults = faults
        self._leases = leases
        self._submitted = submitted
        self._device = device
        self._clock = clock
        self._new_id = new_id
        self.conducts = conducts
        self._returning = ReturningMembers(database, presence, clock)
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._leased: dict[str, Lease] = {}  # the runs that this process conducts
        self._stopping = threading.Event()

    # --- life

    def start(self) -> None:
        """Goes on with every run that is under way."""
        if not self.conducts:
            log.info("held: no run advances")
            return
        self._states.end_revoked()
        self._returning.expect()
        with self._database.read() as session:
            runs = run_ids(session, Run.state.in_(UNDER_WAY))
        for run_id in runs:
            log.info("run %s: going on", run_id)
            self.conduct(run_id)

    def stop(self) -> None:
        """Waits until every conductor has stopped. Their runs go on at the next start."""
        self._stopping.set()
        self._changes.wake_all()
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()

    def conduct(self, run_id: str) -> None:
        """Starts the conductor of a run, which begins after the previous one has stopped."""
        with self._lock:
            if not self.conducts or self._holds_back or self._stopping.is_set():
                return  # the next start that conducts finds the run in the database, or another coordinator does
            arguments = (run_id, self._threads.get(run_id))
            thread = threading.Thread(target=self._conduct_after, args=arguments, name=f"run-{run_id}", daemon=True)
            self._threads[run_id] = thread
            thread.start()  # under the lock: `take_over` must not take it for one that has ended

    # --- leases

    def hold_back(self) -> None:
        """Ends the leases because of a fault; none is taken until it is over. Other coordinators take the runs."""
        if self._holds_back:
            self._changes.wake_all()

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
            self._returning.expect()
        for run_id in sorted(new):
            self.conduct(run_id)

    def lose(self, run_id: str) -> None:
        """Ends the conductor of a run that another coordinator has taken."""
        with self._lock:
            self._leased.pop(run_id, None)
        log.warning("run %s: the lease is lost, another coordinator conducts it", run_id)
        self._changes.bell(run_id).ring()

    # --- inside

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
        self._changes.notify(run_id)

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
                run, context, presence=self._presence, new_id=self._new_id, pool_complete=self._returning.are_back
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
        unknown = None
        if isinstance(error, RecordError):
            cause = f"the record differs from what was signed: {error}"
            reason = f"record: {error}; the row differs from what was signed: restore it, then resume the run"
        elif isinstance(error, HyperparameterError):  # a plug-in that an earlier start of the coordinator could load
            cause, reason = str(error), f"algorithm.{error}; repair it, then resume the run"
        elif fault_of(error) is StorageFault.BLOB or isinstance(error, OSError | MemoryError):
            cause, reason = explain_fault(error), f"storage: {error}; repair it, then resume the run"
        else:
            cause = str(error) if isinstance(error, PluginError) else described(error)
            reason, unknown = f"error: {cause}", error
        log.error("run %s: paused: %s", run_id, cause, exc_info=unknown)
        self._states.pause(run_id, reason, run)

    def _check_submitted(self, run_id: str) -> None:
        with self._database.read() as session:
            spec = session.get_one(Run, run_id).spec_digest  # loading the run has compared it with the document
        if not self._submitted(run_id, spec):
            why = "no entry of the audit log tells that this run was submitted with this specification"
            raise RecordError("runs", run_id, "spec", why)

    def _run_context(self, run_id: str, lease: Lease) -> RunContext:
        bell, look = self._changes.bell(run_id), self._changes.look_seconds

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
            changed=lambda: self._changes.tell_watchers(run_id),  # without its own bell: a conductor would wake itself
            signatures=self._signatures,
        )

    def _check_conducts(self, run_id: str, lease: Lease) -> None:
        """Raises Held if the coordinator stops, holds back, or has lost the lease."""
        if self._stopping.is_set() or self._holds_back or self._leased.get(run_id) != lease:
            raise Held
