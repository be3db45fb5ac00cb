"""What operators see: the record of runs, rounds, updates and clients, as the messages of the Admin service.

Plain functions of a session, which only read. A number that is not known is NaN.
"""

import io
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session, contains_eager, defer, selectinload

from coordinator.rounds.hub import Attendance
from coordinator.rounds.outcome import SCORED
from coordinator.rounds.states import RUN_ENDED
from coordinator.rounds.stepping import result_of
from coordinator.services.finding import must_be_client
from federation.envelope import unseal
from federation.refusals import Refusal
from federation.runs import RunSpec
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import (
    AssignmentState,
    ClientState,
    PhaseKind,
    RoundState,
    RunState,
    SignedEnvelope,
    StepManifest,
    UpdateManifest,
)
from storage import models
from storage.blobs import BlobMissing, BlobStore

ENDED_ROUNDS = (models.RoundState.COMPLETED, models.RoundState.SKIPPED)
_MAX_GRAM_BYTES = 64 << 20  # 2800 rows


# --- clients


def clients(
    session: Session, attending: Mapping[str, Attendance], client_id: str | None = None
) -> list[messages.Client]:
    """The clients by name; or the one that is named.

    Raises:
        Refusal: `client-unknown`: there is none of that name.
    """
    query = select(models.Client).order_by(models.Client.client_id)
    if client_id is not None:
        must_be_client(session, client_id)
        query = query.where(models.Client.client_id == client_id)
    expiry = dict(
        session.execute(
            select(models.Certificate.client_id, func.max(models.Certificate.not_after))
            .where(models.Certificate.client_id.is_not(None), models.Certificate.revoked.is_(None))
            .group_by(models.Certificate.client_id)
        ).all()
    )
    return [
        _client(client, attending.get(client.client_id), expiry.get(client.client_id))
        for client in session.scalars(query)
    ]


def _client(client: models.Client, attendance: Attendance | None, expires: datetime | None) -> messages.Client:
    tasks = attendance.tasks if attendance is not None else client.tasks
    return messages.Client(
        client_id=client.client_id,
        state=ClientState.Value(f"CLIENT_STATE_{client.state}"),
        attending=attendance is not None,
        last_seen=_time(attendance.last_seen if attendance is not None else client.last_seen),
        enrolled=_time(client.enrolled),
        certificate_expires=_time(expires),
        tasks=[messages.TaskSummary(task=task, samples=int(count)) for task, count in sorted(tasks.items())],
        device=client.device,
        software=client.software,
        key_id=client.key_id,
    )


# --- runs


def runs(session: Session) -> list[messages.Run]:
    """Every run, newest first."""
    return [run(session, item) for item in session.scalars(select(models.Run).order_by(models.Run.created.desc()))]


def active_runs(session: Session) -> list[str]:
    """The ids of the runs that have not ended."""
    return list(session.scalars(select(models.Run.run_id).where(models.Run.state.not_in(list(RUN_ENDED)))))


def run(session: Session, item: models.Run, *, spec: bool = False) -> messages.Run:
    """A run, with its last evaluated round; with its specification if wanted."""
    parsed = RunSpec.parse(item.spec)
    done = session.scalar(
        select(func.count()).where(models.Round.run_id == item.run_id, models.Round.state.in_(ENDED_ROUNDS))
    )
    evaluated = session.scalar(
        select(models.Round)
        .where(
            models.Round.run_id == item.run_id,
            select(models.Evaluation).where(models.Evaluation.round_id == models.Round.round_id).exists(),
        )
        .order_by(models.Round.number.desc())
        .limit(1)
    )
    model = session.get_one(models.Model, item.model)
    return messages.Run(
        run_id=item.run_id,
        name=item.name,
        state=RunState.Value(f"RUN_STATE_{item.state}"),
        reason=item.reason,
        algorithm=parsed.algorithm.name,
        task=parsed.task,
        rounds_done=done or 0,
        rounds_total=parsed.rounds,
        created=_time(item.created),
        started=_time(item.started),
        ended=_time(item.ended),
        model=result_of(item.model, item.state_data),
        parameters=model.parameters,
        latest=None if evaluated is None else summaries(session, [evaluated])[0],
        spec=item.spec.decode() if spec else "",
    )


@dataclass(frozen=True)
class Progress:
    """What happened in a run.

    Attributes:
        run: as it is now.
        ended: the rounds that ended since, in order.
        phase: the phase in conversation, if there is one.
        next_round: the first round that has not ended: where the next look begins.
        over: whether the run has ended, so that nothing more will happen.
    """

    run: messages.Run
    ended: list[messages.RoundSummary]
    phase: messages.PhaseProgress | None
    next_round: int
    over: bool


def progress(session: Session, run_id: str, since: int) -> Progress:
    """What happened in a run since round `since` was the first one that had not ended."""
    item = session.get_one(models.Run, run_id)
    ended = session.scalars(
        select(models.Round)
        .where(models.Round.run_id == run_id, models.Round.number >= since, models.Round.state.in_(ENDED_ROUNDS))
        .order_by(models.Round.number)
    ).all()
    phase = session.scalar(
        select(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == run_id, models.Phase.state == models.PhaseState.OPEN)
        .order_by(models.Phase.phase_id.desc())
        .limit(1)
    )
    return Progress(
        run=run(session, item),
        ended=summaries(session, ended),
        phase=None if phase is None else _phase(phase),
        next_round=ended[-1].number + 1 if ended else since,
        over=item.state in RUN_ENDED,
    )


def ended_rounds(session: Session, run_id: str) -> int:
    """The first round that has not ended."""
    last = session.scalar(
        select(func.max(models.Round.number)).where(models.Round.run_id == run_id, models.Round.state.in_(ENDED_ROUNDS))
    )
    return 0 if last is None else last + 1


# --- rounds


def rounds(session: Session, run_id: str) -> list[messages.RoundSummary]:
    """Every round of a run, in order."""
    found = session.scalars(
        select(models.Round).where(models.Round.run_id == run_id).order_by(models.Round.number)
    ).all()
    return summaries(session, found)


def summaries(session: Session, items: Collection[models.Round]) -> list[messages.RoundSummary]:
    """Rounds in numbers; as few queries for many rounds as for one."""
    round_ids = [item.round_id for item in items]
    tallies = _tallies(session, round_ids)
    worst = _worst_clients(session, round_ids)
    return [_summary(item, tallies[item.round_id], worst.get(item.round_id, "")) for item in items]


_States = dict[models.AssignmentState, int]


def _tallies(session: Session, round_ids: list[int]) -> dict[int, _States]:
    """How many of those who were asked to train are where, by round."""
    tallies: dict[int, _States] = {round_id: {} for round_id in round_ids}
    states = (
        select(models.Phase.round_id, models.Assignment.state, func.count())
        .join(models.Phase)
        .where(models.Phase.round_id.in_(round_ids), models.Phase.kind == models.PhaseKind.TRAIN)
        .group_by(models.Phase.round_id, models.Assignment.state)
    )
    for round_id, state, count in session.execute(states):
        tallies[round_id][state] = count
    return tallies


def _worst_clients(session: Session, round_ids: list[int]) -> dict[int, str]:
    """Whose accuracy was the lowest, by round; or whose loss the highest, where nobody has an accuracy."""
    row = models.Evaluation
    found: dict[int, str] = {}
    for column, extreme in ((row.accuracy, func.min), (row.loss, func.max)):
        missing = [round_id for round_id in round_ids if round_id not in found]
        if not missing:
            break
        worst = (
            select(row.round_id, row.split, extreme(column).label("value"))
            .where(row.round_id.in_(missing))
            .group_by(row.round_id, row.split)
            .subquery()
        )
        same = and_(row.round_id == worst.c.round_id, row.split == worst.c.split, column == worst.c.value)
        clients = {
            (round_id, split): client
            for round_id, split, client in session.execute(
                select(row.round_id, row.split, func.min(row.client_id))
                .join(worst, same)
                .group_by(row.round_id, row.split)
            )
        }
        for round_id in missing:
            measured = [clients[round_id, split] for split in SCORED if (round_id, split) in clients]
            if measured:
                found[round_id] = measured[0]
    return found


def _summary(item: models.Round, states: _States, worst_client: str) -> messages.RoundSummary:
    answered = (models.AssignmentState.FULFILLED, models.AssignmentState.REJECTED, models.AssignmentState.OPEN)
    ended = item.ended or item.stepped
    return messages.RoundSummary(
        round=item.number,
        state=RoundState.Value(f"ROUND_STATE_{item.state}"),
        reason=item.reason,
        asked=sum(states.values()),
        accepted=states.get(models.AssignmentState.FULFILLED, 0),
        rejected=states.get(models.AssignmentState.REJECTED, 0),
        missing=sum(count for state, count in states.items() if state not in answered),
        metrics=item.metrics,
        seconds=(ended - item.started).total_seconds() if ended else math.nan,
        started=_time(item.started),
        base_model=item.base_model,
        result_model=item.result_model or "",
        worst_client=worst_client,
    )


def export_rounds(session: Session, run_id: str, start: int, count: int) -> list[messages.ExportRoundsResponse]:
    """Rounds `start` to `start + count - 1` of a run with every client's part; signatures are not verified."""
    items = session.scalars(
        select(models.Round)
        .where(models.Round.run_id == run_id, models.Round.number >= start, models.Round.number < start + count)
        .order_by(models.Round.number)
    ).all()
    round_ids = [item.round_id for item in items]
    scores = _scores(session, round_ids)
    assignments = session.scalars(
        select(models.Assignment)
        .join(models.Assignment.phase)
        .where(models.Phase.round_id.in_(round_ids), models.Phase.kind == models.PhaseKind.TRAIN)
        .order_by(models.Phase.phase_id, models.Assignment.client_id)
        .options(
            contains_eager(models.Assignment.phase),
            defer(models.Assignment.envelope),
            selectinload(models.Assignment.updates).options(
                defer(models.Update.envelope), defer(models.Update.receipt)
            ),
        )
    )
    parts: dict[int, list[messages.Participation]] = {round_id: [] for round_id in round_ids}
    for assignment in assignments:
        round_id = assignment.phase.round_id
        parts[round_id].append(_participation(assignment, scores[round_id].get(assignment.client_id, {})))
    return [
        messages.ExportRoundsResponse(
            summary=summary,
            participations=parts[item.round_id],
            scores=[
                messages.ClientScores(client_id=client, scores=values)
                for client, values in sorted(scores[item.round_id].items())
            ],
        )
        for item, summary in zip(items, summaries(session, items), strict=True)
    ]


def _scores(session: Session, round_ids: list[int]) -> dict[int, dict[str, dict[str, float]]]:
    """What every client measured after a round, by round and client."""
    found: dict[int, dict[str, dict[str, float]]] = {round_id: {} for round_id in round_ids}
    row = models.Evaluation
    query = select(row.round_id, row.client_id, row.split, row.loss, row.accuracy).where(row.round_id.in_(round_ids))
    for round_id, client, split, loss, accuracy in session.execute(query):
        scores = found[round_id].setdefault(client, {})
        known = {f"{split}/loss": loss, f"{split}/accuracy": accuracy}
        scores |= {name: value for name, value in known.items() if value is not None}
    return found


def round_detail(session: Session, blobs: BlobStore, item: models.Round) -> messages.GetRoundResponse:
    """One round with every client's part in it.

    The signature of every update is verified again, so that what is shown as signed is signed in the record.
    """
    response = messages.GetRoundResponse(run=run(session, item.run), summary=summaries(session, [item])[0])
    response.phases.extend(_phase(phase) for phase in item.phases)
    scores = _scores(session, [item.round_id])[item.round_id]
    keys = _keys(session)
    for phase in item.phases:
        if phase.kind is models.PhaseKind.TRAIN:
            response.participations.extend(
                _participation(assignment, scores.get(assignment.client_id, {}), keys)
                for assignment in phase.assignments
            )
    if item.step is not None:
        response.step.ParseFromString(item.step)
        _add_cosines(session, blobs, item, response)
    return response


def _phase(phase: models.Phase) -> messages.PhaseProgress:
    return messages.PhaseProgress(
        round=phase.round.number,
        phase=phase.number,
        kind=PhaseKind.Value(f"PHASE_KIND_{phase.kind}"),
        asked=len(phase.assignments),
        replied=sum(
            assignment.state in (models.AssignmentState.FULFILLED, models.AssignmentState.REJECTED)
            for assignment in phase.assignments
        ),
        deadline=_time(phase.deadline),
    )


def _participation(
    assignment: models.Assignment,
    evaluation: dict[str, float],
    keys: Mapping[str, Ed25519PublicKey] | None = None,
) -> messages.Participation:
    """One client's part; its signature is verified where there are keys."""
    # The one that counts; or the last one that was refused.
    update = max(assignment.updates, key=lambda update: (update.accepted, update.received), default=None)
    part = messages.Participation(
        client_id=assignment.client_id,
        state=AssignmentState.Value(f"ASSIGNMENT_STATE_{assignment.state}"),
        reason=": ".join(filter(None, (assignment.reason, assignment.message))),
        loss_before=math.nan,
        update_norm=math.nan,
        weight=math.nan,
        coefficient=math.nan,
        cosine=math.nan,
        seconds=math.nan,
        evaluation=evaluation,
    )
    if update is None:
        return part
    part.samples = update.samples
    part.loss_before = float(np.mean(list(update.losses.values()))) if update.losses else math.nan
    part.update_norm = _known(update.norm)
    part.weight = _known(update.weight)
    part.coefficient = _known(update.coefficient)
    part.cosine = _known(update.cosine)
    part.envelope = update.envelope_digest
    part.key_id = "" if keys is None else _verified_key(update, keys)
    part.payload_bytes = update.payload_bytes
    part.seconds = (update.received - assignment.created).total_seconds()
    return part


def _keys(session: Session) -> dict[str, Ed25519PublicKey]:
    """Every client's signing key by its id."""
    rows = session.execute(select(models.Client.key_id, models.Client.signing_key))
    return {key_id: Ed25519PublicKey.from_public_bytes(key) for key_id, key in rows}


def _verified_key(update: models.Update, keys: Mapping[str, Ed25519PublicKey]) -> str:
    """The id of the key whose signature holds over the recorded bytes; empty if none does."""
    envelope = SignedEnvelope.FromString(update.envelope)
    try:
        manifest = unseal(envelope, UpdateManifest, lambda key_id: keys.get(key_id.hex()))
    except Refusal:
        return ""
    return envelope.key_id.hex() if manifest.client_id == update.client_id else ""


def _add_cosines(session: Session, blobs: BlobStore, item: models.Round, response: messages.GetRoundResponse) -> None:
    """The cosines of K, and whose rows they are: the signed step says so, in the order of the rows."""
    step = StepManifest.FromString(response.step.manifest)
    try:
        stored = blobs.read(step.gram, _MAX_GRAM_BYTES)
    except BlobMissing:
        return  # an old round, whose blobs are not kept any more
    gram = np.load(io.BytesIO(stored), allow_pickle=False)
    sent = session.execute(
        select(models.Update.envelope_digest, models.Update.client_id, models.Round.number)
        .join(models.Assignment)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == item.run_id, models.Update.envelope_digest.in_(step.updates))
    )
    owners = {name: client if number == item.number else f"{client}, round {number}" for name, client, number in sent}
    per_client = len(gram) // max(len(step.updates), 1)
    response.gram_clients.extend(owners.get(name, "?") for name in step.updates for _ in range(per_client))
    lengths = np.sqrt(np.diag(gram))
    lengths = np.outer(lengths, lengths)
    cosines = np.divide(gram, lengths, out=np.zeros_like(gram), where=lengths > 0)
    response.cosines.extend(np.clip(cosines, -1.0, 1.0).ravel().tolist())


# --- updates


def updates(
    session: Session, run_id: str, number: int | None = None, client_id: str | None = None
) -> Iterable[messages.Update]:
    """The updates of a run as they were received, in order of arrival, refused ones included.

    Raises:
        Refusal: `client-unknown`.
    """
    query = (
        select(models.Update, models.Round.number, models.Phase.number)
        .join(models.Assignment, models.Assignment.assignment_id == models.Update.assignment_id)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == run_id)
        .order_by(models.Update.update_id)
    )
    if number is not None:
        query = query.where(models.Round.number == number)
    if client_id:
        must_be_client(session, client_id)
        query = query.where(models.Update.client_id == client_id)
    for update, round_number, phase_number in session.execute(query):
        yield messages.Update(
            round=round_number,
            phase=phase_number,
            client_id=update.client_id,
            assignment_id=update.assignment_id,
            accepted=update.accepted,
            reason=update.reason,
            payload=update.payload,
            payload_bytes=update.payload_bytes,
            envelope_digest=update.envelope_digest,
            received=_time(update.received),
            envelope=SignedEnvelope.FromString(update.envelope),
        )


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _time(value: datetime | None) -> Timestamp | None:
    if value is None:
        return None
    timestamp = Timestamp()
    timestamp.FromDatetime(value)
    return timestamp
