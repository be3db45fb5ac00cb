"""The coordinator's process on one thread: the real parts, and the places where it can be killed or preempted.

It has the parts of `coordinator/server.py`, without gRPC and without threads: the conductor runs in the caller's
thread, and its waits let other events happen.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogKey
from coordinator.audit.sequencer import Sequencer
from coordinator.clock import SteadyClock, check_follows
from coordinator.cluster.announcements import Announcements
from coordinator.cluster.leases import OneConductor, SharedLeases, time_of
from coordinator.cluster.registry import CoordinatorFacts, Registry
from coordinator.fault_state import FaultState
from coordinator.lease_keeper import LOOKS, LeaseKeeper
from coordinator.members import departures, membership
from coordinator.members.access.known_members import KnownMember, KnownMembers
from coordinator.members.home_starts import take_start
from coordinator.monitor import ClockWatch
from coordinator.rounds.bell import Bell
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.fleets.deliveries import open_assignments_of
from coordinator.rounds.fleets.presence import Assigned, AttendanceStream, Presence
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.rounds.replies.content import payload_problem
from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.group_commit import GroupCommit
from coordinator.rounds.replies.intake import Admission, Intake, RecordedReply, _Checked, named_assignment
from coordinator.rounds.replies.revoked import revoked_clients
from coordinator.rounds.replies.uploads import ReplyUpload, Upload, Uploads
from coordinator.rounds.run_commands import RunCommands
from coordinator.rounds.runs.run_states import RunStates
from coordinator.services.federation import _offering
from coordinator.signing_keys import Signing
from federation.refusals import Refusal
from federation.transport.payload_check import PayloadCheck
from federation.trust.identity import client_uri
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from federation.v1.federation_pb2 import Hello
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.faults import StorageFault
from storage.models import Assignment, Client, Phase
from storage.states import AssignmentState, ClientState
from tests.simulated.faults import Faults
from tests.simulated.plans import FEDERATION, TASK
from tests.simulated.world import World

LOOK_SECONDS = 20.0  # between two looks of the monitor and the housekeeper
LEASE = timedelta(seconds=6)
SLEPT = "slept past its lease"
SEQUENCE_SECONDS = 60.0  # between two batches of the audit log
QUOTA = 1 << 20  # bytes of uploads of one member
TOGETHER_SECONDS = 4.0  # the longest time that a reply of such a schedule waits for others

EndCall = Callable[[Callable[[], SignedEnvelope]], None]
"""Ends the call of a member with what the record of its reply returns or raises."""


class Killed(KeyboardInterrupt):
    """The process was killed: what it has not stored is lost.

    Like Ctrl-C it is no failure of the code that it passes through, so none records it as one.
    """


@dataclass
class Machine:
    """What outlives the coordinator's process: its directory and its keys, and the state of its disk.

    Attributes:
        directory: of the coordinator; it has the database.
        world: the time.
        faults: of the schedule.
        log_key: of the audit log.
        signing: the coordinator's keys.
        several: True if several coordinators serve, under leases.
        groups: True if replies are handed in in groups.
        full_until: when the disk has space again, in the world's seconds.
    """

    directory: Path
    world: World
    faults: Faults
    log_key: LogKey
    signing: Signing
    several: bool = False
    groups: bool = False
    full_until: float = 0.0

    @property
    def full(self) -> bool:
        """True while the disk is full."""
        return self.world.seconds < self.full_until

    def fill(self) -> None:
        """Fills the disk for a while."""
        self.full_until = self.world.seconds + self.faults.seconds(5, 60)


class Process:
    """One process of the coordinator, from its start until it is killed.

    Args:
        machine: where it runs.
        run_id: the run of the schedule.
        new_id: makes the ids of assignments, and that of the process.
        sleeps: what happens while its conductor sleeps past its lease.
    """

    def __init__(
        self,
        machine: Machine,
        run_id: str,
        new_id: Callable[[], str],
        sleeps: Callable[["Process"], None] | None = None,
    ) -> None:
        self._sleeps = sleeps
        self.asleep = False
        self.machine, self.world, self.faults = machine, machine.world, machine.faults
        self.alive = True
        self.spare = False  # the reserve was released: small writes succeed on a full disk
        self.acting = False  # an event happens, or a transaction is open
        self._doubts = False  # its clock, because of which runs are paused
        self._resumes = True  # runs that a full disk has paused, also before the start
        self._run_id = run_id
        self._revoked: frozenset[str] = frozenset()
        self._left: frozenset[str] = frozenset()
        self._uploading: list[ReplyUpload] = []
        self.database = _Database.opened(machine.directory, self)
        self.database.entry_key = machine.log_key.entry_key
        self.blobs = _Blobs(machine.directory / "blobs", self)
        self.blobs.sweep_temporary()
        self.clock = SteadyClock(self.world.now, self.world.monotonic)
        self.fault_state = FaultState(clock=self.world.monotonic)
        self._clocks = ClockWatch(self.clock, self.fault_state, judged=machine.several)
        self.fault_state.noted.listen(self._on_fault)
        announcements = _Looks() if machine.several else Announcements()
        self.presence = Presence(announcements)
        self.uploads = Uploads(self.database, self.blobs, quota=QUOTA)
        self._leases = self._shared_leases(new_id()) if machine.several else None
        self.changes = _Changes(announcements, self)
        self.states = RunStates(self.database, self.presence, self.changes, self.clock)
        signatures, leases = SignatureMemory(), self._leases or OneConductor()
        self.conductors = _Conductors(
            database=self.database,
            blobs=self.blobs,
            presence=self.presence,
            changes=self.changes,
            states=self.states,
            signing=machine.signing,
            signatures=signatures,
            faults=self.fault_state,
            leases=leases,
            submitted=lambda run_id, spec: True,
            device="cpu",
            clock=self.clock,
            new_id=new_id,
        )
        self.commands = RunCommands(
            self.database, self.conductors, leases, self.states, self.changes, self.fault_state, clock=self.clock
        )
        self.housekeeper = Housekeeper(
            self.database,
            self.blobs,
            self.presence,
            self.uploads,
            self.fault_state,
            end_revoked=self.states.end_revoked,
            keep_rounds=None,
            clock=self.world.now,
            monotonic=self.world.monotonic,
        )
        self.intake = Intake(
            self.database,
            machine.signing,
            changed=self.changes.notify,
            replied=self.changes.count_reply,
            answered=self.presence.forget,
            clock=self.clock,
            signatures=signatures,
        )
        self.groups = self.intake._group = _Groups(self.database, self.intake._record_all)
        self.members = KnownMembers(self.database)
        self._together: list[tuple[Admission, Refusal | None, EndCall]] = []  # replies that are handed in at once
        self.sequencer = Sequencer(
            self.database,
            machine.log_key,
            machine.directory,
            faults=self.fault_state,
            clock=self.clock,
        )

    def start(self) -> None:
        """Starts as the server does; the audit log is chained later. Raises ClockBehind."""
        check_follows(self.database, self.world.now())
        if self._leases is not None:
            self._registry.enter()
        with self.database.begin() as session:
            audit.record(session, at=self.clock(), actor="coordinator", action="coordinator.started")
        with self.database.read() as session:
            self._revoked = revoked_clients(session)
            self._left = frozenset(session.scalars(select(Client.client_id).where(Client.left.is_not(None))))
        self.conductors.start()
        self._every(LOOK_SECONDS, self._look)
        self._every(SEQUENCE_SECONDS, self.sequencer.sequence)
        if self._leases is not None:
            self._every(LEASE.total_seconds() / LOOKS, self._keep_leases)

    def conduct(self) -> None:
        """Goes on with the run, as the conductor's thread does, until nothing is left to do for it."""
        while self.conductors.wanted:
            self.conductors.wanted = False
            try:
                self.conductors._conduct_now(self._run_id)
            except Exception as error:
                if self.fault_state.note(error) is None:
                    raise
                self.conductors.wanted = True
                self.sleep(1.0)

    def idle(self) -> None:
        """Lets events happen until the run needs a conductor, for a second at most."""
        self.sleep(1.0, lambda: self.conductors.wanted)

    def close(self) -> None:
        """Closes what a dead process has open; nothing more is written."""
        self.alive = False
        for upload in self._uploading:
            upload.leave()
        self.database.close()

    # --- time

    def sleep(self, seconds: float | None, woken: Callable[[], bool] = lambda: False) -> None:
        """Lets events happen until these seconds are over, or until `woken`."""
        self.may_die("killed while it waits")
        until = None if seconds is None else self.world.seconds + seconds
        while not woken():
            self.acting = True
            try:
                if not self.world.next(until):
                    return
            finally:
                self.acting = False
            self.check_alive()

    def may_die(self, kind: str) -> None:
        """Kills the process if the fault strikes, and stops whatever goes on in a dead one."""
        self.check_alive()
        if self.faults.strikes(kind):
            self.alive = False
            raise Killed(kind)

    def check_alive(self) -> None:
        """Stops whatever goes on in a dead process."""
        if not self.alive:
            raise Killed("dead")

    def may_be_preempted(self) -> None:
        """Lets others act before the conductor goes on."""
        while not self.acting and self.faults.strikes("preempted"):
            self.acting = True
            try:
                self.world.next(self.world.seconds + 5.0)
            finally:
                self.acting = False
            self.check_alive()

    def may_sleep(self) -> None:
        """Lets another coordinator conduct the run, before the conductor goes on."""
        if self._sleeps is not None and not self.acting and self.faults.strikes(SLEPT):
            self.acting = self.asleep = True
            try:
                self._sleeps(self)
            finally:
                self.acting = self.asleep = False
            self.check_alive()

    # --- calls of members

    def attends(self, stream: AttendanceStream, hello: Hello, samples: int, objectives: list[str]) -> list[Assigned]:
        """A member attends; `hello` has its starts. Returns its open assignments."""
        self.fault_state.check_serving("Attend")
        self._check_member(stream.client_id)
        with self.database.begin() as session:
            client = session.get_one(Client, stream.client_id)
            take_start(client, hello)
            client.tasks, client.objectives = {TASK: samples}, {TASK: objectives}
            client.last_seen = stream.last_seen
        self.presence.join(stream)
        with self.database.read() as session:
            waiting = open_assignments_of(session, stream.client_id)
        for assigned in waiting:
            stream.note(assigned)
        return waiting

    def leaves(self, client_id: str, withdrawal: SignedEnvelope) -> None:
        """A member leaves the federation."""
        self.fault_state.check_serving("Leave")
        caller = client_uri(FEDERATION, client_id)
        with self.database.begin() as session:
            departures.leave(session, client_id, withdrawal, signing=self.machine.signing, by=caller, now=self.clock())
        self._left |= {client_id}
        self.changes.notify(self._run_id)

    def fetch(self, client_id: str, digest: str) -> bytes:
        """A blob that an assignment offers."""
        self._check_member(client_id)
        if not self.presence.offering(client_id, digest):
            with self.database.read() as session:
                _offering(session, client_id, digest)
        return self.blobs.read(digest)

    def admit(self, client_id: str, reply: SignedEnvelope, start: bytes) -> Admission | SignedEnvelope:
        """The admission of a reply, or its receipt if it had been given."""
        self.fault_state.check_serving("Submit")
        member, named = self._member(client_id), named_assignment(reply, ReplyManifest)
        if (order := self.presence.given(client_id, named)) is not None:
            given = self.intake.admit_given(reply, order, member.signing_key, member.start, start)
            if given is not None:
                self.world.counts["admitted without a look"] += 1
                return given
        return self.intake.admit(client_id, reply, start)

    def upload(self, admission: Admission) -> ReplyUpload:
        """Begins or goes on with an upload, which ends with `end`."""
        upload = self.uploads.begin(admission, self._check(admission))
        self._uploading.append(upload)
        return upload

    def end(self, upload: ReplyUpload) -> None:
        """Ends an upload; what has arrived is kept, unless it is complete."""
        self._uploading.remove(upload)
        self.uploads.end(upload)

    def take_whole(self, admission: Admission, payload: bytes, end: EndCall) -> None:
        """Takes a payload that came in one piece, or a reply without one."""
        manifest = admission.manifest
        if admission.layout is None:
            self._record(admission, None, end)
            return
        with self.blobs.writer(hash=False) as writer:
            upload = Upload(writer, self._check(admission), manifest.payload, manifest.payload_bytes)
            upload.take(payload, 0)
            self.stored(admission, upload, end)

    def stored(self, admission: Admission, upload: Upload, end: EndCall) -> None:
        """Stores and records a payload that has arrived."""
        upload.finish()
        problem = payload_problem(upload.check, admission.kind, admission.limits)
        if problem is None:
            upload.store()
        self._record(admission, problem, end)

    def _record(self, admission: Admission, problem: Refusal | None, end: EndCall) -> None:
        """Records a reply: at once, or in a schedule with groups together with those that come in a moment."""
        if not self.machine.groups:
            end(partial(self.intake.record, admission, problem))
            return
        if not self._together:
            self.world.after(self.faults.seconds(0, TOGETHER_SECONDS), self._record_together)
        self._together.append((admission, problem, end))

    def _record_together(self) -> None:
        """Records all replies that wait, as threads do that come while another transaction is under way."""
        if not self.alive:
            return
        together, self._together = self._together, []
        places = [self.groups.hand_in((admission, problem)) for admission, problem, _ in together]
        self.groups.handed = {id(place.item[0]): place for place in places}
        self.world.counts["replies in groups"] += len(together) if len(together) > 1 else 0
        for admission, problem, end in together:
            end(partial(self.intake.record, admission, problem))
        if any(isinstance(place.result, Refusal) for place in places):
            self.world.counts["refused in a group"] += len(together) > 1

    def refusal(self, error: Exception) -> Refusal:
        """The refusal of a call that failed."""
        if isinstance(error, Refusal):
            return error
        refusal = self.fault_state.refusal(error)
        if refusal is None:
            raise error
        return refusal

    def is_open(self, assignment_id: str) -> bool:
        """True if an assignment is open by the record."""
        with self.database.read() as session:
            return session.get_one(Assignment, assignment_id).state is AssignmentState.OPEN

    def takes(self, assignment_id: str) -> bool:
        """True if an assignment is open by the record, before its deadline, and its client is a member."""
        query = select(Assignment.state, Client.state, Phase.deadline).join_from(Assignment, Client).join(Phase)
        with Database.read(self.database) as session:
            state, member, ends = session.execute(query.where(Assignment.assignment_id == assignment_id)).one()
        is_open = state is AssignmentState.OPEN and member is ClientState.ACTIVE
        return is_open and self.clock() <= ends

    # --- calls of operators

    def revoke(self, client_id: str) -> None:
        """Revokes a member."""
        with self.database.begin() as session:
            membership.revoke(session, client_id, "it left", by="operator", now=self.clock())
        self._revoked |= {client_id}
        self.states.end_revoked()
        self.changes.notify(self._run_id)

    @property
    def uploading(self) -> bool:
        """True while an upload is under way."""
        return bool(self._uploading)

    def learn_of(self, other: "Process") -> None:
        """Learns which members were revoked, or have left, by way of another coordinator."""
        self._revoked |= other._revoked
        self._left |= other._left

    # --- inside

    def _shared_leases(self, coordinator: str) -> SharedLeases:
        """The leases of one of several coordinators; the database's clock is never set."""
        clock = self.world.unset_clock
        facts = CoordinatorFacts(coordinator, "", "", "", clock())
        self._registry = Registry(self.database, facts, lease=LEASE, clock=clock, moment=time_of(clock))
        return SharedLeases(self.database, coordinator, duration=LEASE, moment=time_of(clock))

    def _check(self, admission: Admission) -> PayloadCheck:
        assert admission.layout is not None
        return PayloadCheck(admission.layout, admission.manifest.payload.partition(":")[0])

    def _member(self, client_id: str) -> KnownMember:
        """The member that calls, which is read unless it is known, as access control does."""
        if (known := self.members.find(client_id)) is not None:
            return known
        changes = self.members.changes()
        with self.database.read() as session:
            client = session.get_one(Client, client_id)
        if client.state is ClientState.REVOKED:
            raise Refusal("certificate-revoked", membership.REVOKED)
        if client.state is ClientState.LEFT:
            raise Refusal("client-left", "it has left")
        member = KnownMember(b"", client.state, client.signing_key, client.start)
        self.members.note(client_id, member, changes)
        return member

    def _check_member(self, client_id: str) -> None:
        """Refuses the call of a member that was revoked or has left, as access control does."""
        if client_id in self._revoked:
            raise Refusal("certificate-revoked", membership.REVOKED)
        if client_id in self._left:
            raise Refusal("client-left", "it has left")

    def _on_fault(self, fault: StorageFault | None) -> None:
        self.spare |= fault is StorageFault.DISK

    def _every(self, seconds: float, work: Callable[[], object]) -> None:
        """Does some work from now on, as a thread of the coordinator does."""
        if not self.alive:
            return
        self.world.after(seconds, lambda: self._every(seconds, work))
        try:
            work()
        except Exception as error:
            if self.fault_state.note(error) is None:
                raise

    def _keep_leases(self) -> None:
        if self._leases is not None and not self.asleep:
            LeaseKeeper(self.database, self._leases, self._registry, self.conductors, self.fault_state).look()

    def _look(self) -> None:
        """What the monitor and the housekeeper do from time to time."""
        self._clocks.look()
        self._look_at_disk()
        self._look_at_clock()
        self.housekeeper.tidy()

    def _look_at_clock(self) -> None:
        cause = self.fault_state.present.get(StorageFault.CLOCK)
        if cause is not None:
            self.commands.pause_for_fault(StorageFault.CLOCK, cause)
            self._doubts = True
        elif self._doubts and StorageFault.DISK not in self.fault_state.present:
            self.commands.resume_after_fault()
            self._doubts = False

    def _look_at_disk(self) -> None:
        if self.machine.full:
            cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.fault_state.note(cause, lasts=True)
            self.spare = True
            self.commands.pause_for_fault(StorageFault.DISK, self.fault_state.present[StorageFault.DISK])
            self._resumes = True
        elif self._resumes or StorageFault.DISK in self.fault_state.present:
            self.fault_state.over(StorageFault.DISK)
            self.spare = False
            if StorageFault.CLOCK not in self.fault_state.present:
                self.commands.resume_after_fault()
            self._resumes = False


class _Database(Database):
    """The database of a process: each transaction is a place where it can be killed, and its disk can be full."""

    process: Process

    @classmethod
    def opened(cls, directory: Path, process: Process) -> "_Database":
        database = cls.open(f"sqlite:///{directory / 'coordinator.db'}", durable=False, create=False)
        assert isinstance(database, cls)
        database.process = process
        return database

    @property
    def serves_many(self) -> bool:
        return self.process.machine.several

    @contextmanager
    def begin(self) -> Iterator[Session]:
        process, machine = self.process, self.process.machine
        process.check_alive()
        process.may_be_preempted()
        process.may_sleep()
        if process.faults.strikes("disk full"):
            machine.fill()
        before, process.acting = process.acting, True
        try:
            with super().begin() as session:
                yield session
                process.may_die("killed before a commit")
                if machine.full and not process.spare:
                    raise _failure("database or disk is full", sqlite3.SQLITE_FULL)
                if process.faults.strikes("database failed"):
                    raise _failure("database is locked", sqlite3.SQLITE_BUSY)
            process.may_die("killed after a commit")
        finally:
            process.acting = before

    @contextmanager
    def read(self) -> Iterator[Session]:
        self.process.check_alive()
        self.process.may_be_preempted()
        with super().read() as session:
            yield session


def _failure(message: str, code: int) -> OperationalError:
    cause = sqlite3.OperationalError(message)
    cause.sqlite_errorcode = code
    return OperationalError("COMMIT", None, cause)


class _Blobs(DirectoryStore):
    """The blobs of a process: each blob is a place where it can be killed, and its disk can be full."""

    def __init__(self, root: Path, process: Process) -> None:
        super().__init__(root, durable=False)
        self._process = process

    def _place(self, descriptor: int, temporary: Path, digest: str) -> None:
        self._process.may_die("killed before a blob is stored")
        if self._process.machine.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._place(descriptor, temporary, digest)
        self._process.may_die("killed after a blob is stored")


class _Groups(GroupCommit[_Checked, Refusal | RecordedReply]):
    """Groups without threads: the first item of those that were handed in commits them all."""

    def __init__(self, database: Database, write: Callable[[Session, Sequence[_Checked]], Any]) -> None:
        super().__init__(database, write)
        self.handed: dict[int, Any] = {}  # by the admission

    def commit(self, item: _Checked) -> Refusal | RecordedReply:
        place = self.handed.pop(id(item[0]), None)
        if place is None:
            return super().commit(item)
        if not place.ended:
            self._commit_all(place)
        found: Refusal | RecordedReply = place.outcome()
        return found


class _Bell(Bell):
    """A bell whose wait lets events happen."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def wait(self, seconds: float | None, replies: int) -> None:
        self._process.sleep(seconds, lambda: self._rung or self._replies >= replies)
        self._rung, self._replies = False, 0


class _Looks(Announcements):
    """None arrive: the conductor looks at the record every second."""

    look_seconds = 1.0


class _Changes(RunChanges):
    """The changes of a run whose bell lets events happen."""

    def __init__(self, announcements: Announcements, process: Process) -> None:
        super().__init__(announcements, process.presence, process.database)
        self._bells[process._run_id] = _Bell(process)


class _Conductors(Conductors):
    """Conductors without threads: `wanted` says that the run needs one."""

    wanted = False

    def conduct(self, run_id: str) -> None:
        self.wanted = True
