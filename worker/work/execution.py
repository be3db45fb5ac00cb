"""Executes an assignment: prepares its work, admits it, computes, and puts the reply into the spool."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from federation.monitoring.events import Events
from federation.owners_code import TwoTexts
from federation.record.signed_scales import SignedScales
from federation.refusals import Refusal
from federation.spec.computation import Ability
from federation.statistics.scale import ScaleError
from federation.tensor_names import first_difference
from federation.training.contract import no_share_in_words, no_shares
from federation.training.held_data import HeldSplits
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest, Input, SignedEnvelope
from federation.vectors import Vector, read_vector
from federation.work.base import Result, Shows, WorkError, WorkingClient, payload_layout
from federation.work.registry import decode
from federation.work.replies import reply_manifest
from federation.work.secure.failing import SHOWN, FailureShown
from federation.work.secure.limits import check_sessions
from federation.work.secure.ready import Ready
from federation.work.site import EVALUATE, Site
from worker import software
from worker.connection.attendance import Attendance
from worker.site.assignment_checks import COMPARE, CheckedAssignment, Declined
from worker.site.privacy import SitePrivacy
from worker.work.begun import BegunWork
from worker.work.computing import Computing, PreparedWork, origin_of
from worker.work.fetching import Fetcher
from worker.work.local_state import LocalState
from worker.work.memory import WorkerMemory, question_digest
from worker.work.own_errors import declined, declining
from worker.work.spool import Spool
from worker.work.work_control import Control

RESET = "fedpareto worker failures --reset"


@dataclass(frozen=True, eq=False)
class Execution:
    """Does the work of one client, in any lane.

    `offers` are the trainers of the tasks that the owner allowed, by name.
    """

    attendance: Attendance
    offers: Mapping[str, Trainer]
    computing: Computing
    fetcher: Fetcher
    spool: Spool
    memory: WorkerMemory
    site: Site
    privacy: SitePrivacy
    local_state: LocalState
    begun: BegunWork
    events: Events
    scales: SignedScales
    _told: set[tuple[str, str]] = field(default_factory=set, init=False)  # tasks and metrics

    def do(self, order: CheckedAssignment, control: Control) -> None:
        """Does the work of an assignment, and puts the reply into the spool.

        Raises:
            Declined: the work cannot be done.
            TrainingStopped: it was stopped.
            OSError: the disk cannot store the inputs, the reply or the kept values.
        """
        job = self._prepare(order, control)
        # Section 2d: around the computation and the reply: a process that dies in either has failed in this session.
        with self.begun.noted(order) as died:
            job = self._admit(job)
            self._reply(job, self._compute(job, control, died=died), control.wanted)

    def _prepare(self, order: CheckedAssignment, control: Control) -> PreparedWork:
        """Fetches what the work is made from. Nothing of the data is read, and nothing is counted."""
        # Section 3, rule 2: before this attempt's memory is opened: a session whose day has passed must be found over.
        self.memory.sweep(self.attendance.now())
        # Section 2d: before the data are used: work in which the process dies must not be begun a third time.
        self.begun.check_tries(order)
        job = PreparedWork(order, self.offers[order.manifest.task], self._client(order, control))
        with declining(order):
            # Section 3: what a member refuses at READY is refused here, before the model is fetched and the question is
            # noted.
            if (computation := order.work.computation(job.client)) is not None:
                own = self.local_state.own(order, job.trainer, computation, control.pause)
                job.trainer.check_can_do(computation if own is None else own.widened(computation))
                job = replace(job, computation=computation, own=own)
            client = replace(job.client, residual=self.local_state.residual(order, control.pause))
        base = None if computation is None else self._base_model(order, control)
        # Section 3, rule 2: noted before the data are used: after a crash, another question of this name is declined.
        self.memory.answer(order)
        return replace(job, client=client, base=base)

    def _admit(self, job: PreparedWork) -> PreparedWork:
        """The work as the owner's rules on noise and on evaluations allow it. What it spends is counted, durably."""
        if job.computation is not None:
            try:
                computation, privacy = self.privacy.admit(
                    job.manifest, job.computation, job.trainer, self.attendance.now()
                )
            except WorkError as error:
                raise declined(job.order, error) from error
            job = replace(job, computation=computation, privacy=privacy)
        with declining(job.order):
            # Section 3, rule 4: where the owner requires private rounds, an evaluation in the clear counts before
            # anything is measured.
            if job.work.shows is Shows.METRICS and self.site.policy(job.manifest.task).required:
                name = f"{job.manifest.task}/{question_digest(job.manifest)}"  # the same question may be answered again
                check_sessions(job.client, name, work=EVALUATE, count=True)
        return job

    def _compute(self, job: PreparedWork, control: Control, *, died: bool) -> Result:
        """The result of the work; in a private round, work in which the process `died` is not tried again."""
        manifest, work = job.manifest, job.work
        self.events.tell_of(manifest, work.doing, work.doing, kind=manifest.kind)
        self.attendance.beat(manifest.assignment_id, 0.0)
        with declining(job.order):
            computed = self.computing.result(job, control, died=died)
            result = replace(self._answered(job, computed), privacy=job.privacy)
        self._tell_left_out(manifest, computed)
        text, seconds = f"{work.doing} done in {computed.seconds:.2f} s", computed.seconds
        self.events.tell_of(manifest, "done", text, kind=manifest.kind, seconds=seconds)
        # Section 3, rule 2: the member was ready, so its secrets have a day, whatever the coordinator does.
        if work.ends_after is not None:
            self.memory.end_after(manifest, work.kept_under(), work.ends_after)
        return result

    def _reply(self, job: PreparedWork, result: Result, wanted: Callable[[], bool]) -> None:
        """Puts the reply into the spool, with the state to keep once it is accepted."""
        order, repeatable = job.order, Ability.REPEATABLE in job.trainer.abilities
        reply = reply_manifest(job.manifest, result, software=software(), repeatable=repeatable)
        reply.created.FromDatetime(self.attendance.now())
        layout = payload_layout(order.rows) if order.rows else None
        state = self.local_state.file(order, result)
        self.spool.add(reply, layout, result.rows, order.envelope, wanted, state=state)

    def count_deaths(self) -> None:
        """Counts the private sessions in which the last process died as failed, and tells the owner.

        A session that cannot be counted now is counted at a later start.
        """
        for name, failed in self.begun.died():
            with suppress(OSError):
                # Section 2d: counted also if the session is never asked for again; the note is taken back after it is
                # counted.
                self.site.ledger.fail(failed)
                self.begun.counted(name)
                manifest = AssignmentManifest(
                    assignment_id=name, run_id=failed.run_id, round=failed.round, task=failed.task
                )
                self._alert(manifest, Ready.doing, failed.error)

    def forget(self, assignment: SignedEnvelope, *, acknowledged: bool = False) -> None:
        """Erases the values that are kept for a verified assignment and for the later phases of its work.

        If its reply was acknowledged, only kinds of work that forget do so. The values of a task or a kind that this
        worker no longer has are erased a day later.
        """
        manifest = AssignmentManifest.FromString(assignment.manifest)
        trainer = self.offers.get(manifest.task)
        with suppress(WorkError):
            work = None if trainer is None else decode(manifest.kind, manifest.work, trainer.shape)
            if work is not None and (work.forgets or not acknowledged):
                self.memory.forget(manifest, work.kept_under())

    def _client(self, order: CheckedAssignment, control: Control) -> WorkingClient:
        """The client that does the work, with the inputs of the assignment; its residual is not known yet."""
        manifest = order.manifest
        return WorkingClient(
            client_id=self.attendance.member.client_id,
            round=manifest.round,
            attempt=manifest.attempt,
            shape=order.shape,
            memory=self.memory.begin(order),
            origin=origin_of(manifest),
            site=self.site,
            inputs={item.name: self._input(order, item, control) for item in manifest.inputs},
            # Section 3, rule 2: read before `answer` notes the question: afterwards, each one looks like a repetition.
            again=self.memory.answered(order),
            measures=order.measures,
            approved=order.approved,
            data=HeldSplits.of(self.offers[manifest.task]),
        )

    def _input(self, order: CheckedAssignment, item: Input, control: Control) -> memoryview:
        """The content of an input: as it came with the assignment, or fetched and mapped read-only."""
        if item.name in order.sent:
            return memoryview(order.sent[item.name])
        path = self.fetcher.fetch(order, item.digest, item.size, control)
        content: memoryview = np.memmap(path, dtype=np.uint8, mode="r").data if item.size else memoryview(b"")
        return content

    def _base_model(self, order: CheckedAssignment, control: Control) -> Vector:
        manifest = order.manifest
        path = self.fetcher.fetch(order, manifest.base_model, manifest.base_model_bytes, control)
        try:
            layout, vector = read_vector(path)
        except Refusal as refusal:
            texts = TwoTexts.of(f"the base model: {refusal.message}", f"the base model: {refusal.reason}")
            raise Declined("layout", texts) from refusal
        if layout != order.shape.layout:
            difference = first_difference(layout.shapes, order.shape.layout.shapes)
            raise Declined("layout", f"{difference}: {COMPARE}")
        self._check_scale(order, vector, control)
        return vector

    def _check_scale(self, order: CheckedAssignment, model: Vector, control: Control) -> None:
        """Declines a model (d,) that is not filled from the result that its run names."""
        manifest, layout, sharing = order.manifest, order.shape.layout, order.sharing
        if not (result := manifest.unshared.statistics):
            return
        fixed = {} if sharing is None else {n: t for n, t in layout.split(model).items() if n in sharing.fixed_names}
        fetch = partial(self.fetcher.document, control=control)
        try:
            self.scales.check(result, fixed, self.offers[manifest.task].scale_layer, fetch)
        except ScaleError as error:
            message = f"the model is not filled from the statistics that the run names: {error}"
            raise Declined("scale", message[:500]) from None

    def _answered(self, job: PreparedWork, computed: Result) -> Result:
        """The result of the work. The owner is told of a failed computation, the coordinator is not."""
        try:
            result = job.work.answer(job.client, computed)
        except FailureShown as shown:
            self._alert(job.manifest, job.work.doing, shown.failure)
            raise
        # Section 2d: the owner alone is told; the reply is like any other.
        if result.failure:
            self._alert(job.manifest, job.work.doing, result.failure)
        return result

    def _alert(self, manifest: AssignmentManifest, doing: str, failure: str) -> None:
        task = manifest.task
        row, most = len(self.site.ledger.failures(self.site.tasks_beside(task))), self.site.failures
        then = (
            f"this data set takes part in no private round until you have looked: `{RESET} {task}`"
            if row >= most
            else f"after {most} in a row this data set takes part in no private round until you have looked"
        )
        self.events.tell_of(
            manifest,
            "alert",
            f"{doing} of task {task} for run {manifest.run_id} failed, which the coordinator is not told: "
            f"{failure}. It is failure {row} in a row; {then}",
            warns=True,
            reason=SHOWN,
            task=task,
            failures=row,
        )

    def _tell_left_out(self, manifest: AssignmentManifest, computed: Result) -> None:
        """Warns the owner, once for each task and name, of measurements that nobody counts."""
        for name, value in no_shares(computed.metrics).items():
            if (manifest.task, name) not in self._told:
                self._told.add((manifest.task, name))
                self.events.tell_of(manifest, "metric", no_share_in_words(name, value), warns=True, metric=name)
