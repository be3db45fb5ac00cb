"""The work of one assignment, prepared; and its result, computed in the open or in a private round."""

import math
import time
from dataclasses import dataclass, field, fields, replace

from federation.owners_code import described, passes
from federation.spec.accounting import SamplePrivacy
from federation.spec.computation import Computation, Descend, Measure, MeasureAlong
from federation.spec.sharing import Unshared
from federation.training import TrainingStopped
from federation.training.own import Own, compute
from federation.training.reasons import reason_of
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import Vector
from federation.work.base import Origin, Result, Work, WorkError, WorkingClient
from worker.connection.attendance import Attendance
from worker.site.assignment_checks import CheckedAssignment, Declined
from worker.work.attacker import Attacker
from worker.work.begun import DIED
from worker.work.own_errors import SILENT, log_error
from worker.work.work_control import Control


@dataclass(frozen=True, eq=False)
class PreparedWork:
    """One assignment with all that its work is made from.

    Attributes:
        trainer: of the task.
        client: the client that does the work.
        computation: what the trainer computes; None for work that computes nothing from the data.
        own: this member's part of the model; None where the run shares all parameters.
        base: the run's model (d,); None without a computation.
        privacy: the statement about the noise of the computation; None before it is admitted, and without noise.
    """

    order: CheckedAssignment
    trainer: Trainer
    client: WorkingClient
    computation: Computation | None = None
    own: Own | None = None
    base: Vector | None = None
    privacy: SamplePrivacy | None = None

    @property
    def manifest(self) -> AssignmentManifest:
        """The assignment, as the coordinator signed it."""
        return self.order.manifest

    @property
    def work(self) -> Work:
        """The kind of work, with its arguments."""
        return self.order.work


def origin_of(manifest: AssignmentManifest) -> Origin:
    """The run and the model of an assignment."""
    values = {item.name: getattr(manifest, item.name) for item in fields(Origin)}
    return Origin(**{**values, "unshared": Unshared.of(manifest.unshared)})


@dataclass(frozen=True, eq=False)
class Computing:
    """Computes, in any lane; an honest member has no attacker."""

    attendance: Attendance
    attacker: Attacker | None
    _metrics: dict[tuple[str, tuple[str, ...], tuple[str, ...]], frozenset[str]] = field(
        default_factory=dict, init=False
    )  # by task, splits and asked metrics: what an evaluation measures

    def result(self, job: PreparedWork, control: Control, *, died: bool) -> Result:
        """The result of the computation of some work; an empty one for work that computes nothing.

        Raises:
            TrainingStopped: it was stopped.
            Exception: of a check or of the owner's code.
        """
        if job.computation is None or job.base is None:
            return Result({}, {}, {}, job.trainer.samples)
        if job.work.conceals:
            return self._concealed(job, job.computation, job.base, control, died=died)
        return self._open(job, job.computation, job.base, control)

    def _concealed(
        self, job: PreparedWork, computation: Computation, base: Vector, control: Control, *, died: bool
    ) -> Result:
        """As `_open`, for work that conceals: a failure that can follow from the model is a result, too.

        So is the death of the process, and work in which it `died` is not tried again.

        Of an evaluation, the names of the metrics follow from task and data. Those without a value are NaN.
        """
        samples, names = job.trainer.samples, frozenset[str]()
        if isinstance(computation, Measure):
            # Section 2d: before the coordinator's model is used: which metrics there are must depend on task and data
            # alone.
            names = self._measurable(job, computation, control)
        began = time.perf_counter()
        try:
            # Section 2d: the second death was the last try: it is answered like any other failure.
            if died:
                raise WorkError(DIED)
            result = self._open(job, computation, base, control)
        except BaseException as error:
            if passes(error) or (isinstance(error, TrainingStopped) and control.stopped()):
                raise
            # Section 2d: the text stays in this machine's log.
            if not reason_of(error):
                log_error(job.order, error)
            result = Result({}, {}, {}, samples, time.perf_counter() - began, failure=described(error))
        if isinstance(computation, Measure):
            # Section 2d: all of `names`, and none beside: a metric that comes or goes with the model would tell of the
            # data.
            result = replace(result, metrics={name: result.metrics.get(name, math.nan) for name in names})
        return result

    def _measurable(self, job: PreparedWork, computation: Measure, control: Control) -> frozenset[str]:
        """The metrics of an evaluation, found once in the life of this process, without the coordinator's model."""
        key = (job.manifest.task, computation.splits, computation.metrics)
        if key not in self._metrics:
            try:
                self._metrics[key] = job.trainer.measurable(computation.splits, computation.metrics, control.stopped)
            except TrainingStopped:
                raise
            except BaseException as error:
                if passes(error):
                    raise
                log_error(job.order, error)
                # Section 2d: the run's model was not used yet, so this decline tells nothing of it.
                raise Declined(reason_of(error) or "failed", SILENT) from error
        return self._metrics[key]

    def _open(self, job: PreparedWork, computation: Computation, base: Vector, control: Control) -> Result:
        """Computes the result from the run's model (d,) and the data. An attacker distorts it."""
        attacker, manifest = self.attacker, job.manifest
        if attacker is not None:
            attacker.see(manifest, base)
            if isinstance(computation, Descend):
                targets = attacker.attack.on_targets(computation.targets)
                computation = replace(computation, targets=targets, idle=not attacker.attack.trains)
        honest = compute(
            job.trainer,
            base,
            computation,
            job.own,
            seed=manifest.seed,
            round=manifest.round,
            client_id=job.client.client_id,
            progress=control.progress,
            stopped=control.stopped,
        )
        if attacker is None or isinstance(computation, Measure | MeasureAlong):
            return honest
        return attacker.distort(manifest, honest, now=self.attendance.now(), pause=control.pause)
