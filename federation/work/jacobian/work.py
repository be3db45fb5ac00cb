"""A sketch of the gradients of the client's objectives, on one minibatch (FedCMOO, step 2)."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches import sketch
from federation.sketches.base import Sketch, SketchError
from federation.sketches.draws import own_seed, shared_seed
from federation.spec.computation import Differentiate
from federation.spec.objective_names import encoder_columns, width
from federation.vectors import Layout
from federation.work.base import Demand, Result, RowSchema, Shape, Terms, Work, WorkError, WorkingClient
from federation.work.minibatch_sizes import Cut

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec


SKETCH, BUDGET, ENCODER = "count", 0.1, "encoder"
"""The sketch, its budget and its scope, unless a specification names others."""


@dataclass(frozen=True, kw_only=True)
class Jacobian(Work):
    """Send a sketch of the gradients at the base model.

    Attributes:
        sketch: its name; see federation.sketches.
        budget: the floats that it may take, as a share of the columns that count.
        batch_size: samples in the minibatch; 0 is the whole training split.
        objectives: of the gradients, those that the client serves, in the task's order.
        encoder_only: only the columns of the encoder count.
        measure: measure the base model on the whole training split, too.
    """

    name: ClassVar[str] = "jacobian"
    doing: ClassVar[str] = "making gradients"

    sketch: str
    budget: float
    batch_size: int
    objectives: tuple[str, ...]
    encoder_only: bool = False
    measure: bool = False

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        return Terms(spec.jacobian.deadline_seconds, spec.jacobian.quorum)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        objectives = self.objectives
        if not objectives or objectives != tuple(name for name in shape.serves if name in objectives):
            raise WorkError(f"gradients of {list(objectives)} are asked for; this client serves {list(shape.serves)}")
        try:
            rows = self.made(shape).rows(objectives)
        except (SketchError, OverflowError) as error:
            raise WorkError(str(error)) from None
        return tuple(RowSchema(name, length) for name, length in rows)

    def demand(self, samples: int) -> Demand:
        """One minibatch, which the trainer may have evened out, and no step."""
        return Demand(1, Cut.of(samples, self.batch_size, even=True).samples_in(1) if samples else 0)

    def computation(self, client: WorkingClient) -> Differentiate:
        """The gradients of all of the client's objectives."""
        return Differentiate(batch_size=self.batch_size, measure=self.measure)

    def gradients(self, client: WorkingClient, computed: Result) -> NDArray[np.float32]:
        """The columns that count of the requested gradients, (M_i, d_e)."""
        parts = self._columns(client.shape.trained)
        rows = (computed.rows[name] for name in self.objectives)
        return np.stack([np.concatenate([row[part] for part in parts]) for row in rows])

    def made(self, shape: Shape) -> Sketch:
        """The requested sketch. Raises SketchError if it does not exist, or not with this budget."""
        d = width(self._columns(shape.trained))
        return sketch(self.sketch, d=d, objectives=shape.objectives, budget=self.budget)

    def _columns(self, layout: Layout) -> tuple[slice, ...]:
        return encoder_columns(layout) if self.encoder_only else (slice(0, layout.size),)

    def compressed(self, client: WorkingClient, gradients: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """The message of the sketch, by row."""
        return self.made(client.shape).compress(
            gradients,
            shared_seed=shared_seed(client.origin.seed, client.round),
            own_seed=own_seed(client.origin.seed, client.round, client.client_id),
        )

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        try:
            rows = self.compressed(client, self.gradients(client, computed))
        except SketchError as error:
            raise WorkError(f"SketchError: {error}") from error
        return replace(computed, rows=rows)
