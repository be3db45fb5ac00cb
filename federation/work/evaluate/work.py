"""Evaluation of the base model on the client's own splits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from federation.spec.computation import Measure, check_splits
from federation.spec.task_metrics import MetricKind, check_metrics
from federation.work.base import RowSchema, Shape, Shows, Terms, Work, WorkError, WorkingClient
from federation.work.site import EVALUATE

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class Evaluate(Work):
    """Evaluate the base model on some of the splits. The reply has metrics, and no payload.

    `metrics` are those of the task that are measured besides loss and accuracy; one that the client's task does not
    have is left out.
    """

    name: ClassVar[str] = EVALUATE
    doing: ClassVar[str] = "evaluating"
    decides: ClassVar[bool] = False
    needs_samples: ClassVar[bool] = False
    shows: ClassVar[Shows] = Shows.METRICS

    splits: tuple[str, ...]
    metrics: tuple[MetricKind, ...] = ()

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        return Terms(spec.evaluate.deadline_seconds, None if spec.trains else spec.selection.quorum)

    @property
    def from_round_model(self) -> bool:
        return False

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        try:
            check_splits(self.splits)
            check_metrics(self.metrics)
        except ValueError as error:
            raise WorkError(str(error)) from None
        return ()

    def computation(self, client: WorkingClient) -> Measure:
        """The measurement; `answer` hands in its metrics."""
        return Measure(splits=self.splits, metrics=tuple(kind.name for kind in self.metrics))
