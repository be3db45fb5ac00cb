"""The second leg of a sketch: inner products of its residual with the sum of all clients' sketches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from federation.refusals import Refusal
from federation.sketches.base import SketchError
from federation.sketches.svd import TwoWaySvd
from federation.spec.computation import Differentiate
from federation.vectors import payload_rows
from federation.work.base import Demand, Result, RowSchema, Shape, Terms, Work, WorkError, WorkingClient, payload_layout
from federation.work.jacobian.work import Jacobian

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

REFERENCE = "reference"  # the input: the sum of all sketches, itself sketched


@dataclass(frozen=True, kw_only=True)
class Residual(Work):
    """Send what the sketch of the round's Jacobian lost.

    `jacobian` is the work that the sketch was made for; `objectives` are those of the reference, in the task's order.
    """

    name: ClassVar[str] = "residual"
    doing: ClassVar[str] = "comparing gradients"

    jacobian: Jacobian
    objectives: tuple[str, ...]

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        return Jacobian.terms(spec)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        self.jacobian.rows(shape)
        rows = self._leg(shape).residual_layout(len(self.jacobian.objectives), len(self.objectives))
        return tuple(RowSchema(name, length) for name, length in rows)

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        return {REFERENCE: payload_layout(self._reference(shape)).file_bytes}

    def demand(self, samples: int) -> Demand:
        return self.jacobian.demand(samples)

    def computation(self, client: WorkingClient) -> Differentiate:
        """The gradients once more; clients usually still have them."""
        return Differentiate(batch_size=self.jacobian.batch_size, measure=False, again=True)

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        """The inner products of what the sketch lost with the reference."""
        try:
            reference = payload_rows(client.inputs[REFERENCE], payload_layout(self._reference(client.shape)))
            gradients = self.jacobian.gradients(client, computed)
            sent = self.jacobian.compressed(client, gradients)
            rows = self._leg(client.shape).residual(gradients, sent, reference, self.objectives)
        except Refusal as refusal:
            raise WorkError(f"the reference: {refusal.message}", wire=f"the reference: {refusal.reason}") from None
        except SketchError as error:
            raise WorkError(f"SketchError: {error}") from error
        return replace(computed, rows=rows)

    def _reference(self, shape: Shape) -> tuple[RowSchema, ...]:
        """The rows of the reference."""
        if not self.objectives or self.objectives != tuple(n for n in shape.objectives if n in self.objectives):
            raise WorkError(
                f"the reference is of {list(self.objectives)}; the objectives of the task are {list(shape.objectives)}"
            )
        rows = self._leg(shape).reference_layout(len(self.objectives))
        return tuple(RowSchema(name, length) for name, length in rows)

    def _leg(self, shape: Shape) -> TwoWaySvd:
        try:
            sketch = self.jacobian.made(shape)
        except (SketchError, OverflowError) as error:
            raise WorkError(str(error)) from None
        if not isinstance(sketch, TwoWaySvd):
            raise WorkError(f"{sketch.name} has no second leg; {TwoWaySvd.name} has")
        return sketch
