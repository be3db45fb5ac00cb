"""Rounds and their phases in numbers, as the messages of the Admin service; see `views`."""

import math
from collections import Counter
from collections.abc import Collection
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from coordinator.rounds.record import SCORED
from federation.v1 import admin_pb2 as messages
from federation.v1.common_pb2 import RoundState
from storage import models

ENDED_ROUNDS = (models.RoundState.COMPLETED, models.RoundState.SKIPPED)
_ANSWERED = (models.AssignmentState.FULFILLED, models.AssignmentState.REJECTED)


def rounds(session: Session, run_id: str, start: int, count: int) -> list[messages.RoundSummary]:
    """The rounds of a run in order: at most `count` of them, from round `start` on."""
    query = select(models.Round).where(models.Round.run_id == run_id, models.Round.number >= start)
    return summaries(session, session.scalars(query.order_by(models.Round.number).limit(count)).all())


def summaries(session: Session, items: Collection[models.Round]) -> list[messages.RoundSummary]:
    """Rounds in numbers; as few queries for many rounds as for one."""
    round_ids = [item.round_id for item in items]
    tallies = _tallies(session, round_ids)
    worst = _worst_clients(session, round_ids)
    return [_summary(item, tallies[item.round_id], worst.get(item.round_id, "")) for item in items]


def ended_rounds(session: Session, run_id: str) -> int:
    """The first round that has not ended."""
    last = session.scalar(
        select(func.max(models.Round.number)).where(models.Round.run_id == run_id, models.Round.state.in_(ENDED_ROUNDS))
    )
    return 0 if last is None else last + 1


_States = dict[models.AssignmentState, int]


def _tallies(session: Session, round_ids: list[int]) -> dict[int, _States]:
    """How many clients are where, by round: in the last phase that the step depends on, or where they failed before."""
    last: dict[tuple[int, str], tuple[int, models.AssignmentState]] = {}
    final: dict[int, int] = {}
    rows = (
        select(models.Phase.round_id, models.Phase.number, models.Assignment.client_id, models.Assignment.state)
        .join(models.Phase)
        .where(models.Phase.round_id.in_(round_ids), models.Phase.decides)
        .order_by(models.Phase.number)
    )
    for round_id, number, client, state in session.execute(rows):
        last[round_id, client] = number, state
        final[round_id] = number
    tallies: dict[int, _States] = {round_id: {} for round_id in round_ids}
    for (round_id, _), (number, state) in last.items():
        if number == final[round_id] or state is not models.AssignmentState.FULFILLED:
            tallies[round_id][state] = tallies[round_id].get(state, 0) + 1
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
        started=timestamp(item.started),
        base_model=item.base_model,
        result_model=item.result_model or "",
        worst_client=worst_client,
    )


def phases_of(session: Session, round_ids: list[int]) -> dict[int, dict[int, messages.PhaseProgress]]:
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
            kind=phase.kind,
            decides=phase.decides,
            asked=asked[phase.phase_id],
            replied=replied[phase.phase_id],
            deadline=timestamp(phase.deadline),
            started=timestamp(phase.started),
            ended=timestamp(phase.ended),
            bytes_up=sent.get(phase.phase_id, 0),
        )
    return found


def timestamp(value: datetime | None) -> Timestamp | None:
    """A time as messages carry it; None stays unset."""
    if value is None:
        return None
    timestamp = Timestamp()
    timestamp.FromDatetime(value)
    return timestamp
