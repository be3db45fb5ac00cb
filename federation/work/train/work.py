"""Local SGD from the base model, once for each row of the update."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from federation.refusals import Refusal
from federation.spec.computation import Descend, PrivateSgd
from federation.spec.objective_names import Targets
from federation.spec.sharing import BUFFERS
from federation.spec.train_section import LocalSgd
from federation.vectors import narrow
from federation.work.base import (
    RESIDUAL,
    Demand,
    Result,
    RowSchema,
    Shape,
    Terms,
    Work,
    WorkError,
    WorkingClient,
    payload_layout,
)
from federation.work.minibatch_sizes import Cut

if TYPE_CHECKING:
    from federation.spec.run_sections import LimitsSpec
    from federation.spec.run_spec import RunSpec

_DTYPES = {"float32": "F32", "bf16": "BF16"}  # the element types of updates, by their names in a specification


@dataclass(frozen=True, kw_only=True)
class Train(Work):
    """Train from the base model. The fields are those of `Descend`; the gradients are of the round's Jacobian.

    The rows are of `dtype`, F32 or BF16. The rounding error of a row in BF16 is added to that row of the next reply
    (error feedback: Karimireddy et al., 2019, algorithm 2), so that nothing is lost over the rounds.
    """

    name: ClassVar[str] = "train"
    doing: ClassVar[str] = "training"
    sends_update: ClassVar[bool] = True

    sgd: LocalSgd
    targets: Targets = field(hash=False)
    from_jacobian: bool = False
    measure: bool = True
    private: PrivateSgd | None = None
    dtype: str = "F32"

    @classmethod
    def of(cls, spec: "RunSpec", round_: int, targets: Targets) -> "Train":
        """The training that a run asks for in a round, from 0."""
        private, protected = PrivateSgd.of(spec.privacy), spec.privacy.client_noise > 0
        return cls(
            sgd=spec.train.changed(learning_rate=spec.train.rate(round_, spec.rounds)),
            targets=targets,
            measure=spec.train.measure and private is None and not protected,
            private=private,
            dtype=_DTYPES[spec.train.wire_dtype],
        )

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """The deadline of `[train]`, the quorum of `[selection]`."""
        return Terms(spec.train.deadline_seconds, spec.selection.quorum)

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        for row, weights in self.targets.items():
            if not weights or any(name not in shape.serves for name in weights):
                raise WorkError(f"row {row!r} descends {sorted(weights)}; this client serves {', '.join(shape.serves)}")
            if not all(math.isfinite(value) for value in weights.values()):
                raise WorkError(f"row {row!r} descends objectives with weights that are no numbers")
        buffers = [RowSchema(BUFFERS, shape.buffers)] if shape.buffers else []
        return (*(RowSchema(row, shape.parameters, self.dtype) for row in self.targets), *buffers)

    def residuals(self, shape: Shape) -> tuple[RowSchema, ...]:
        rounded = (row for row in self.rows(shape) if row.dtype == "BF16")
        return tuple(RowSchema(RESIDUAL + row.name, row.length) for row in rounded)

    def demand(self, samples: int) -> Demand:
        """The steps, and the fewest samples that they see, whether the trainer evens out its minibatches or not."""
        batch = self.sgd.batch_size or samples
        steps = self.sgd.count(samples)
        if not samples:
            return Demand(steps, 0, len(self.targets))
        seen = Cut.of(samples, batch, even=self.private is None).samples_in(steps)
        return Demand(steps, seen, len(self.targets), max(float(self.sgd.epochs), steps * batch / samples))

    @classmethod
    def problem(cls, norms: Mapping[str, float], limits: "LimitsSpec") -> Refusal | None:
        """Refuses an update without direction, or longer than the run allows. Averaged buffers are not an update."""
        norms = {name: norm for name, norm in norms.items() if name != BUFFERS}
        if zero := [name for name, norm in norms.items() if norm == 0]:
            return Refusal("zero", f"every element is zero: {', '.join(zero)}; such an update has no direction")
        longest = max(norms, key=norms.__getitem__)
        if norms[longest] > limits.norm:
            return Refusal(
                "limit:norm",
                f"row {longest[:80]!r} has the norm {norms[longest]:.4g}; at most {limits.norm:g} is taken "
                "(limits.norm)",
            )
        return None

    def computation(self, client: WorkingClient) -> Descend:
        """The descent; `answer` hands in its rows, rounded to `dtype`."""
        return Descend(
            sgd=self.sgd,
            targets=self.targets,
            from_jacobian=self.from_jacobian,
            measure=self.measure,
            private=self.private,
        )

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        kept = self.residuals(client.shape)
        if not kept:
            return computed
        rows = dict(computed.rows)
        size = sum(row.length for row in kept)
        before = np.zeros(size, dtype=np.float32) if client.residual is None else client.residual
        left = []
        for name, residual in zip(self.targets, payload_layout(kept).split(before).values(), strict=True):
            try:
                rows[name], rest = narrow(rows[name] + residual)
            except OverflowError as error:
                raise WorkError(f"row {name!r}: {error}", reason="training-diverged") from None
            left.append(rest)
        return replace(computed, rows=rows, residual=np.concatenate(left))
