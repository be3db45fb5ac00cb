"""The end of a round: from the step that an algorithm decided on to a new model in the blob store.

Nothing is recorded here: blobs come first, the conductor's one transaction after them. A coordinator that dies in
between makes the same blobs again.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.aggregation.gram import apply_step
from coordinator.aggregation.phases import Step
from coordinator.aggregation.registry import server_rate
from federation.runs import RunSpec
from federation.vectors import model_layout, model_row
from storage.blobs import BlobStore


class Skipped(Exception):
    """This round ends without a step; the message says why."""


@dataclass(frozen=True)
class Stepped:
    """What a step made.

    Attributes:
        model: the digest of the new model; that of the old one when the step is stationary.
        rate: the server's learning rate of the round.
        gram: the digest of the Gram matrix.
        state: of the run, after the step.
        stationary: the direction is zero but for rounding: there was no step to take.
    """

    model: str
    rate: float
    gram: str
    state: dict[str, Any]
    stationary: bool


def make_step(
    step: Step, *, spec: RunSpec, number: int, base_model: str, state: Mapping[str, Any], blobs: BlobStore, device: str
) -> Stepped:
    """Makes and stores what follows from a step.

    Args:
        step: the algorithm's decision.
        spec: the run's.
        number: of the round, from 0.
        base_model: the digest of w_t.
        state: of the run, before the step.
        blobs: where the new model goes.
        device: where updates are aggregated, "cpu" or "cuda".

    Raises:
        Skipped: the new model would not be finite.
    """
    rate = server_rate(spec.server.learning_rate, spec.server.decay, number, spec.rounds)
    stationary = bool(step.combination.diagnostics.get("stationary", 0.0))
    model = base_model if stationary else _make_model(step, rate, base_model, blobs, device)
    buffer = io.BytesIO()
    np.save(buffer, step.replies.gram, allow_pickle=False)
    return Stepped(model, rate, blobs.put(buffer.getvalue()), dict(step.combination.state), stationary)


def canonical(value: Any) -> str:
    """JSON of which there is one spelling: what digests are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _make_model(step: Step, rate: float, base_model: str, blobs: BlobStore, device: str) -> str:
    base = blobs.path(base_model)
    blobs.verify(base_model)
    with blobs.writer() as writer:
        writer.write(model_layout(base).header())
        try:
            apply_step(
                model_row(base), rate, step.combination.coefficients, step.replies.updates, writer.write, device=device
            )
        except FloatingPointError as error:
            raise Skipped(f"non-finite: {error}") from error
        return writer.commit()
