"""The end of a round: from the step that an algorithm decided on to a new model in the blob store.

Beside the model, a run may keep vectors of its size: what the server's optimiser remembers, and the mean of all models
so far. They are files of the model's layout.

Nothing is recorded here: blobs come first, the conductor's one transaction after them. A coordinator that dies in
between makes the same blobs again.
"""

import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.direction import Direction
from coordinator.aggregation.gram import Average, apply_step, combine
from coordinator.aggregation.phases import Step
from coordinator.aggregation.registry import server_rate
from coordinator.aggregation.rules import Vector
from coordinator.aggregation.server import OPTIMISERS, Optimiser, Sgd
from coordinator.aggregation.streaming import Row
from federation.runs import RunSpec, ServerSpec
from federation.vectors import model_layout, model_row, update_rows
from storage.blobs import BlobStore, BlobWriter

_MODEL, _AVERAGE = "model", "average"


class Skipped(Exception):
    """This round ends without a step; the message says why."""


@dataclass(frozen=True)
class Stepped:
    """What a step made.

    Attributes:
        model: the digest of the new model, from which the next round trains; that of the old one when the step is
            stationary.
        result: the digest of the model that the run has come to, which is evaluated and deployed; see `result_of`.
        rate: the server's learning rate of the round.
        gram: the digest of the Gram matrix.
        state: of the run, after the step.
        direction: what was measured of it.
    """

    model: str
    result: str
    rate: float
    gram: str
    state: dict[str, Any]
    direction: Direction

    @property
    def stationary(self) -> bool:
        """The direction is zero but for rounding: there was no step to take."""
        return self.direction.stationary


def make_step(
    step: Step,
    *,
    algorithm: Algorithm,
    spec: RunSpec,
    number: int,
    base_model: str,
    state: Mapping[str, Any],
    blobs: BlobStore,
    device: str,
) -> Stepped:
    """Makes and stores what follows from a step.

    A stationary step changes nothing, the optimiser's vectors included; a mean of models counts its model once more.

    Args:
        step: the algorithm's decision.
        algorithm: the run's.
        spec: the run's.
        number: of the round, from 0.
        base_model: the digest of w_t.
        state: of the run, before the step: `rule`, what the algorithm keeps; `vectors`, the digests of the optimiser's
            by slot and of the mean of models as `average`; `averaged`, how many models that is of; and `blobs`, every
            digest that the others name. Empty before the first step.
        blobs: where the new model goes.
        device: where updates are aggregated, "cpu" or "cuda".

    Raises:
        Skipped: the new model, or a vector, would not be finite.
    """
    rate = server_rate(spec.server.learning_rate, spec.server.decay, number, spec.rounds)
    direction = Direction(step.combination, step.rows, step.gram, device=device)
    vectors: dict[str, str] = dict(state.get("vectors", {}))
    averaged = int(state.get("averaged", 0)) if algorithm.averages else None
    workshop = _Workshop(blobs, base_model, vectors, rate, averaged)
    made = {_MODEL: base_model}
    try:
        if not direction.stationary:
            with workshop.stream(direction, algorithm.optimiser() or server_optimiser(spec.server)) as writers:
                if not direction.stationary:  # of one that is made coordinate by coordinate, it is known only now
                    made = {name: writer.commit() for name, writer in writers.items()}
        if direction.stationary and algorithm.averages:
            with workshop.stream(combine(np.zeros(len(step.rows)), step.rows), Sgd()) as writers:
                made = {name: writer.commit() for name, writer in writers.items()}
    except FloatingPointError as error:
        raise Skipped(f"non-finite: {error}; {_longest(step)}") from error
    model = made.pop(_MODEL)
    vectors |= made
    rule = dict(step.combination.state)
    after: dict[str, Any] = {"rule": rule, "vectors": vectors}
    if averaged is not None:
        after["averaged"] = averaged + 1
    after["blobs"] = sorted({*vectors.values(), *algorithm.blobs(rule)})
    buffer = io.BytesIO()
    np.save(buffer, step.gram, allow_pickle=False)
    return Stepped(model, result_of(model, after), rate, blobs.put(buffer.getvalue()), after, direction)


def _longest(step: Step) -> str:
    """Whose update is the longest, and what can be done about it."""
    owners = [reply.client_id for reply in step.replies for _ in reply.rows]
    owners += [past.client_id for past in step.history]
    norms = np.sqrt(np.diagonal(step.gram))
    longest = int(np.argmax(norms))
    return (
        f"the longest update is {owners[longest]}'s, {norms[longest]:.3g}: bound updates with algorithm.pre = "
        f'["clip"] or ["normalise"], or lower their learning rate'
    )


def result_of(model: str, state: Mapping[str, Any]) -> str:
    """The digest of the model that is evaluated and deployed: the mean of all models where the run keeps one.

    Args:
        model: the digest of the run's current model, from which clients train.
        state: of the run.
    """
    return str(state.get("vectors", {}).get(_AVERAGE, model))


def recall(blobs: BlobStore, payload: str) -> Row:
    """The row (d,) of an earlier update by the digest of its payload.

    Raises:
        BlobMissing: it is not kept.
        BlobCorrupt: its bytes have another digest.
    """
    blobs.verify(payload)
    (row,) = update_rows(blobs.path(payload)).values()
    return row


def server_optimiser(spec: ServerSpec) -> Optimiser:
    """The optimiser that a specification names, with its settings."""
    kind = OPTIMISERS[spec.optimiser]
    return kind(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(kind)})


def canonical(value: Any) -> str:
    """JSON of which there is one spelling: what digests are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class _Workshop:
    """Where the files of one step are made.

    Attributes:
        blobs: the store.
        base_model: the digest of w_t.
        vectors: the digests of those before the step, by name.
        rate: the server's learning rate.
        averaged: of how many models the mean is; None where none is kept.
    """

    blobs: BlobStore
    base_model: str
    vectors: Mapping[str, str]
    rate: float
    averaged: int | None

    @contextmanager
    def stream(self, direction: Iterable[Vector], optimiser: Optimiser) -> Iterator[dict[str, BlobWriter]]:
        """Writes the model and the vectors after a step; what is not committed inside the context is gone after it."""
        names = (_MODEL, *optimiser.slots, *([] if self.averaged is None else [_AVERAGE]))
        base, header = self._row(self.base_model), model_layout(self.blobs.path(self.base_model)).header()
        before = {name: self._row(digest) for name, digest in self.vectors.items() if name in names}
        with ExitStack() as stack:
            writers = {name: stack.enter_context(self.blobs.writer()) for name in names}
            for writer in writers.values():
                writer.write(header)
            average = None
            if self.averaged is not None:
                average = Average(self.averaged, before.pop(_AVERAGE, None), writers[_AVERAGE].write)
            after: dict[str, Callable[[memoryview], object]] = {slot: writers[slot].write for slot in optimiser.slots}
            apply_step(
                base,
                self.rate,
                direction,
                writers[_MODEL].write,
                optimiser=optimiser,
                before=before,
                after=after,
                average=average,
            )
            yield writers

    def _row(self, digest: str) -> Row:
        self.blobs.verify(digest)
        return model_row(self.blobs.path(digest))
