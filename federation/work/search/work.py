"""A line search: the client measures its training loss at several steps along one direction."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from federation.refusals import Refusal
from federation.spec.computation import MeasureAlong
from federation.vectors import Layout, payload_rows, update_layout
from federation.work.base import Demand, RowSchema, Shape, Terms, Work, WorkError, WorkingClient

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

DIRECTION = "direction"  # the input, and its one row
MAX_STEPS = 64


def direction_layout(size: int) -> Layout:
    """The layout of the input: one row of this many elements."""
    return update_layout([(DIRECTION, size)])


def step_metric(index: int) -> str:
    """The name under which a reply has the loss at the step of this place, from 0."""
    return f"step/{index}"


@dataclass(frozen=True, kw_only=True)
class Search(Work):
    """Measure the loss of w_t - s d on the whole training split for each step s; d is the input "direction".

    The reply holds one metric for each step, and no payload. A loss that is not finite is left out.

    Attributes:
        steps: positive, at most 64 of them.
    """

    name: ClassVar[str] = "search"
    doing: ClassVar[str] = "searching a step size"

    steps: tuple[float, ...]

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """The terms of training: the step depends on both in the same way."""
        return Terms(spec.train.deadline_seconds, spec.selection.quorum)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        if not 0 < len(self.steps) <= MAX_STEPS or not all(math.isfinite(step) and step > 0 for step in self.steps):
            raise WorkError(f"{len(self.steps)} steps: between 1 and {MAX_STEPS} positive numbers are taken")
        return ()

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        return {DIRECTION: direction_layout(shape.parameters).file_bytes}

    def demand(self, samples: int) -> Demand:
        """The whole training split, and no optimiser step."""
        return Demand(0, samples)

    def computation(self, client: WorkingClient) -> MeasureAlong:
        """The measurements; `answer` hands in their metrics.

        Raises:
            WorkError: the input is no direction of the model's size.
        """
        try:
            rows = payload_rows(client.inputs[DIRECTION], direction_layout(client.shape.parameters))
        except Refusal as refusal:
            raise WorkError(f"the direction: {refusal.message}", wire=f"the direction: {refusal.reason}") from None
        names = tuple(map(step_metric, range(len(self.steps))))
        return MeasureAlong(direction=rows[DIRECTION], steps=self.steps, names=names)
