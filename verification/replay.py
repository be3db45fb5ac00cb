"""The rule on the replies on record: the round's conversation, repeated with the signed K.

The rule is a pure function of K and of numbers that the clients signed, so it can be evaluated without the updates. A
bundle without payloads has no rows: a rule that reads more than K cannot be replayed from it.
"""

import io
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.diagnostics import drawn_rows
from federation.aggregation.interface import Reads
from federation.aggregation.metrics.replayed_step import Absent, replayed_step
from federation.aggregation.metrics.step_rate import scheduled_rate
from federation.aggregation.phases import (
    AlgorithmPhase,
    Asked,
    PhaseReply,
    RoundContext,
    Selected,
    Step,
    Voided,
)
from federation.aggregation.streaming import Row
from federation.digests import digest
from federation.record.bundle import BlobAbsent, BundleReader
from federation.spec.objective_names import encoder_columns
from federation.spec.run_sections import AUTO
from federation.spec.sharing import BUFFERS
from federation.statistics.data_columns import ColumnError
from federation.statistics.result import result
from federation.trust.key_chain import KeyChain
from federation.v1.common_pb2 import AssignmentManifest, ResultManifest, StepManifest
from federation.vectors import Layout, RowFile
from federation.work.base import WorkError
from federation.work.registry import decode_statement, encode
from federation.work.statistics.work import ROW
from verification.arithmetic import check_squares
from verification.assignments import Crowd
from verification.errors import VerificationError
from verification.recorded_run import RecordedBlobs, RecordedRun
from verification.signed import SignedReply, SignedRound

_GRAM_BYTES = 1 << 28  # of a Gram matrix, 5,700 rows
Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BundleRunFacts(RecordedRun):
    """The facts of the run of a bundle; `clients` has the keys of those that have certificates."""

    bundle: BundleReader
    clients: Mapping[str, KeyChain]


def read_gram(blobs: RecordedBlobs, digest: str) -> Matrix:
    """A Gram matrix of a record, float64.

    Raises:
        BlobAbsent: it is not kept.
        VerificationError: it is not a square matrix of float64.
    """
    return parse_gram(blobs.blob(digest, _GRAM_BYTES))


def parse_gram(data: bytes) -> Matrix:
    """A Gram matrix from the bytes of a .npy file, float64.

    Raises VerificationError if it is not a square matrix of float64.
    """
    stream = io.BytesIO(data)
    try:
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"version {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # a hostile header can make the parser raise nearly anything, with advice to trust the file
        raise VerificationError("the Gram matrix is not a .npy file of version 1.0") from None
    m = int(shape[0]) if shape else 0
    if dtype != np.float64 or shape != (m, m) or m < 0:
        raise VerificationError(f"the Gram matrix is {dtype} {shape}; expected a square matrix of float64")
    # The bytes are counted before the matrix is made: a header may claim any size.
    if (size := len(data) - stream.tell()) != dtype.itemsize * m * m:
        raise VerificationError(f"the Gram matrix has {size} bytes; its header says {shape}")
    K = np.frombuffer(data, dtype, offset=stream.tell()).reshape(m, m, order="F" if by_columns else "C")
    return K.astype(np.float64, copy=False)


def compared_rows(run: RecordedRun, signed: SignedRound, step: StepManifest) -> tuple[int, ...]:
    """The rows of a step of which its signed K is; none: all.

    Raises VerificationError if K, or the squared lengths beside it, are of other rows than they have to be.
    """
    rows, squares = tuple(step.gram_rows), np.array(step.squared_norms)
    if not rows and not len(squares):
        return ()
    rule = run.rule
    # Verify, 6: a part of K that something reads could not be recomputed without the updates.
    if step.combined or run.spec.server.learning_rate == AUTO or not isinstance(rule, Rule):
        raise VerificationError("the signed K is of some rows alone; this step needs all of it")
    if rule.needs_of_updates is Reads.GRAM:
        raise VerificationError(f"the signed K is of some rows alone; {rule.name}, or a stage, reads all of it")
    named = [signed.replies.get(name) for name in step.replies]
    count = sum(0 if reply is None else sum(row.name != BUFFERS for row in reply.manifest.rows) for reply in named)
    if squares.shape != (count,) or not (np.isfinite(squares) & (squares >= 0)).all():
        raise VerificationError(f"the step has {len(squares)} squared lengths, or one is none; it has {count} rows")
    # Verify, 6: a coordinator that picks the rows would pick what the metrics say.
    if rows != drawn_rows(run.spec.seed, step.round, count):
        raise VerificationError("the signed K is of other rows than the seed and the round draw")
    return rows


def read_compared(run: RecordedRun, step: StepManifest) -> Matrix:
    """The signed K of a step.

    Raises:
        BlobAbsent: it is not kept.
        VerificationError: it is no Gram matrix, or not of the rows of the step, or not of their signed lengths.
    """
    K = read_gram(run.blobs, step.gram)
    if step.gram_rows:
        if len(K) != len(step.gram_rows):
            raise VerificationError(f"K has {len(K)} rows; the step names {len(step.gram_rows)}")
        check_squares(np.diagonal(K), np.array(step.squared_norms)[list(step.gram_rows)], step.gram_rows)
    return K


def open_step(
    run: RecordedRun, signed: SignedRound, step: StepManifest, state: Mapping[str, Any], *, asked: bool = True
) -> Step:
    """The step that follows from the replies of a round whose updates were sent in the clear.

    Args:
        run: the run.
        signed: the round.
        step: its signed step.
        state: the rule's state before the round.
        asked: True if this rule asked for the replies; False for another rule than that of the run, which gets the
            replies as long as the kind of work is the same.

    Raises:
        BlobAbsent: the rule reads rows that are not there.
        VerificationError: no step follows, or not from these replies.
    """
    return _evaluated(run, signed, step, state, _replies(run, signed, step), asked=asked)


def step_from_numbers(
    run: RecordedRun, signed: SignedRound, step: StepManifest, state: Mapping[str, Any]
) -> Step | None:
    """The step that the rule gives on K and signed numbers; None if it reads updates, or if none follows.

    Raises VerificationError if a statement of a reply is malformed.
    """
    replies = _replies(run, signed, step)
    try:
        return _evaluated(run, signed, step, state, replies, asked=False)
    except (BlobAbsent, VerificationError):
        return None


def check_result(
    run: RecordedRun, signed: SignedRound, stated: ResultManifest, document: bytes, gone: Collection[str]
) -> int:
    """Checks that the signed result of a round that describes data follows from what the members have told.

    Args:
        run: the run.
        signed: the round.
        stated: its signed result.
        document: of the result, JSON.
        gone: the clients that may have been revoked after their replies.

    Returns:
        The number of columns.

    Raises:
        BlobAbsent: a payload is not there.
        VerificationError: it does not follow.
    """
    check_document(stated, document)
    by_client = {reply.manifest.client_id: reply for reply in signed.evaluations.values()}
    replied = {reply.envelope: client_id for client_id, reply in by_client.items()}
    unknown = [name for name in stated.replies if name not in replied]
    if unknown or len(set(stated.replies)) < len(stated.replies):
        raise VerificationError("the result names a reply twice, or one that was not accepted in its round")
    named = [*(replied[name] for name in stated.replies), *stated.left_out]
    if hidden := sorted({*by_client} - {*named} - {*gone}):
        raise VerificationError(f"the reply of {hidden[0]} was accepted, and the result leaves it out")
    if strangers := sorted({*named} - {*by_client}):
        raise VerificationError(f"the result leaves {strangers[0]} out, and has no reply of it")
    told, asked = {}, run.spec.statistics
    for name in named:
        rows = run.blobs.rows(by_client[name].manifest.payload)
        told[name] = np.asarray(rows[ROW].read()).tobytes() if ROW in rows else b""
    try:
        made = result(told, asked.described, asked.bins, asked.splits)
    except ColumnError as error:
        raise VerificationError(f"no result follows from the replies: {error}") from error
    if (made.document, [*made.left_out]) != (document, [*stated.left_out]) or [*made.used] != named[: len(made.used)]:
        raise VerificationError("the result is not what follows from the replies")
    return len(asked.columns)


def check_document(stated: ResultManifest, document: bytes) -> None:
    """Raises VerificationError: the document of a result is not the one that was signed."""
    if (digest(document), len(document)) != (stated.document, stated.document_bytes):
        raise VerificationError("the document of the result is not the one that was signed")


def _replies(run: RecordedRun, signed: SignedRound, step: StepManifest) -> dict[int, list[PhaseReply]]:
    """The replies that a step names, by phase."""
    named = {*step.replies, *step.consulted}
    phases: dict[int, list[PhaseReply]] = {number: [] for number in signed.phases}
    for reply in signed.replies.values():
        # Verify, a verifier of your own, 4: what the step names; `check_logged` and `_check_step` find what it leaves
        # out.
        if reply.envelope in named:
            phases[reply.order.phase].append(recorded_reply(run, reply, reads=run.reads_updates))
    return phases


def _evaluated(
    run: RecordedRun,
    signed: SignedRound,
    step: StepManifest,
    state: Mapping[str, Any],
    phases: Mapping[int, Sequence[PhaseReply]],
    *,
    asked: bool,
) -> Step:
    K, some = None, compared_rows(run, signed, step) if asked else tuple(step.gram_rows)
    with suppress(BlobAbsent):
        K = None if some else read_gram(run.blobs, step.gram)
    layout = run.blobs.layout(step.base_model) if run.reads_updates and run.blobs.has(step.base_model) else None
    context = round_context(run, step.round, layout, state)
    try:
        made = _conversation(run, signed, step, context, K, phases, asked=asked)
    except BlobAbsent:
        raise
    except (Voided, ArithmeticError, LookupError, ValueError) as error:  # the last are those of hostile replies, too
        raise VerificationError(f"no step follows from the replies: {error}") from error
    # Verify, 6: an algorithm that asks in its own way may read K whatever its class says.
    if asked and made.gram_rows != some:
        raise VerificationError("the signed K is of some rows alone; the algorithm makes its step from all of it")
    return made


def round_context(run: RecordedRun, number: int, layout: Layout | None, state: Mapping[str, Any]) -> RoundContext:
    """The context of the conversation of a round, as far as it follows from the record.

    `layout` is that of the model that the round starts from; None where it is not known.
    """
    spec = run.spec

    def recall(payload: str) -> Row:
        if not run.reads_updates:
            return np.zeros(0, np.float32)  # its products with the others are in K
        (row,) = run.blobs.rows(payload).values()
        return row

    return RoundContext(
        number=number,
        total=spec.rounds,
        prior=spec.algorithm.prior,
        state=state,
        recall=recall,
        objectives=run.objectives,
        parameters=0 if layout is None else spec.parameters.parameters_of(layout).size,
        encoder=() if layout is None else encoder_columns(spec.parameters.parameters_of(layout)),
        seed=spec.seed,
        local_rate=spec.train.rate(number, spec.rounds),
        server_rate=scheduled_rate(spec, number),
    )


def _conversation(
    run: RecordedRun,
    signed: SignedRound,
    step: StepManifest,
    context: RoundContext,
    K: Matrix | None,
    phases: Mapping[int, Sequence[PhaseReply]],
    *,
    asked: bool,
) -> Step:
    samples = {reply.manifest.client_id: reply.manifest.samples for reply in signed.replies.values()}
    selected = {
        name: Selected(samples.get(name, 0), tuple(order.objectives)) for (_, name), order in signed.asked.items()
    }
    if not context.parameters:  # the model is not known; the rows of updates are as long
        lengths = [row.length for order in signed.asked.values() for row in order.rows if row.name != BUFFERS]
        size = max(lengths, default=0)
        context = replace(context, parameters=size, encoder=(slice(0, size),))
    revoked = frozenset([*step.revoked, *step.forgotten])
    attempt = max((order.attempt for order in signed.asked.values()), default=0)
    context = replace(
        context,
        attempt=attempt,
        selected=selected,
        revoked=lambda: revoked,
        compares_all=not step.gram_rows,
        draw=lambda purpose: tuple(sorted(selected)),
    )
    crowd, surely = Crowd(run.spec, signed.gone), 0

    def asks(number: int, phase: AlgorithmPhase) -> None:
        nonlocal surely
        orders = [order for (phase_number, _), order in signed.asked.items() if phase_number == number]
        if asked:
            _check_asks(run, phase, orders)
            if phase.clients is None:
                if not surely and len(run.objectives) == 1:
                    crowd.check_orders(orders)
                surely = max(surely, len(orders))
            crowd.check_replied(phase, surely, orders, [reply.client_id for reply in phases[number]])
        elif any(order.kind != phase.kind.name for order in orders):
            raise VerificationError(f"{run.rule.name} asks for {phase.kind.name}; the run asked for {orders[0].kind}")

    squares = np.array(step.squared_norms) if step.gram_rows else None
    made, more = replayed_step(run.rule, context, phases, K, asks, squares)
    # Verify, 4: phases that the rule does not ask for were asked for another purpose.
    if asked and more is not None:
        raise VerificationError(f"the rule asks for nothing in phase {more}, which is on record")
    return made


def _check_asks(run: RecordedRun, phase: AlgorithmPhase, orders: Sequence[AssignmentManifest]) -> None:
    """Checks that the assignments of a phase ask for the work of the rule and the specification.

    Raises VerificationError.
    """
    inputs = [(part, digest(content), len(content)) for part, content in sorted(phase.inputs().items())]
    for order in orders:
        name = f"the assignment of {order.client_id} in phase {order.phase}"
        if order.kind != phase.kind.name:
            raise VerificationError(f"{name} asks for {order.kind}; the rule asks for {phase.kind.name}")
        # Verify, 4: the bytes of the work, made again: any field that differs for one member is found, also one that
        # the rule ignores.
        if order.work != encode(phase.work(Asked(order.client_id, tuple(order.objectives), run.spec, order.round))):
            raise VerificationError(f"{name} asks for other work than the rule and the specification")
        # Verify, 4: with other inputs, a member would have answered another question in the same words.
        if [(part.name, part.digest, part.size) for part in order.inputs] != inputs:
            raise VerificationError(f"{name} has other inputs than the rule gives")


def recorded_reply(run: RecordedRun, reply: SignedReply, *, reads: bool = True) -> PhaseReply:
    """A signed reply as the rule reads it; with `reads`, with the rows of its payload, if they are kept.

    Raises VerificationError if its statement is malformed.
    """
    manifest, order = reply.manifest, reply.order
    rows: Sequence[RowFile] = ()
    names = tuple(row.name for row in manifest.rows if row.name != BUFFERS)
    if manifest.payload:
        rows = Absent(BlobAbsent(manifest.payload), len(names))
        if reads and run.blobs.has(manifest.payload):
            rows = tuple(row for name, row in run.blobs.rows(manifest.payload).items() if name != BUFFERS)
    try:
        statement = decode_statement(order.kind, manifest.statement)
    except WorkError as error:
        raise VerificationError(f"the statement of {manifest.client_id}: {error}") from error
    return PhaseReply(
        client_id=manifest.client_id,
        samples=manifest.samples,
        losses=dict(manifest.losses),
        metrics=dict(manifest.metrics),
        rows=rows,  # type: ignore[arg-type] # a sequence that cannot be read stands for absent rows
        names=names,
        objectives=tuple(order.objectives),
        envelope=reply.envelope,
        payload=manifest.payload,
        statement=statement,
        signed=reply.signed,
        signed_payload=manifest.payload,
    )
