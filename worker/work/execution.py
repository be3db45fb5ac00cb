"""Executes an assignment: fetches its inputs, does the work, and puts the reply into the spool."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace

import numpy as np

from federation.owners_code import TwoTexts, described, owners_frame, passes
from federation.refusals import Refusal
from federation.spec.computation import Ability, Computation, Descend, Measure, MeasureAlong
from federation.spec.sharing import Unshared
from federation.tensor_names import first_difference
from federation.training import TrainingStopped
from federation.training.contract import no_share_in_words, no_shares
from federation.training.own import Own, compute
from federation.training.reasons import reason_of, texts_of
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest, Input, SignedEnvelope
from federation.vectors import Vector, read_vector
from federation.work.base import Origin, Result, Shows, WorkError, WorkingClient, payload_layout
from federation.work.registry import decode
from federation.work.replies import reply_manifest
from federation.work.secure.failing import SHOWN, FailureShown
from federation.work.secure.limits import check_sessions
from federation.work.secure.ready import Ready
from federation.work.site import EVALUATE, Site
from worker import software
from worker.connection.attendance import Attendance
from worker.events import Events
from worker.home import DiskFull, FileLocked
from worker.site.assignments import COMPARE, CheckedAssignment, Declined
from worker.site.privacy import SitePrivacy
from worker.work.attacker import Attacker
from worker.work.begun import DIED, BegunWork
from worker.work.fetching import Fetcher
from worker.work.local_state import LocalState
from worker.work.memory import WorkerMemory, question_digest
from worker.work.spool import Spool
from worker.work.work_control import Control

LOGGER = logging.getLogger("fedpareto.worker")
RESET = "fedpareto worker failures --reset"
SILENT = "this worker's log has the error"


@dataclass(frozen=True, eq=False)
class Execution:
    """Does the work of one client, in any lane.

    `offers` are the trainers of the tasks that the owner allowed, by name; an honest member has no attacker.
    """

    attendance: Attendance
    offers: Mapping[str, Trainer]
    attacker: Attacker | None
    fetcher: Fetcher
    spool: Spool
    memory: WorkerMemory
    site: Site
    privacy: SitePrivacy
    local_state: LocalState
    begun: BegunWork
    events: Events
    _metrics: dict[tuple[str, tuple[str, ...], tuple[str, ...]], frozenset[str]] = field(
        default_factory=dict, init=False
    )  # by task, splits and asked metrics: what an evaluation measures
    _told: set[tuple[str, str]] = field(default_factory=set, init=False)  # tasks and metrics

    def do(self, order: CheckedAssignment, control: Control) -> None:
        """Does the work of an assignment, and puts the reply into the spool.

        Raises:
            Declined: the work cannot be done.
            TrainingStopped: it was stopped.
            OSError: the disk cannot store the inputs, the reply or the kept values.
        """
        manifest, work, trainer = order.manifest, order.work, self.offers[order.manifest.task]
        # Section 3, rule 2: before this attempt's memory is opened: a session whose day has passed must be found over.
        self.memory.sweep(self.attendance.now())
        # Section 2d: before the data are used: work in which the process dies must not be begun a third time.
        self.begun.check_tries(order)
        client = WorkingClient(
            client_id=self.attendance.member.client_id,
            round=manifest.round,
            attempt=manifest.attempt,
            shape=order.shape,
            memory=self.memory.begin(order),
            origin=_origin(manifest),
            site=self.site,
            inputs={item.name: self._input(order, item, control) for item in manifest.inputs},
            # Section 3, rule 2: read before `answer` notes the question: afterwards, each one looks like a repetition.
            again=self.memory.answered(order),
        )
        with _declining(order):
            # Section 3: what a member refuses at READY is refused here, before the model is fetched and the question is
            # noted.
            computation = work.computation(client)
            own = None
            if computation is not None:
                own = self.local_state.own(order, trainer, computation, control.pause)
                trainer.check_can_do(computation if own is None else own.widened(computation))
            client = replace(client, residual=self.local_state.residual(order, control.pause))
        base = None if computation is None else self._base_model(order, control)
        # Section 3, rule 2: noted before the data are used: after a crash, another question of this name is declined.
        self.memory.answer(order)
        # Section 2d: around the computation and the reply: a process that dies in either has failed in this session.
        with self.begun.noted(order) as died:
            self._reply(order, self._result(order, client, computation, base, own, control, died=died), control.wanted)

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

    def _result(
        self,
        order: CheckedAssignment,
        client: WorkingClient,
        computation: Computation | None,
        base: Vector | None,
        own: Own | None,
        control: Control,
        *,
        died: bool,
    ) -> Result:
        """The result of the work; in a private round, work in which the process `died` is not tried again."""
        manifest, work, trainer = order.manifest, order.work, self.offers[order.manifest.task]
        privacy = None
        if computation is not None:
            try:
                computation, privacy = self.privacy.admit(manifest, computation, trainer, self.attendance.now())
            except WorkError as error:
                raise _declined(order, error) from error
        with _declining(order):
            # Section 3, rule 4: an evaluation in the clear counts before anything is measured.
            self._admit(order, client)
        self.events.tell_of(manifest, work.doing, work.doing, kind=manifest.kind)
        self.attendance.beat(manifest.assignment_id, 0.0)
        with _declining(order):
            computed = Result({}, {}, {}, trainer.samples)
            if computation is not None and base is not None:
                if work.conceals:
                    computed = self._concealed(order, trainer, computation, base, own, control, died=died)
                else:
                    computed = self._compute(order, trainer, computation, base, own, control)
            result = replace(self._answered(order, client, computed), privacy=privacy)
        self._tell_left_out(order, computed)
        text, seconds = f"{work.doing} done in {computed.seconds:.2f} s", computed.seconds
        self.events.tell_of(manifest, "done", text, kind=manifest.kind, seconds=seconds)
        # Section 3, rule 2: the member was ready, so its secrets have a day, whatever the coordinator does.
        if work.ends_after is not None:
            self.memory.end_after(manifest, work.kept_under(), work.ends_after)
        return result

    def _tell_left_out(self, order: CheckedAssignment, computed: Result) -> None:
        """Warns the owner, once for each task and name, of measurements that nobody counts."""
        for name, value in no_shares(computed.metrics).items():
            if (order.manifest.task, name) not in self._told:
                self._told.add((order.manifest.task, name))
                self.events.tell_of(order.manifest, "metric", no_share_in_words(name, value), warns=True, metric=name)

    def forget(self, assignment: SignedEnvelope, *, acknowledged: bool = False) -> None:
        """Erases the values that are kept for a verified assignment and for the later stages of its work.

        If its reply was acknowledged, only kinds of work that forget do so. The values of a task or a kind that this
        worker no longer has are erased a day later.
        """
        manifest = AssignmentManifest.FromString(assignment.manifest)
        trainer = self.offers.get(manifest.task)
        with suppress(WorkError):
            work = None if trainer is None else decode(manifest.kind, manifest.work, trainer.shape)
            if work is not None and (work.forgets or not acknowledged):
                self.memory.forget(manifest, work.kept_under())

    def _admit(self, order: CheckedAssignment, client: WorkingClient) -> None:
        """Counts an evaluation in the clear where the owner requires private rounds, or raises WorkError."""
        task = order.manifest.task
        if order.work.shows is Shows.METRICS and self.site.policy(task).required:
            name = f"{task}/{question_digest(order.manifest)}"  # the same question may be answered again
            check_sessions(client, name, work=EVALUATE, count=True)

    def _answered(self, order: CheckedAssignment, client: WorkingClient, computed: Result) -> Result:
        """The result of the work. The owner is told of a failed computation, the coordinator is not."""
        try:
            result = order.work.answer(client, computed)
        except FailureShown as shown:
            self._alert(order.manifest, order.work.doing, shown.failure)
            raise
        # Section 2d: the owner alone is told; the reply is like any other.
        if result.failure:
            self._alert(order.manifest, order.work.doing, result.failure)
        return result

    def _alert(self, manifest: AssignmentManifest, doing: str, failure: str) -> None:
        task = manifest.task
        row, most = len(self.site.ledger.failures(self.site.tasks_beside(task))), self.site.policy(task).failures
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

    def _concealed(
        self,
        order: CheckedAssignment,
        trainer: Trainer,
        computation: Computation,
        base: Vector,
        own: Own | None,
        control: Control,
        *,
        died: bool,
    ) -> Result:
        """As `_compute`, for work that conceals: a failure that can follow from the model is a result, too.

        So is the death of the process, and work in which it `died` is not tried again.

        Of an evaluation, the names of the metrics follow from task and data. Those without a value are NaN.
        """
        samples, names = trainer.samples, frozenset[str]()
        if isinstance(computation, Measure):
            # Section 2d: before the coordinator's model is used: which metrics there are must depend on task and data
            # alone.
            names = self._measurable(order, trainer, computation, control)
        began = time.perf_counter()
        try:
            # Section 2d: the second death was the last try: it is answered like any other failure.
            if died:
                raise WorkError(DIED)
            result = self._compute(order, trainer, computation, base, own, control)
        except BaseException as error:
            if passes(error) or (isinstance(error, TrainingStopped) and control.stopped()):
                raise
            # Section 2d: the text stays in this machine's log.
            if not reason_of(error):
                _log(order, error)
            result = Result({}, {}, {}, samples, time.perf_counter() - began, failure=described(error))
        if isinstance(computation, Measure):
            # Section 2d: all of `names`, and none beside: a metric that comes or goes with the model would tell of the
            # data.
            result = replace(result, metrics={name: result.metrics.get(name, math.nan) for name in names})
        return result

    def _measurable(
        self, order: CheckedAssignment, trainer: Trainer, computation: Measure, control: Control
    ) -> frozenset[str]:
        """The metrics of an evaluation, found once in the life of this process, without the coordinator's model."""
        key = (order.manifest.task, computation.splits, computation.metrics)
        if key not in self._metrics:
            try:
                self._metrics[key] = trainer.measurable(computation.splits, computation.metrics, control.stopped)
            except TrainingStopped:
                raise
            except BaseException as error:
                if passes(error):
                    raise
                _log(order, error)
                # Section 2d: the run's model was not used yet, so this decline tells nothing of it.
                raise Declined(reason_of(error) or "failed", SILENT) from error
        return self._metrics[key]

    def _compute(
        self,
        order: CheckedAssignment,
        trainer: Trainer,
        computation: Computation,
        base: Vector,
        own: Own | None,
        control: Control,
    ) -> Result:
        """Computes the result from the run's model (d,) and the data. An attacker distorts it."""
        attacker, manifest = self.attacker, order.manifest
        if attacker is not None:
            attacker.see(manifest, base)
            if isinstance(computation, Descend):
                targets = attacker.attack.on_targets(computation.targets)
                computation = replace(computation, targets=targets, idle=not attacker.attack.trains)
        honest = compute(
            trainer,
            base,
            computation,
            own,
            seed=manifest.seed,
            round=manifest.round,
            client_id=self.attendance.member.client_id,
            progress=control.progress,
            stopped=control.stopped,
        )
        if attacker is None or isinstance(computation, Measure | MeasureAlong):
            return honest
        return attacker.distort(manifest, honest, now=self.attendance.now(), pause=control.pause)

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
        return vector

    def _input(self, order: CheckedAssignment, item: Input, control: Control) -> memoryview:
        """The content of an input: as it came with the assignment, or fetched and mapped read-only."""
        if item.name in order.sent:
            return memoryview(order.sent[item.name])
        path = self.fetcher.fetch(order, item.digest, item.size, control)
        content: memoryview = np.memmap(path, dtype=np.uint8, mode="r").data if item.size else memoryview(b"")
        return content

    def _reply(self, order: CheckedAssignment, result: Result, wanted: Callable[[], bool]) -> None:
        repeatable = Ability.REPEATABLE in self.offers[order.manifest.task].abilities
        reply = reply_manifest(order.manifest, result, software=software(), repeatable=repeatable)
        reply.created.FromDatetime(self.attendance.now())
        layout = payload_layout(order.rows) if order.rows else None
        state = self.local_state.file(order, result)
        self.spool.add(reply, layout, result.rows, order.envelope, wanted, state=state)


def _origin(manifest: AssignmentManifest) -> Origin:
    values = {item.name: getattr(manifest, item.name) for item in fields(Origin)}
    return Origin(**{**values, "unshared": Unshared.of(manifest.unshared)})


@contextmanager
def _declining(order: CheckedAssignment) -> Iterator[None]:
    """Declines an assignment whose work raises an exception, and logs one that is not expected.

    An OSError is of the owner's own code, and not expected, unless it is a DiskFull or a FileLocked.
    """
    try:
        yield
    except (TrainingStopped, Declined, DiskFull, FileLocked):
        raise
    except BaseException as error:
        if passes(error):
            raise
        raise _declined(order, error) from error


def _declined(order: CheckedAssignment, error: BaseException) -> Declined:
    """The decline of work that raised an exception. Of work that conceals, only a text of the checks leaves."""
    reason, texts = reason_of(error), texts_of(error)
    # Section 2d: a text of the owner's code, or of an exception, can depend on the data. Only texts of the checks
    # leave.
    if order.work.conceals and (texts.differ or not isinstance(error, WorkError)):
        _log(order, error)
        texts = TwoTexts.same(SILENT)
    elif not reason:  # work that is inconsistent, or a mistake in the owner's own task
        _log(order, error)
    return Declined(reason or "failed", texts)


def _log(order: CheckedAssignment, error: BaseException) -> None:
    """Logs an exception: with its traceback, unless it is one of the owner's own code."""
    about = f"assignment {order.manifest.assignment_id}"
    if owners_frame(error):
        log_owners(about, error)
    else:
        LOGGER.error("%s", about, exc_info=error)


def log_owners(about: str, error: BaseException) -> None:
    """Logs an exception of the owner's own code, with its line."""
    for line in described(error).splitlines():
        LOGGER.error("%s: %s", about, line)
