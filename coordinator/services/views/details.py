"""One round with every client's part in it, as the messages of the Admin service; see `views`."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session, contains_eager, defer, selectinload

from coordinator.rounds.export import parsed
from coordinator.rounds.runs.disclosure import concealed
from coordinator.rounds.transitions import COUNTS
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.views import overview
from coordinator.services.views.conversion import like
from coordinator.services.views.summaries import ANSWERED, phases_of, rounds_from, summaries
from federation.spec.accounting import SamplePrivacy
from federation.spec.objective_names import JOINT
from federation.spec.sharing import BUFFERS
from federation.v1 import admin_pb2 as messages
from federation.v1 import common_pb2
from federation.v1.common_pb2 import ReplyManifest, StepManifest
from federation.work.evaluate.work import Evaluate
from federation.work.statistics.work import Statistics
from storage import models
from storage.blobs import BlobMissing, BlobStore
from storage.records import ObjectivesRecord

_MAX_GRAM_BYTES = 64 << 20  # 2800 rows


def export_rounds(session: Session, run_id: str, start: int, count: int) -> list[messages.ExportRoundsResponse]:
    """Rounds `start` to `start + count - 1` of a run with every client's part; signatures are not verified."""
    return rounds_with_parts(session, rounds_from(session, run_id, start, count))


def rounds_with_parts(session: Session, items: Sequence[models.Round]) -> list[messages.ExportRoundsResponse]:
    """Rounds of one run with every client's part; signatures are not verified."""
    scores = _scores(session, [item.round_id for item in items if not concealed(item.run)])
    responses = [messages.ExportRoundsResponse(**fields) for fields in _fields(session, items, scores)]
    for item, response in zip(items, responses, strict=True):
        for client, values in sorted(scores.get(item.round_id, {}).items()):
            response.scores.add(client_id=client, scores=values)
        if item.result is not None:
            response.document = item.document or b""
    return responses


_Scores = dict[int, dict[str, dict[str, float]]]


def _scores(session: Session, round_ids: list[int]) -> _Scores:
    """The measurements of every client after a round, by round and client."""
    by_round: _Scores = {round_id: {} for round_id in round_ids}
    row = models.Evaluation
    query = select(row.round_id, row.client_id, row.split, row.loss, row.accuracy, row.samples, row.others)
    measured = session.execute(query.where(row.round_id.in_(round_ids)))
    for round_id, client, split, loss, accuracy, samples, others in measured:
        scores = by_round[round_id].setdefault(client, {})
        values = {"loss": loss, "accuracy": accuracy, "samples": samples, **others}
        scores |= {f"{split}/{name}": value for name, value in values.items() if value is not None}
    return by_round


def round_detail(
    session: Session, blobs: BlobStore, checks: EnvelopeChecks, item: models.Round
) -> messages.GetRoundResponse:
    """One round with every client's part in it; every envelope is verified again."""
    [fields] = _fields(session, [item], _scores(session, [] if concealed(item.run) else [item.round_id]))
    voided = [
        messages.VoidedAttempt(
            attempt=void.attempt,
            reason=void.reason,
            named=[messages.NamedMember(client_id=name, reason=why) for name, why in sorted(void.named.items())],
            paused=void.paused,
        )
        for void in item.voided
    ]
    not_asked = [messages.NotAsked(client_id=name, reason=why) for name, why in sorted(item.not_asked.items())]
    response = messages.GetRoundResponse(
        run=overview.run(session, item.run), voided=voided, not_asked=not_asked, **fields
    )
    checked = checks.of_round(session, item)
    parts = {part.client_id: part for part in response.participations}
    for envelope in checked.envelopes:
        if (part := parts.get(envelope.client_id)) is None:
            continue  # it was asked for no update
        part.envelopes.append(envelope.check)
        if envelope.check.verified and envelope.check.kind == "reply" and envelope.reply == part.envelope:
            part.key_id = envelope.check.key_id
    if item.step is not None and checked.step is not None:
        response.step_check.CopyFrom(checked.step)
        if (step := parsed(item.step)) is not None and not concealed(item.run):
            response.step.CopyFrom(step)
        if response.step_check.verified and not concealed(item.run) and item.combined is None:
            _add_cosines(session, blobs, item, response)
    if item.result is not None and (result := parsed(item.result)) is not None:
        response.result.CopyFrom(result)
        response.document = item.document or b""
    return response


def _fields(session: Session, items: Sequence[models.Round], scores: _Scores) -> Iterator[dict[str, Any]]:
    """The fields that the messages of each round have in common."""
    round_ids = [item.round_id for item in items]
    parts, phases = _participations(session, round_ids, scores), phases_of(session, round_ids)
    for item, summary in zip(items, summaries(session, items), strict=True):
        if concealed(item.run):
            for part in parts[item.round_id]:
                for name in ("samples", "loss_before"):
                    part.ClearField(name)
                part.loss_before = math.nan
        yield {
            "summary": summary,
            "participations": parts[item.round_id],
            "phases": phases[item.round_id].values(),
            "objectives": _objectives(item),
        }


def _objectives(item: models.Round) -> messages.Objectives | None:
    """The objectives of a round on record; the cosines of one that was left out are NaN."""
    record = ObjectivesRecord.decode(item.objectives)
    if record is None:
        return None
    message = messages.Objectives(mode=record.mode, notes=record.notes)
    for name in record.names:
        message.results.add(
            name=name,
            weight=record.weights.get(name, math.nan),
            loss=record.losses.get(name, math.nan),
            left_out=record.left_out.get(name, ""),
            clients=record.clients.get(name, 0),
        )
    if record.cosines:
        side = len(record.names)
        positions = [position for position, name in enumerate(record.names) if name in record.weights]
        cosines = np.full((side, side), np.nan)
        cosines[np.ix_(positions, positions)] = record.cosines
        message.cosines.extend(cosines.ravel().tolist())
    return message


def _participations(session: Session, round_ids: list[int], scores: _Scores) -> dict[int, list[messages.Participation]]:
    """Every client's part in each round: in its training or measurement, or in the phase where it stopped before."""
    evaluated: dict[tuple[int, str], list[int]] = {}
    answers = (
        select(models.Phase.round_id, models.Assignment.client_id, models.Phase.number)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Phase.round_id.in_(round_ids), ~COUNTS, models.Assignment.state.in_(ANSWERED))
    )
    for round_id, client, number in session.execute(answers):
        evaluated.setdefault((round_id, client), []).append(number)
    assignments = session.scalars(
        select(models.Assignment)
        .join(models.Assignment.phase)
        .join(models.Phase.round)
        .where(models.Phase.round_id.in_(round_ids), COUNTS)
        .order_by(models.Phase.number)
        .options(
            contains_eager(models.Assignment.phase),
            defer(models.Assignment.envelope),
            selectinload(models.Assignment.replies).options(defer(models.Reply.receipt), defer(models.Reply.envelope)),
        )
    )
    asked: dict[tuple[int, str], list[models.Assignment]] = {}
    final: dict[int, models.Phase] = {}
    for assignment in assignments:
        asked.setdefault((assignment.phase.round_id, assignment.client_id), []).append(assignment)
        final[assignment.phase.round_id] = assignment.phase
    parts: dict[int, list[messages.Participation]] = {round_id: [] for round_id in round_ids}
    for (round_id, client), assignments_of_client in sorted(asked.items()):
        part = _participation(assignments_of_client, final[round_id], scores.get(round_id, {}).get(client, {}))
        part.answered.extend(evaluated.get((round_id, client), ()))
        parts[round_id].append(part)
    return parts


def _participation(
    assignments: Sequence[models.Assignment], final: models.Phase, evaluation: dict[str, float]
) -> messages.Participation:
    """One client's part, from its assignments in the order of the phases.

    The state is that of the last phase in which the client was asked; the reason names this phase if the round went on
    to another phase, `final`, without the client. The reply is the one that entered the step, else that phase's.
    """
    last = assignments[-1]
    weighed = (item for item in assignments if any(reply.weight is not None for reply in item.replies))
    source = next(weighed, last)
    reply = _reply(source)
    reason = ": ".join(filter(None, (last.reason, last.message)))
    named = {name: why for void in final.round.voided for name, why in void.named.items()}
    if last.phase.attempt < final.attempt:
        why = named.get(last.client_id)
        reason = f"named as a cheater: {why}" if why else reason or "not asked again"
        reason += f"; its last attempt was {last.phase.attempt}"
    elif last.phase is not final and last.phase.kind not in (Evaluate.name, Statistics.name):
        where = f"it got as far as phase {last.phase.number}, {last.phase.kind}"
        reason = f"{reason or f'not asked to {final.kind}'}: {where}"
    return like(
        messages.Participation,
        reply,
        client_id=last.client_id,
        privacy=next(filter(None, map(_privacy, reversed(assignments))), None),
        unrepeatable=any(reply.unrepeatable for assignment in assignments for reply in assignment.replies),
        state=last.state,
        reason=reason,
        loss_before=next((loss for loss in map(_loss, reversed(assignments)) if math.isfinite(loss)), math.nan),
        envelope=reply.envelope_digest if reply else "",
        update_norm=_number(reply, "norm"),
        weight=_number(reply, "weight"),
        coefficient=_number(reply, "coefficient"),
        cosine=_number(reply, "cosine"),
        seconds=max(0.0, (reply.received - source.created).total_seconds()) if reply else math.nan,
        evaluation=evaluation,
        objectives=last.objectives,
        answered=[assignment.phase.number for assignment in assignments if assignment.state in ANSWERED],
        payload_bytes=sum(reply.payload_bytes for assignment in assignments for reply in assignment.replies),
    )


def _privacy(assignment: models.Assignment) -> common_pb2.SamplePrivacy | None:
    """The privacy statement of the reply to an assignment; None without noise."""
    reply = _reply(assignment)
    stated = None if reply is None else SamplePrivacy.decode(reply.privacy)
    return None if stated is None else common_pb2.SamplePrivacy(**asdict(stated))


def _reply(assignment: models.Assignment) -> models.Reply | None:
    """The reply that counts; or the last one that was refused."""
    return max(assignment.replies, key=lambda reply: (reply.accepted, reply.received), default=None)


def _loss(assignment: models.Assignment) -> float:
    """The loss of the base model that came with a reply; of several objectives, their mean."""
    reply = _reply(assignment)
    if reply is None or not reply.losses:
        return math.nan
    return reply.losses.get(JOINT, float(np.mean(list(reply.losses.values()))))


def _add_cosines(session: Session, blobs: BlobStore, item: models.Round, response: messages.GetRoundResponse) -> None:
    """Adds the cosines of K, and the clients of its rows, which the signed step names in the order of the rows."""
    step = StepManifest.FromString(response.step.manifest)
    try:
        stored = blobs.read(step.gram, _MAX_GRAM_BYTES)
    except (BlobMissing, ValueError):
        return  # an old round, whose blobs are not kept any more; or damaged, or too large to be shown
    gram = np.load(io.BytesIO(stored), allow_pickle=False)
    sent = session.execute(
        select(models.Reply.envelope_digest, models.Reply.client_id, models.Round.number, models.Reply.envelope)
        .join(models.Assignment)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == item.run_id, models.Reply.envelope_digest.in_(step.replies))
    )
    owners: dict[str, list[str]] = {}
    for name, client, number, envelope in sent:
        if number != item.number:
            owners[name] = [f"{client}, round {number}"]
            continue
        owners[name] = [client if row == JOINT else f"{client}/{row}" for row in _rows(envelope)]
    named = [owner for name in step.replies for owner in owners.get(name, ["?"])]
    compared = step.gram_rows or range(len(named))
    response.gram_clients.extend(named[row] for row in compared)
    lengths = np.sqrt(np.diag(gram))
    lengths = np.outer(lengths, lengths)
    cosines = np.divide(gram, lengths, out=np.zeros_like(gram), where=lengths > 0)
    response.cosines.extend(np.clip(cosines, -1.0, 1.0).ravel().tolist())


def _rows(envelope: bytes) -> list[str]:
    """The rows of a recorded reply that are in K; none if the bytes are not a reply."""
    parsed_envelope = parsed(envelope)
    try:
        rows = ReplyManifest.FromString(parsed_envelope.manifest if parsed_envelope else b"").rows
        return [row.name for row in rows if row.name != BUFFERS]
    except DecodeError:
        return []


def _number(reply: models.Reply | None, column: str) -> float:
    value: float | None = getattr(reply, column, None)
    return math.nan if value is None else value
