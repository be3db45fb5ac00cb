"""Doing assignments: check, fetch what they need, do the work, sign, spool.

Each lane does one assignment at a time. Work that trains or evaluates takes the lane `compute`; messages of a protocol
take the lane `protocol`, so that they do not wait behind a training of hours.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from federation.channels import refusal_from_rpc_error
from federation.envelope import seal
from federation.member_files import MemberFiles
from federation.owners_code import described, owners_frame
from federation.refusals import Refusal
from federation.tasks import DataError
from federation.training.errors import TrainingDiverged, TrainingStopped
from federation.v1.common_pb2 import AssignmentManifest, Input, SignedEnvelope, UpdateManifest
from federation.v1.federation_pb2 import FetchBlobRequest
from federation.vectors import Vector, read_vector
from federation.work.base import Lane, Result, WorkError, payload_layout
from worker.assignments import Declined, Order, check_assignment
from worker.attacker import Attacker
from worker.backoff import Backoff
from worker.cache import ModelCache, ModelMismatch
from worker.events import Events
from worker.execution import Execution, Offer
from worker.policy import Limits
from worker.progress import Progress
from worker.session import ANSWER_SECONDS, SLOWEST_BYTES_PER_SECOND, Session
from worker.sessions import Sessions
from worker.spool import DiskFull, Spool

TIDY_SECONDS = 600.0
LOGGER = logging.getLogger("fedpareto.worker")


@dataclass(eq=False)
class _Job:
    order: Order
    began: datetime | None = None
    progress: float = 0.0
    unwanted: bool = False

    @property
    def manifest(self) -> AssignmentManifest:
        """Of the assignment."""
        return self.order.manifest

    @property
    def lane(self) -> Lane:
        """Where it is done."""
        return self.order.work.lane


class Runner:
    """The worker's hands.

    Args:
        member: who we are.
        offers: the owner's allow-list, by task name.
        caches: of models and inputs, for each lane.
        spool: where finished replies go.
        session: lends its channel, and passes refusals on.
        progress: how far the coordinator has come.
        sessions: what is remembered of rounds.
        limits: the owner's bounds.
        backoff: delays after a broken download.
        events: where to tell.
        software: the name and version of this worker.
        attacker: what turns results into an attack; None for an honest member.
        finished: called when something new is in the spool.
    """

    def __init__(
        self,
        *,
        member: MemberFiles,
        offers: Mapping[str, Offer],
        caches: Mapping[Lane, ModelCache],
        spool: Spool,
        session: Session,
        progress: Progress,
        sessions: Sessions,
        limits: Limits,
        backoff: Backoff,
        events: Events,
        software: str,
        attacker: Attacker | None,
        finished: Callable[[], None],
    ) -> None:
        self._member = member
        self._offers = offers
        self._allowed = {name: offer.allowed for name, offer in offers.items()}
        self._caches = caches
        self._spool = spool
        self._session = session
        self._progress = progress
        self._sessions = sessions
        self._limits = limits
        self._backoff = backoff
        self._events = events
        self._software = software
        self._execution = Execution(member.client_id, attacker, session.now, self._wait)
        self._finished = finished
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._held: dict[str, SignedEnvelope] = {}  # by assignment, until the owner has accepted a restore
        self._told_full = False
        self._current: dict[Lane, _Job] = {}
        self._stopping = False

    # What the session's thread calls

    def assigned(self, envelope: SignedEnvelope) -> None:
        """Takes an assignment in, unless it is here already in whatever state, or has to be declined."""
        try:
            self._assigned(envelope)
        except Declined as declined:
            self._decline(declined)

    def _assigned(self, envelope: SignedEnvelope) -> None:
        order = check_assignment(
            envelope,
            member=self._member,
            allowed=self._allowed,
            limits=self._limits,
            newest_round=self._newest_round,
            now=self._session.now(),
        )
        manifest, name = order.manifest, order.manifest.assignment_id
        with self._changed:
            # The spool is asked under the same lock under which a finished job leaves `_current`.
            jobs = [*self._current.values(), *self._waiting]
            if self._spool.holds(name) or self._spool.renew(name):
                self._finished()
                return
            if any(job.manifest.assignment_id == name for job in jobs) or name in self._held:
                return
            if len(self._waiting) + len(self._held) >= self._limits.waiting:
                raise Declined(name, "limit:waiting", f"{self._limits.waiting} assignments wait here already")
            self._told_full = False
            if self._progress.waits(manifest.run_id):
                self._held[name] = envelope
                return
            self._progress.saw_round(manifest.run_id, manifest.round)
            self._waiting.append(_Job(order))
            self._changed.notify_all()

    def _newest_round(self, run_id: str) -> int | None:
        """None while the run waits for the owner to accept a restore, and its assignments are held."""
        return None if self._progress.waits(run_id) else self._progress.newest_round(run_id)

    def restored(self) -> None:
        """Goes on with what was held until the owner accepted a restore."""
        with self._changed:
            held, self._held = self._held, {}
        for envelope in held.values():
            self.assigned(envelope)

    def cancelled(self, assignment_id: str, reason: str) -> None:
        """Drops an assignment, wherever it is."""
        with self._changed:
            known = self._spool.holds(assignment_id) or self._held.pop(assignment_id, None) is not None
            for job in (*self._current.values(), *self._waiting):
                if job.manifest.assignment_id == assignment_id:
                    job.unwanted = known = True
            self._waiting = deque(job for job in self._waiting if not job.unwanted)
        self._spool.remove(assignment_id)
        if known:
            self._events.tell(
                "cancelled",
                f"assignment {assignment_id}: no longer wanted ({reason})",
                assignment_id=assignment_id,
                reason=reason,
            )

    def working(self) -> tuple[str, float]:
        """The assignment in work, empty when idle, and the share of it that is done."""
        with self._changed:
            job = next(iter(self._current.values()), None)  # the one that has lasted longest
        return (job.manifest.assignment_id, job.progress) if job is not None else ("", 0.0)

    # What others call

    def stop(self) -> None:
        """Ends `run`: what is in work is dropped, and will be asked for again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self, lane: Lane) -> None:
        """Does what is assigned in a lane, in order of arrival, until `stop`."""
        while (job := self._take(lane)) is not None:
            try:
                self._do(job)
            except Declined as declined:
                self._decline(declined)
            except (DiskFull, OSError) as error:  # what the owner's own code raises does not get here
                name = job.manifest.assignment_id
                self._decline(Declined(name, "disk", f"make room on this worker's disk: {error}"))
            except TrainingStopped:
                late = self._late(job)
                if late is not None and not (self._stopping or job.unwanted):
                    self._decline(late)
            finally:
                with self._changed:
                    del self._current[lane]

    def _take(self, lane: Lane) -> _Job | None:
        def ready() -> bool:
            return self._stopping or any(job.lane is lane for job in self._waiting)

        with self._changed:
            while not self._changed.wait_for(ready, timeout=TIDY_SECONDS):
                self._sessions.sweep(self._session.now())
            if self._stopping:
                return None
            job = next(job for job in self._waiting if job.lane is lane)
            self._waiting.remove(job)
            self._current[lane] = job
            return job

    def _late(self, job: _Job) -> Declined | None:
        """Why the time for a job is over; None when it is not."""
        now, name = self._session.now(), job.manifest.assignment_id
        if now > job.order.deadline:
            return Declined(name, "deadline", "its deadline passed before it was done")
        if job.began is not None and (now - job.began).total_seconds() > self._limits.hours * 3600:
            return Declined(name, "limit:hours", f"this worker works on an assignment for {self._limits.hours:g} hours")
        return None

    def _decline(self, declined: Declined) -> None:
        if declined.reason != "limit:waiting" or not self._told_full:  # of a flood, the owner hears once
            self._events.warn(
                "declined",
                f"assignment {declined.assignment_id or '(unreadable)'}: declined, {declined.reason}: "
                f"{declined.message}",
                assignment_id=declined.assignment_id,
                reason=declined.reason,
            )
        self._told_full |= declined.reason == "limit:waiting"
        if declined.assignment_id:
            self._session.decline(declined.assignment_id, declined.reason, declined.message)

    def _do(self, job: _Job) -> None:
        manifest = job.manifest
        name, offer = manifest.assignment_id, self._offers[manifest.task]

        job.began = self._session.now()

        def stopped() -> bool:
            return self._stopping or job.unwanted or self._late(job) is not None

        if stopped():
            raise TrainingStopped
        self._sessions.sweep(self._session.now())
        memory = self._sessions.begin(job.order)
        inputs = {item.name: self._input(job, item, stopped) for item in manifest.inputs}
        client = self._execution.client(job.order, inputs, memory)
        computation = job.order.work.computation(client)
        needed = None if computation is None else (computation, self._base_model(job, offer, stopped))
        self._sessions.answer(job.order)
        kind, doing = manifest.kind, job.order.work.doing
        fields = {"assignment_id": name, "run_id": manifest.run_id, "round": manifest.round, "kind": kind}
        self._events.tell(doing, f"assignment {name} round {manifest.round}: {doing}", **fields)
        self._session.beat(name, 0.0)
        try:
            result = self._execution.run(
                job.order,
                client,
                offer.trainer,
                needed,
                progress=partial(setattr, job, "progress"),
                stopped=stopped,
            )
        except TrainingDiverged as error:
            raise Declined(name, "training-diverged", str(error)) from error
        except DataError as error:
            raise Declined(name, "no-data", str(error)) from error
        except (TrainingStopped, Declined):
            raise
        except WorkError as error:
            raise Declined(name, "failed", str(error)) from error
        except Exception as error:  # out of memory, a work that makes no sense, a mistake in the owner's own task
            if owners_frame(error):
                for line in described(error).splitlines():
                    LOGGER.error("assignment %s: %s", name, line)
            else:
                LOGGER.exception("assignment %s", name)
            raise Declined(name, "failed", f"{type(error).__name__}: {error}") from error
        self._events.tell(
            "done",
            f"assignment {name} round {manifest.round}: {doing} done in {result.seconds:.2f} s",
            seconds=result.seconds,
            **fields,
        )
        self._spool_reply(manifest, result, job)
        self._finished()

    def _base_model(self, job: _Job, offer: Offer, stopped: Callable[[], bool]) -> Vector:
        manifest = job.manifest
        path = self._fetch(job, manifest.base_model, manifest.base_model_bytes, stopped)
        try:
            layout, vector = read_vector(path)
        except Refusal as refusal:
            raise Declined(manifest.assignment_id, "layout", f"the base model: {refusal.message}") from refusal
        if layout != offer.allowed.layout:
            raise Declined(
                manifest.assignment_id, "layout", "the base model has other tensors than this task: compare versions"
            )
        return vector

    def _input(self, job: _Job, item: Input, stopped: Callable[[], bool]) -> memoryview:
        """The content of an input, mapped read-only."""
        path = self._fetch(job, item.digest, item.size, stopped)
        content: memoryview = np.memmap(path, dtype=np.uint8, mode="r").data if item.size else memoryview(b"")
        return content

    def _fetch(self, job: _Job, digest: str, size: int, stopped: Callable[[], bool]) -> Path:
        def chunks(offset: int) -> Iterator[bytes]:
            stub = self._session.stub()
            if stub is None:
                raise TrainingStopped
            wanted = FetchBlobRequest(digest=digest, offset=offset)
            timeout = ANSWER_SECONDS + (size - offset) / SLOWEST_BYTES_PER_SECOND
            for response in stub.FetchBlob(wanted, timeout=timeout):
                if stopped():
                    raise TrainingStopped
                yield response.chunk

        name = job.manifest.assignment_id
        while not stopped():
            try:
                path = self._caches[job.lane].get(digest, size, chunks)
            except ModelMismatch as error:
                raise Declined(name, "base-model", str(error)) from error
            except (grpc.RpcError, ValueError) as error:  # ValueError: the session closed the channel a moment ago
                why = refusal_from_rpc_error(error) if isinstance(error, grpc.RpcError) else None
                if why is not None and why.reason in ("blob-not-offered", "blob-removed", "offset"):
                    raise Declined(name, "base-model", f"{why.reason}: {why.message}") from error
                delay = max(self._backoff.delay(), why.retry_seconds if why is not None else 0.0)
                self._events.warn(
                    "download-broken",
                    f"assignment {name}: the download of the base model broke off, going on in {delay:.1f} s "
                    f"({why.message or why.status if why is not None else error})",
                    assignment_id=name,
                )
                self._wait(stopped, delay)
            else:
                self._backoff.reset()
                return path
        raise TrainingStopped

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout=seconds)

    def _spool_reply(self, asked: AssignmentManifest, result: Result, job: _Job) -> None:
        payload = None
        if job.order.rows:
            layout = payload_layout(job.order.rows)
            payload = self._spool.write_payload(asked.assignment_id, layout, result.rows)
        reply = UpdateManifest(
            federation_id=asked.federation_id,
            run_id=asked.run_id,
            round=asked.round,
            attempt=asked.attempt,
            phase=asked.phase,
            assignment_id=asked.assignment_id,
            client_id=self._member.client_id,
            base_model=asked.base_model,
            spec=asked.spec,
            rows=asked.rows,
            payload=payload.digest if payload else "",
            payload_bytes=payload.size if payload else 0,
            samples=result.samples,
            losses=dict(result.losses),
            metrics=dict(result.metrics),
            software=self._software,
            task=asked.task,
            seconds=result.seconds,
        )
        reply.created.FromDatetime(self._session.now())
        envelope = seal(reply, self._member.signing_key)
        with self._changed:
            if not job.unwanted:
                self._spool.add(envelope, payload, job.order.envelope)
            elif payload is not None:
                payload.discard()
