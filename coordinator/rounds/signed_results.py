"""The results of a round: the signed step with each client's share, and the scores of the model after it."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

import numpy as np
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import Fleet, RevokedMeanwhile
from coordinator.rounds.manifest import result_manifest, step_manifest, weights
from coordinator.rounds.replies import signed_columns
from coordinator.rounds.replies.revoked import left_out, revoked_clients
from coordinator.rounds.runs.client_noise import noisy_steps
from coordinator.rounds.runs.private import record_named
from coordinator.rounds.step import Stepped
from coordinator.rounds.transitions import move_round
from federation.aggregation.direction import Direction
from federation.aggregation.metrics.run_metrics import RunMetrics, StepFacts
from federation.aggregation.phases import Replies, Step
from federation.record import log_entries
from federation.statistics.result import StatisticsResult
from federation.trust.envelope import envelope_digest
from storage import audit
from storage.models import Assignment, Input, Model, Phase, Reply, Round, note_model
from storage.records import ObjectivesRecord, memory_digest
from storage.states import AssignmentState, RoundState

log = logging.getLogger(__name__)

_ANSWERED = (AssignmentState.FULFILLED, AssignmentState.REFUSED)


@dataclass(frozen=True)
class Share:
    """One client's part in a step, over all its rows; NaN where it is not known."""

    norm: float  # the length of its update (of the sum of its rows)
    weight: float  # lambda
    coefficient: float  # c; NaN where the direction is made coordinate by coordinate
    cosine: float  # between its update and the direction; 0 where either has no length


def shares(step: Step, direction: Direction) -> dict[str, Share]:
    """Each client's share in the step, by its name. If the step is combined already, only the weights are known."""
    if step.combined is not None:
        weighed = zip(step.replies, step.combination.weights.tolist(), strict=True)  # no mutant: a weight for each
        return {reply.client_id: Share(math.nan, weight, math.nan, math.nan) for reply, weight in weighed}
    answer = step.combination
    squares, gram = direction.squares, None if step.gram_rows else step.gram
    coefficients = np.full(len(squares), np.nan) if answer.coordinates is not None else answer.coefficients
    by_client = {}
    start = 0
    for reply in step.replies:
        rows = slice(start, start + len(reply.rows))
        start = rows.stop
        # Where K is of some rows, each client sent one: `Rule.gram_rows`.
        norm = float(np.sqrt(max(float((squares[rows] if gram is None else gram[rows, rows]).sum()), 0.0)))
        length = norm * direction.norm
        by_client[reply.client_id] = Share(
            norm=norm,
            weight=float(answer.weights[rows].sum()),
            coefficient=float(coefficients[rows].sum()),
            cosine=float(direction.products[rows].sum()) / length if length > 0 else 0.0,
        )
    return by_client


def objectives(step: Step, names: tuple[str, ...]) -> ObjectivesRecord | None:
    """The record of a round of a run with several objectives, which have these names."""
    if len(names) < 2:
        return None
    claims: dict[str, dict[str, float]] = {name: {} for name in names}
    for reply in (*step.consulted, *step.replies):
        for name in names:
            if name in reply.objectives and name in reply.losses:
                claims[name].setdefault(reply.client_id, reply.losses[name])
    counts = {name: sum(name in reply.objectives for reply in step.replies) for name in names}
    with np.errstate(over="ignore"):  # claims, of any size
        losses = _finite({name: float(np.mean(list(values.values()))) for name, values in claims.items() if values})
    record = ObjectivesRecord(names=names, clients=counts, losses=losses)
    decided = step.combination.objectives
    if decided is None:
        return record
    cosines = None
    if decided.gram is not None:
        lengths = np.sqrt(np.maximum(np.diag(decided.gram), 0.0))
        scale = np.outer(lengths, lengths)
        products = np.divide(decided.gram, scale, out=np.zeros_like(decided.gram), where=scale > 0)
        cosines = np.clip(products, -1.0, 1.0).tolist()
    excluded, notes = dict(decided.left_out), decided.notes
    return replace(record, weights=weights(step), mode=decided.mode, left_out=excluded, notes=notes, cosines=cosines)


def record_step(
    fleet: Fleet,
    metrics: RunMetrics,
    current: Round,
    step: Step,
    phases: int,
    stepped: Stepped,
    completion: Callable[[Session, Round], object] | None = None,
) -> None:
    """Signs and records a step: one transaction for the round, the run and each update's share.

    `completion` completes the round in the same transaction; without it, the round goes on with its evaluation.

    Raises:
        Held: the run is not RUNNING.
        RevokedMeanwhile: a member whose reply entered the step was revoked.
    """
    run, context = fleet.run, fleet.context
    now = context.clock()
    numbers = metrics.of_step(_facts(fleet, current, step, stepped)).numbers
    sizes = {model: context.blobs.stat(model).size for model in {stepped.model, stepped.result}}
    with context.database.begin() as session:
        row = run.running(session)
        if revoked_clients(session) & {part.client_id for part in (*step.replies, *step.consulted, *step.history)}:
            raise RevokedMeanwhile
        if not fleet.conceals:
            _record_shares(session, step, stepped.direction)
        for model in sorted(sizes):
            note_model(session, model, size=sizes[model], parameters=run.parameters, created=now)
        round_ = session.get_one(Round, current.round_id)
        round_.deployed_model, round_.evaluation_phase = stepped.result, phases
        record = objectives(step, run.objectives)
        round_.objectives = record.encode() if record and not fleet.conceals else {}
        round_.metrics = numbers
        round_.named = dict(step.named)
        record_named(session, current, step.named, now)
        gone = left_out(session, current.round_id)
        before = memory_digest(row.state_data)
        manifest = step_manifest(run, context.federation_id, current, step, stepped, state_before=before, revoked=gone)
        manifest.created.FromDatetime(now)
        for name, value in signed_columns.of_step(manifest).items():
            setattr(round_, name, value)
        envelope = context.sign(manifest)
        round_.step = envelope.SerializeToString()
        audit.record(
            session,
            at=now,
            actor="coordinator",
            action=log_entries.STEPPED,
            subject=f"{run.run_id}/{current.number}",
            detail=f"model {stepped.model}",
            digest=envelope_digest(envelope),
        )
        move_round(round_, RoundState.STEPPED, now, "stationary" if stepped.stationary else "")
        row.model = stepped.model
        row.state_data = round_.state_after = stepped.memory.encode()
        if completion is not None:
            completion(session, round_)
    log.info("run %s round %d: stepped to %s", run.run_id, current.number, stepped.model)


def record_result(
    session: Session, fleet: Fleet, round_: Round, found: StatisticsResult, replies: Replies, now: datetime
) -> None:
    """Signs and records the result of a round that describes data."""
    manifest = result_manifest(fleet.run, fleet.context.federation_id, round_, found, replies)
    manifest.created.FromDatetime(now)
    envelope = fleet.context.sign(manifest)
    round_.result, round_.document = envelope.SerializeToString(), found.document
    audit.record(
        session,
        at=now,
        actor="coordinator",
        action=log_entries.DESCRIBED,
        subject=f"{fleet.run.run_id}/{round_.number}",
        digest=envelope_digest(envelope),
    )


def _record_shares(session: Session, step: Step, direction: Direction) -> None:
    """Records each client's share with the reply that the step was made of; there may be replies to other phases."""
    parts, envelopes = shares(step, direction), [reply.envelope for reply in step.replies]
    for reply in session.scalars(select(Reply).where(Reply.envelope_digest.in_(envelopes))):
        share = parts[reply.client_id]
        reply.norm, reply.weight = share.norm, share.weight
        reply.coefficient, reply.cosine = share.coefficient, share.cosine


def _facts(fleet: Fleet, current: Round, step: Step, stepped: Stepped) -> StepFacts:
    """The facts from which the metrics of a step follow, as they are signed."""
    stated = select(Reply.privacy).join(Assignment).join(Phase)
    of_attempt = (Phase.round_id == current.round_id, Phase.attempt == current.attempt, Reply.accepted)
    with fleet.context.database.read() as session:
        steps = noisy_steps(session, fleet.run.run_id) + 1 if stepped.noise is not None else 0
        epsilons = [told["epsilon"] for told in session.scalars(stated.where(*of_attempt)) if "epsilon" in told]
    return StepFacts(
        number=current.number,
        steps=steps,
        K=step.gram,
        coefficients=step.combination.coefficients,
        rate=0.0 if stepped.stationary else stepped.rate,
        weights=weights(step),
        replies=step.replies,
        told=(*step.consulted, *step.replies),
        made=step,
        measured=stepped.direction.diagnostics,
        epsilons=epsilons,
        drawn=bool(step.gram_rows),
    )


class Traffic(NamedTuple):
    """The bytes of a round that ends."""

    up: int  # of payloads
    refused: int  # the part of them that was refused
    down: int  # of models


def traffic(session: Session, round_id: int) -> Traffic:
    """The bytes of updates and models of a round that ends, by the record."""
    sent = dict(
        session.execute(
            select(Reply.accepted, func.sum(Reply.payload_bytes))
            .join(Assignment)
            .join(Phase)
            .where(Phase.round_id == round_id)
            .group_by(Reply.accepted)
        ).all()
    )
    answered = (
        select(Assignment.client_id, Assignment.base_model)
        .join(Phase)
        .where(Assignment.state.in_(_ANSWERED))
        .distinct()
    )
    pairs = {(client, model) for client, model in session.execute(answered.where(Phase.round_id == round_id))}
    models = {model for _, model in pairs}
    before = answered.where(Phase.round_id < round_id, Assignment.base_model.in_(models))
    pairs -= {(client, model) for client, model in session.execute(before)}
    sizes = dict(session.execute(select(Model.digest, Model.size).where(Model.digest.in_(models))).all())
    inputs = select(func.sum(Input.size)).join(Assignment).join(Phase)
    further = session.scalar(inputs.where(Phase.round_id == round_id, Assignment.state.in_(_ANSWERED))) or 0
    refused = int(sent.get(False) or 0)
    return Traffic(int(sent.get(True) or 0) + refused, refused, sum(sizes[model] for _, model in pairs) + further)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are finite."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
