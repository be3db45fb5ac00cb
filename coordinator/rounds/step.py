"""The step: from an algorithm's decision to a new model in the blob store.

Beside the model, a run may keep vectors of its layout: those of the server's optimiser, and the mean of all models.
Blobs are stored first, then recorded. After a crash in between, the same blobs are made again.
"""

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from coordinator.rounds.fleets.base import Fleet, Skipped
from coordinator.rounds.runs.client_noise import ClientNoise, noise_of
from federation.aggregation.base import Algorithm
from federation.aggregation.direction import Direction
from federation.aggregation.gram import Average, apply_step, combine
from federation.aggregation.interface import UNREAD, Vector
from federation.aggregation.metrics.step_rate import step_rate
from federation.aggregation.phases import Step
from federation.aggregation.registry import origins
from federation.aggregation.server_optimizers import OPTIMIZERS, Optimizer, Sgd
from federation.aggregation.streaming import Row, one_thread
from federation.plugins import CodeOrigin
from federation.spec.run_sections import ServerSpec
from federation.spec.sharing import BUFFERS
from federation.vectors import model_layout, model_row, payload_bytes, update_layout, update_rows
from storage.blobs import BlobStore, BlobWriter
from storage.models import Round
from storage.records import AVERAGE, RunMemory

_MODEL = "model"


@dataclass(frozen=True)
class Stepped:
    """The results of a step: digests, measurements and the run's memory."""

    model: str  # the digest of the new model, from which the next round trains; the old one's if the step is stationary
    rate: float  # see `step_rate`
    gram: str  # the digest of the Gram matrix
    combined: str | None  # the digest of a vector that was combined before the step; None where rows were combined
    memory: RunMemory  # of the run, after the step
    direction: Direction  # the direction, and its measurements
    noise: ClientNoise | None  # on the direction; None for a run without noise
    code: tuple[CodeOrigin, ...]  # the plug-ins that made it

    @property
    def result(self) -> str:
        """The digest of the model that is evaluated and deployed."""
        return self.memory.deployed(self.model)

    @property
    def stationary(self) -> bool:
        """True if there is no step to take; with noise there always is one."""
        return self.direction.stationary


@one_thread()
def make_step(fleet: Fleet, algorithm: Algorithm, current: Round, step: Step) -> Stepped:
    """Makes and stores the model and the vectors that follow from a step.

    A stationary step changes nothing, the optimiser's vectors included; a mean of models counts its model once more.

    Raises:
        RecordError: the run's memory differs from that of the newest signed step.
        Skipped: the new model, or a vector, would not be finite; or no rate follows from the step.
    """
    context, spec = fleet.context, fleet.run.spec
    server, base = spec.server, current.base_model
    with context.database.read() as session:
        memory = fleet.memory(session, current.number, base)
    averaged = (memory.averaged or 0) if algorithm.averages else None
    noise = noise_of(fleet, current, algorithm.sensitivity(len(step.rows)))
    added = None if noise is None else (noise.scale, noise.row)
    whole, some = (UNREAD, step.gram) if step.gram_rows else (step.gram, UNREAD)
    direction = Direction(step.combination, step.rows, whole, noise=added, device=context.device, some=some)
    try:
        rate = step_rate(spec, current.number, step, step.gram, step.combination.coefficients)
    except ValueError as error:
        raise Skipped(str(error)) from error
    layout = model_layout(context.blobs.local(base))
    writer = StepWriter(
        blobs=context.blobs,
        base_model=base,
        parameters=spec.parameters.parameters_of(layout).size,
        trained=spec.parameters.trained(layout).size,
        vectors=memory.vectors,
        averaged=averaged,
        rate=rate,
        optimizer=algorithm.optimizer() or server_optimizer(server),
    )
    try:
        files = writer.write(step, direction)
    except FloatingPointError as error:
        raise Skipped(f"non-finite: {error}" + ("" if fleet.conceals else f"; {_longest(step)}")) from error
    rule = dict(step.combination.state)
    after = RunMemory(
        rule=rule,
        vectors=files.vectors,
        averaged=None if averaged is None else averaged + 1,
        blobs=tuple(sorted({*files.vectors.values(), *algorithm.blobs(rule)})),
    )
    return Stepped(files.model, rate, files.gram, files.combined, after, direction, noise, origins(algorithm))


def _longest(step: Step) -> str:
    """Names the client with the longest update, and the remedy."""
    if step.combined is not None:
        return f"the combined update has the norm {math.sqrt(step.gram.item()):.3g}: lower the learning rates"
    owners = [reply.client_id for reply in step.replies for _ in reply.rows]
    owners += [past.client_id for past in step.history]
    norms = np.sqrt(step.squares)
    longest = int(np.argmax(norms))
    return (
        f"the longest update is {owners[longest]}'s, {norms[longest]:.3g}: bound updates with algorithm.pre = "
        f'["clip"] or ["normalize"], or lower their learning rate'
    )


def recall(blobs: BlobStore, payload: str) -> Row:
    """The row (d,) of an earlier update by the digest of its payload.

    Raises:
        BlobMissing: it is not kept.
        BlobCorrupt: its bytes have another digest.
    """
    (row,) = (row for name, row in update_rows(blobs.local(payload)).items() if name != BUFFERS)
    return row


def server_optimizer(spec: ServerSpec) -> Optimizer:
    """The optimiser that a specification names, with its settings."""
    kind = OPTIMIZERS[spec.optimizer]
    return kind(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(kind)})


@dataclass(frozen=True)
class StepFiles:
    """The digests of the files of a step; see `Stepped`. `vectors` are those of the run after it, by name."""

    model: str
    vectors: Mapping[str, str]
    gram: str
    combined: str | None


@dataclass(frozen=True, kw_only=True)
class StepWriter:
    """Writes the files of one step."""

    blobs: BlobStore
    base_model: str  # the digest of w_t
    parameters: int  # of the model; averaged buffers come after them
    trained: int  # both together; fixed tensors come after them
    vectors: Mapping[str, str]  # digests before the step, by name
    averaged: int | None  # the number of models in the mean; None where none is kept
    rate: float  # the server's learning rate
    optimizer: Optimizer  # the server's

    def write(self, step: Step, direction: Direction) -> StepFiles:
        """The digests after a step along a direction.

        Averaged buffers become the plain mean of the buffers in the combined replies; fixed tensors stay.

        Raises:
            FloatingPointError: the new model, or a vector, would not be finite.
        """
        vectors = {**self.vectors, **self._moved(step, direction)}
        model, gram, combined = vectors.pop(_MODEL), io.BytesIO(), None
        np.save(gram, step.gram, allow_pickle=False)  # no mutant: numbers are never pickled
        if step.combined is not None:
            layout = update_layout([("combined", len(step.combined))])
            combined = self.blobs.put(b"".join(payload_bytes(layout, {"combined": step.combined})))
        return StepFiles(model, vectors, self.blobs.put(gram.getvalue()), combined)

    def _moved(self, step: Step, direction: Direction) -> dict[str, str]:
        """The digests of the model and of the vectors that change, by name."""
        # Of a direction that is made coordinate by coordinate, `stationary` is known after its last block.
        if not direction.stationary:
            buffers = [reply.buffers for reply in step.replies if reply.buffers is not None]
            with self._stream(direction, self.optimizer, buffers) as writers:
                if not direction.stationary:
                    return {name: writer.commit() for name, writer in writers.items()}
        if self.averaged is not None:
            with self._stream(combine(np.zeros(len(step.rows)), step.rows), Sgd(), []) as writers:
                return {name: writer.commit() for name, writer in writers.items()}
        return {_MODEL: self.base_model}

    @contextmanager
    def _stream(
        self, direction: Iterable[Vector], optimizer: Optimizer, buffers: Sequence[Row]
    ) -> Iterator[dict[str, BlobWriter]]:
        """Writes the model and the vectors after a step; writers that the context does not commit are discarded.

        Where the model has averaged buffers, they become the mean of `buffers`, and stay as they are if there are none.
        """
        names = (_MODEL, *optimizer.slots, *([] if self.averaged is None else [AVERAGE]))
        base, header = self._row(self.base_model), model_layout(self.blobs.local(self.base_model)).header
        before = {name: self._row(digest) for name, digest in self.vectors.items() if name in names}
        with ExitStack() as stack:
            writers = {name: stack.enter_context(self.blobs.writer()) for name in names}
            for writer in writers.values():
                writer.write(header)
            average = None
            if self.averaged is not None:
                average = Average(self.averaged, before.pop(AVERAGE, None), writers[AVERAGE].write)
            after: dict[str, Callable[[memoryview], object]] = {slot: writers[slot].write for slot in optimizer.slots}
            apply_step(
                base,
                self.rate,
                direction,
                writers[_MODEL].write,
                optimizer=optimizer,
                before=before,
                after=after,
                average=average,
            )
            for block in (*self._buffers(buffers), *self._fixed()):
                for name, writer in writers.items():
                    values = block if name in (_MODEL, AVERAGE) else np.zeros_like(block)
                    writer.write(values.astype("<f4").data.cast("B"))
            yield writers

    def _row(self, digest: str) -> Row:
        """The parameters of a model, or the same part of another vector."""
        return model_row(self.blobs.local(digest)).columns(slice(0, self.parameters))

    def _buffers(self, buffers: Sequence[Row]) -> Iterator[Vector]:
        """Blocks of the averaged buffers after a step; none where the model has none."""
        if self.trained > self.parameters:
            whole = model_row(self.blobs.local(self.base_model))
            rows = buffers or [whole.columns(slice(self.parameters, self.trained))]
            yield from combine(np.full(len(rows), 1 / len(rows)), rows)

    def _fixed(self) -> Iterator[Vector]:
        """Blocks of the fixed tensors; none where the model has none."""
        whole = model_row(self.blobs.local(self.base_model))
        if whole.length > self.trained:
            yield from combine(np.ones(1), [whole.columns(slice(self.trained, whole.length))])
