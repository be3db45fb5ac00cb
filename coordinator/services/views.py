"""What operators see: the record of runs, rounds, updates and clients, as the messages of the Admin service.

Plain functions of a session, which only read. A number that is not known is NaN.
"""

import io
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session, aliased, contains_eager, defer, selectinload

from coordinator.rounds.hub import Attendance
from coordinator.rounds.outcome import SCORED
from coordinator.rounds.remote import serves
from coordinator.rounds.states import RUN_ENDED
from coordinator.rounds.stepping import result_of
from coordinator.services.finding import must_be_client
from federation.envelope import unseal
from federation.objectives import JOINT
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
_GRADIENTS = (models.PhaseKind.JACOBIAN, models.PhaseKind.RESIDUAL)
_ANSWERED = (models.AssignmentState.FULFILLED, models.AssignmentState.REJECTED)
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
    objectives = attendance.objectives if attendance is not None else client.objectives
    return messages.Client(
        client_id=client.client_id,
        state=ClientState.Value(f"CLIENT_STATE_{client.state}"),
        attending=attendance is not None,
        last_seen=_time(attendance.last_seen if attendance is not None else client.last_seen),
        enrolled=_time(client.enrolled),
        certificate_expires=_time(expires),
        tasks=[
            messages.TaskSummary(task=task, samples=int(count), objectives=objectives.get(task, ()))
            for task, count in sorted(tasks.items())
        ],
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
    """A run, with its last evaluated round; if wanted with its specification, and who serves which objectives."""
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
        objectives=item.objectives,
        serving=_serving(session, item, parsed) if spec else (),
    )


def _serving(session: Session, item: models.Run, spec: RunSpec) -> list[messages.Serving]:
    """The indicator matrix: every active client that offers the run's task, with what it serves, be that nothing."""
    active = session.scalars(
        select(models.Client).where(models.Client.state == models.ClientState.ACTIVE).order_by(models.Client.client_id)
    )
    return [
        messages.Serving(client_id=client.client_id, objectives=serves(client, spec, tuple(item.objectives)))
        for client in active
        if client.tasks.get(spec.task, 0) > 0
    ]


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
        phase=None if phase is None else _phases(session, [phase.round_id])[phase.round_id][phase.number],
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
    """How many of those who were asked to train, or did not get that far, are where, by round."""
    tallies: dict[int, _States] = {round_id: {} for round_id in round_ids}
    states = (
        select(models.Phase.round_id, models.Assignment.state, func.count())
        .join(models.Phase)
        .where(models.Phase.round_id.in_(round_ids), models.Phase.kind == models.PhaseKind.TRAIN)
        .group_by(models.Phase.round_id, models.Assignment.state)
    )
    for round_id, state, count in session.execute(states):
        tallies[round_id][state] = count
    for round_id, state in _stopped(session, round_ids).values():
        tallies[round_id][state] = tallies[round_id].get(state, 0) + 1
    return tallies


def _stopped(session: Session, round_ids: list[int]) -> dict[tuple[int, str], tuple[int, models.AssignmentState]]:
    """Who failed in a phase before training and was not asked to train: round and client -> round and last state."""
    training, trained = aliased(models.Phase), aliased(models.Assignment)
    rows = (
        select(models.Phase.round_id, models.Assignment.client_id, models.Assignment.state)
        .join(models.Phase)
        .where(
            models.Phase.round_id.in_(round_ids),
            models.Phase.kind.in_(_GRADIENTS),
            models.Assignment.state != models.AssignmentState.FULFILLED,
            ~select(trained.assignment_id)
            .join(training, training.phase_id == trained.phase_id)
            .where(
                training.round_id == models.Phase.round_id,
                training.kind == models.PhaseKind.TRAIN,
                trained.client_id == models.Assignment.client_id,
            )
            .exists(),
        )
        .order_by(models.Phase.number)
    )
    return {(round_id, client): (round_id, state) for round_id, client, state in session.execute(rows)}


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
    parts = _participations(session, round_ids, scores)
    phases = _phases(session, round_ids)
    return [
        messages.ExportRoundsResponse(
            summary=summary,
            participations=parts[item.round_id],
            scores=[
                messages.ClientScores(client_id=client, scores=values)
                for client, values in sorted(scores[item.round_id].items())
            ],
            phases=phases[item.round_id].values(),
            objectives=_objectives(item),
        )
        for item, summary in zip(items, summaries(session, items), strict=True)
    ]


_Scores = dict[int, dict[str, dict[str, float]]]


def _scores(session: Session, round_ids: list[int]) -> _Scores:
    """What every client measured after a round, by round and client."""
    found: _Scores = {round_id: {} for round_id in round_ids}
    row = models.Evaluation
    query = select(row.round_id, row.client_id, row.split, row.loss, row.accuracy, row.objectives)
    for round_id, client, split, loss, accuracy, own in session.execute(query.where(row.round_id.in_(round_ids))):
        scores = found[round_id].setdefault(client, {})
        known = {"loss": loss, "accuracy": accuracy, **own}
        scores |= {f"{split}/{name}": value for name, value in known.items() if value is not None}
    return found


def round_detail(session: Session, blobs: BlobStore, item: models.Round) -> messages.GetRoundResponse:
    """One round with every client's part in it.

    The signature of every update is verified again, so that what is shown as signed is signed in the record.
    """
    one = [item.round_id]
    response = messages.GetRoundResponse(
        run=run(session, item.run),
        summary=summaries(session, [item])[0],
        phases=_phases(session, one)[item.round_id].values(),
        participations=_participations(session, one, _scores(session, one), _keys(session))[item.round_id],
        objectives=_objectives(item),
    )
    if item.step is not None:
        response.step.ParseFromString(item.step)
        _add_cosines(session, blobs, item, response)
    return response


def _objectives(item: models.Round) -> messages.Objectives | None:
    """What a round knew of its objectives; the cosines of one that was left out are NaN."""
    record = item.objectives
    if not record:
        return None
    weights = record.get("weights", {})
    found = messages.Objectives(mode=record.get("mode", ""), notes=record.get("notes", ()))
    for name in record["names"]:
        found.results.add(
            name=name,
            weight=weights.get(name, math.nan),
            loss=record["losses"].get(name, math.nan),
            left_out=record.get("left_out", {}).get(name, ""),
            clients=record["clients"].get(name, 0),
        )
    if record.get("cosines"):
        side = len(record["names"])
        places = [at for at, name in enumerate(record["names"]) if name in weights]
        cosines = np.full((side, side), np.nan)
        cosines[np.ix_(places, places)] = record["cosines"]
        found.cosines.extend(cosines.ravel().tolist())
    return found


def _phases(session: Session, round_ids: list[int]) -> dict[int, dict[int, messages.PhaseProgress]]:
    """How far each phase is, by round and by its number in it."""
    asked: Counter[int] = Counter()
    replied: Counter[int] = Counter()
    here = models.Phase.round_id.in_(round_ids)
    states = (
        select(models.Assignment.phase_id, models.Assignment.state, func.count())
        .join(models.Phase)
        .where(here)
        .group_by(models.Assignment.phase_id, models.Assignment.state)
    )
    for phase_id, state, count in session.execute(states):
        asked[phase_id] += count
        replied[phase_id] += count if state in _ANSWERED else 0
    sizes = (
        select(models.Assignment.phase_id, func.sum(models.Update.payload_bytes))
        .join(models.Assignment, models.Assignment.assignment_id == models.Update.assignment_id)
        .join(models.Phase)
        .where(here)
        .group_by(models.Assignment.phase_id)
    )
    sent = {phase_id: int(total) for phase_id, total in session.execute(sizes)}
    found: dict[int, dict[int, messages.PhaseProgress]] = {round_id: {} for round_id in round_ids}
    query = select(models.Phase, models.Round.number).join(models.Round).where(here).order_by(models.Phase.number)
    for phase, number in session.execute(query):
        found[phase.round_id][phase.number] = messages.PhaseProgress(
            round=number,
            phase=phase.number,
            kind=PhaseKind.Value(f"PHASE_KIND_{phase.kind}"),
            asked=asked[phase.phase_id],
            replied=replied[phase.phase_id],
            deadline=_time(phase.deadline),
            started=_time(phase.started),
            ended=_time(phase.ended),
            bytes_up=sent.get(phase.phase_id, 0),
        )
    return found


def _participations(
    session: Session, round_ids: list[int], scores: _Scores, keys: Mapping[str, Ed25519PublicKey] | None = None
) -> dict[int, list[messages.Participation]]:
    """Every client's part in each round: in its training, or in the phase where it stopped before that."""
    evaluated: dict[tuple[int, str], list[int]] = {}
    answers = (
        select(models.Phase.round_id, models.Assignment.client_id, models.Phase.number)
        .join(models.Phase)
        .where(
            models.Phase.round_id.in_(round_ids),
            models.Phase.kind == models.PhaseKind.EVALUATE,
            models.Assignment.state.in_(_ANSWERED),
        )
    )
    for round_id, client, number in session.execute(answers):
        evaluated.setdefault((round_id, client), []).append(number)
    unread = [] if keys is not None else [defer(models.Update.envelope)]
    assignments = session.scalars(
        select(models.Assignment)
        .join(models.Assignment.phase)
        .where(models.Phase.round_id.in_(round_ids), models.Phase.kind != models.PhaseKind.EVALUATE)
        .order_by(models.Phase.number)
        .options(
            contains_eager(models.Assignment.phase),
            defer(models.Assignment.envelope),
            selectinload(models.Assignment.updates).options(defer(models.Update.receipt), *unread),
        )
    )
    asked: dict[tuple[int, str], list[models.Assignment]] = {}
    for assignment in assignments:
        asked.setdefault((assignment.phase.round_id, assignment.client_id), []).append(assignment)
    found: dict[int, list[messages.Participation]] = {round_id: [] for round_id in round_ids}
    for (round_id, client), own in sorted(asked.items()):
        part = _participation(own, scores[round_id].get(client, {}), keys)
        part.answered.extend(evaluated.get((round_id, client), ()))
        found[round_id].append(part)
    return found


def _participation(
    assignments: Sequence[models.Assignment],
    evaluation: dict[str, float],
    keys: Mapping[str, Ed25519PublicKey] | None = None,
) -> messages.Participation:
    """One client's part, from its assignments in the order of the phases; signatures are verified where there are keys.

    State, update and signature are those of its training. Of a client that was not asked to train they are those of the
    last phase that it was asked in, which the reason names.
    """
    trains = [one for one in assignments if one.phase.kind is models.PhaseKind.TRAIN]
    last = trains[-1] if trains else assignments[-1]
    part = messages.Participation(
        client_id=last.client_id,
        state=AssignmentState.Value(f"ASSIGNMENT_STATE_{last.state}"),
        reason=": ".join(filter(None, (last.reason, last.message))),
        loss_before=next((loss for loss in map(_loss, [*trains, *assignments]) if math.isfinite(loss)), math.nan),
        update_norm=math.nan,
        weight=math.nan,
        coefficient=math.nan,
        cosine=math.nan,
        seconds=math.nan,
        evaluation=evaluation,
        objectives=last.objectives,
        answered=[one.phase.number for one in assignments if one.state in _ANSWERED],
        payload_bytes=sum(update.payload_bytes for one in assignments for update in one.updates),
    )
    if not trains:
        where = f"it got as far as phase {last.phase.number}, {str(last.phase.kind).lower()}"
        part.reason = ": ".join((part.reason or "not asked to train", where))
    update = _update(last)
    if update is None:
        return part
    part.samples = update.samples
    part.seconds = max(0.0, (update.received - last.created).total_seconds())
    part.key_id = "" if keys is None else _verified_key(update, keys)
    part.envelope = update.envelope_digest
    part.update_norm = _known(update.norm)
    part.weight = _known(update.weight)
    part.coefficient = _known(update.coefficient)
    part.cosine = _known(update.cosine)
    return part


def _update(assignment: models.Assignment) -> models.Update | None:
    """The reply that counts; or the last one that was refused."""
    return max(assignment.updates, key=lambda update: (update.accepted, update.received), default=None)


def _loss(assignment: models.Assignment) -> float:
    """The loss of the base model that came with a reply; of several objectives, their mean."""
    update = _update(assignment)
    if update is None or not update.losses:
        return math.nan
    return update.losses.get(JOINT, float(np.mean(list(update.losses.values()))))


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
        select(models.Update.envelope_digest, models.Update.client_id, models.Round.number, models.Update.envelope)
        .join(models.Assignment)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Round.run_id == item.run_id, models.Update.envelope_digest.in_(step.updates))
    )
    owners: dict[str, list[str]] = {}
    for name, client, number, envelope in sent:
        if number != item.number:
            owners[name] = [f"{client}, round {number}"]
            continue
        rows = UpdateManifest.FromString(SignedEnvelope.FromString(envelope).manifest).rows
        owners[name] = [client if row.objective == JOINT else f"{client}/{row.objective}" for row in rows]
    response.gram_clients.extend(owner for name in step.updates for owner in owners.get(name, ["?"]))
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
