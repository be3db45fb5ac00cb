"""The step: from what an algorithm decided on to a new model in the blob store, and to the signed record of it.

Beside the model, a run may keep vectors of its size: what the server's optimiser remembers, and the mean of all models
so far. They are files of the model's layout.

Blobs come first, one transaction after them. A coordinator that dies in between makes the same blobs again.
"""

import dataclasses
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.base import Algorithm
from coordinator.aggregation.direction import Direction
from coordinator.aggregation.gram import Average, apply_step, combine
from coordinator.aggregation.phases import Step
from coordinator.aggregation.registry import origins, server_rate
from coordinator.aggregation.rules import Vector
from coordinator.aggregation.server import OPTIMISERS, Optimiser, Sgd
from coordinator.aggregation.streaming import Row
from coordinator.rounds import record
from coordinator.rounds.evidence import Evidence
from coordinator.rounds.fleets.base import RevokedMeanwhile, RunFacts, Skipped, Surroundings
from coordinator.rounds.revoked import left_out
from coordinator.rounds.states import move_round
from federation.plugins import Origin
from federation.runs import RunSpec, ServerSpec
from federation.v1.common_pb2 import Code, ObjectiveWeight, StepManifest
from federation.vectors import model_layout, model_row, payload_bytes, update_layout, update_rows
from storage import models
from storage.blobs import BlobStore, BlobWriter
from storage.models import Client, ClientState, Round, RoundState, Run
from storage.records import AVERAGE, RunMemory, canonical, memory_digest

log = logging.getLogger(__name__)

_MODEL = "model"


@dataclass(frozen=True)
class Stepped:
    """What a step made.

    Attributes:
        model: the digest of the new model, from which the next round trains; that of the old one when the step is
            stationary.
        result: the digest of the model that the run has come to, which is evaluated and deployed.
        rate: the server's learning rate of the round, times the step size that a line search chose.
        gram: the digest of the Gram matrix.
        combined: the digest of the vector that was combined already; None where rows were combined.
        memory: of the run, after the step.
        direction: what was measured of it.
        code: that made it.
    """

    model: str
    result: str
    rate: float
    gram: str
    combined: str | None
    memory: RunMemory
    direction: Direction
    code: tuple[Origin, ...]

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
    memory: RunMemory,
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
        memory: of the run, before the step.
        blobs: where the new model goes.
        device: where updates are aggregated, "cpu" or "cuda".

    Raises:
        Skipped: the new model, or a vector, would not be finite.
    """
    server = spec.server
    rate = step.size * server_rate(server.learning_rate, server.decay, number, spec.rounds, server.decay_every)
    direction = Direction(step.combination, step.rows, step.gram, device=device)
    vectors = dict(memory.vectors)
    averaged = (memory.averaged or 0) if algorithm.averages else None
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
    after = RunMemory(
        rule=rule,
        vectors=vectors,
        averaged=None if averaged is None else averaged + 1,
        blobs=tuple(sorted({*vectors.values(), *algorithm.blobs(rule)})),
    )
    buffer = io.BytesIO()
    np.save(buffer, step.gram, allow_pickle=False)
    combined = None if step.combined is None else blobs.put(_combined_file(step.combined))
    gram, code = blobs.put(buffer.getvalue()), origins(algorithm)
    return Stepped(model, after.deployed(model), rate, gram, combined, after, direction, code)


def _combined_file(vector: NDArray[np.float32]) -> bytes:
    """The file of a vector that was combined already."""
    layout = update_layout([("combined", len(vector))])
    return b"".join(payload_bytes(layout, {"combined": vector}))


def _longest(step: Step) -> str:
    """Whose update is the longest, and what can be done about it."""
    if step.combined is not None:
        return f"the combined update has the norm {math.sqrt(float(step.gram[0, 0])):.3g}: lower the learning rates"
    owners = [reply.client_id for reply in step.replies for _ in reply.rows]
    owners += [past.client_id for past in step.history]
    norms = np.sqrt(np.diagonal(step.gram))
    longest = int(np.argmax(norms))
    return (
        f"the longest update is {owners[longest]}'s, {norms[longest]:.3g}: bound updates with algorithm.pre = "
        f'["clip"] or ["normalise"], or lower their learning rate'
    )


def recall(blobs: BlobStore, payload: str) -> Row:
    """The row (d,) of an earlier update by the digest of its payload.

    Raises:
        BlobMissing: it is not kept.
        BlobCorrupt: its bytes have another digest.
    """
    (row,) = update_rows(blobs.local(payload)).values()
    return row


def server_optimiser(spec: ServerSpec) -> Optimiser:
    """The optimiser that a specification names, with its settings."""
    kind = OPTIMISERS[spec.optimiser]
    return kind(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(kind)})


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
        names = (_MODEL, *optimiser.slots, *([] if self.averaged is None else [AVERAGE]))
        base, header = self._row(self.base_model), model_layout(self.blobs.local(self.base_model)).header
        before = {name: self._row(digest) for name, digest in self.vectors.items() if name in names}
        with ExitStack() as stack:
            writers = {name: stack.enter_context(self.blobs.writer()) for name in names}
            for writer in writers.values():
                writer.write(header)
            average = None
            if self.averaged is not None:
                average = Average(self.averaged, before.pop(AVERAGE, None), writers[AVERAGE].write)
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
        return model_row(self.blobs.local(digest))


def read_memory(session: Session, run: RunFacts, evidence: Evidence, number: int, base_model: str | None) -> RunMemory:
    """What a run remembers before a round: what the newest signed step left behind.

    Args:
        session: an open transaction.
        run: the run.
        evidence: checks the record against what was signed.
        number: of the round, from 0.
        base_model: the digest of the model that the round starts from; None before it begins.

    Raises:
        RecordError: it is not what the newest signed step left behind.
    """
    before = session.scalar(
        select(Round)
        .where(Round.run_id == run.run_id, Round.number < number, Round.step.is_not(None))
        .order_by(Round.number.desc())
        .limit(1)
    )
    return RunMemory.decode(evidence.state(session.get_one(Run, run.run_id), before, base_model))


def record_step(run: RunFacts, around: Surroundings, current: Round, step: Step, phases: int, made: Stepped) -> None:
    """Signs and records a step: one transaction for the round, the run and each update's share.

    Args:
        run: the run.
        around: the coordinator.
        current: the round.
        step: the algorithm's decision.
        phases: the number of the phase that follows, which evaluates the new model.
        made: what follows from the step; its blobs are stored.

    Raises:
        Held: the run is not RUNNING.
        RevokedMeanwhile: a member whose reply entered the step was revoked.
    """
    now = around.clock()
    with around.database.begin() as session:
        row = run.running(session)
        revoked = set(session.scalars(select(Client.client_id).where(Client.state == ClientState.REVOKED)))
        if revoked & {part.client_id for part in (*step.replies, *step.consulted, *step.history)}:
            raise RevokedMeanwhile
        # Those that the step was made of: a client may have replied to several phases.
        envelopes = [reply.envelope for reply in step.replies]
        shares = record.shares(step, made.direction)
        for update in session.scalars(select(models.Update).where(models.Update.envelope_digest.in_(envelopes))):
            share = shares[update.client_id]
            update.norm, update.weight = share.norm, share.weight
            update.coefficient, update.cosine = share.coefficient, share.cosine
        for model in sorted({made.model, made.result}):
            size = around.blobs.stat(model).size
            models.note_model(session, model, size=size, parameters=run.parameters, created=now)
        round_ = session.get_one(Round, current.round_id)
        round_.result_model, round_.deployed_model = made.model, made.result
        round_.gram, round_.combined = made.gram, made.combined
        round_.evaluation_phase = phases
        known, numbers = record.objectives(step, run.objectives)
        round_.objectives = known.encode() if known else {}
        measured = {**made.direction.diagnostics, **record.agreement(step), **numbers}
        round_.metrics = {"step/rate": made.rate, **record.finite(measured)}
        after = made.memory.encode()
        manifest = StepManifest(
            federation_id=around.federation_id,
            run_id=run.run_id,
            round=current.number,
            base_model=current.base_model,
            result_model=made.model,
            updates=[*envelopes, *(past.envelope for past in step.history)],
            coefficients=step.combination.coefficients.tolist(),
            rate=0.0 if made.stationary else made.rate,
            gram=made.gram,
            combined=made.combined or "",
            algorithm=run.spec.algorithm.name,
            hyperparameters=canonical(run.spec.algorithm.hyperparameters),
            state_before=memory_digest(row.state_data),
            state_after=memory_digest(after),
            consulted=[reply.envelope for reply in step.consulted],
            forgotten=step.forgotten,
            revoked=left_out(session, current.round_id),
            code=[Code(**dataclasses.asdict(origin)) for origin in made.code],
            weights=[ObjectiveWeight(objective=name, weight=value) for name, value in record.weights(step).items()],
        )
        manifest.created.FromDatetime(now)
        round_.step = around.sign(manifest).SerializeToString()
        move_round(round_, RoundState.STEPPED, now, "stationary" if made.stationary else "")
        row.model = made.model
        row.state_data = after
    log.info("run %s round %d: stepped to %s", run.run_id, current.number, made.model)
    around.changed()
