"""Rounds and their phases in numbers, as the messages of the Admin service; see `views`."""

import math
from collections import Counter
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds.runs.disclosure import concealed, parsed_spec, undisclosed
from coordinator.rounds.transitions import COUNTS, EVALUATES, ROUND_ENDED
from coordinator.services.views.conversion import like
from federation.record.metric_definitions import SCORED
from federation.v1 import admin_pb2 as messages
from federation.work.evaluate.work import Evaluate
from federation.work.statistics.work import Statistics
from storage import models
from storage.states import AssignmentState

ANSWERED = (AssignmentState.FULFILLED, AssignmentState.REFUSED)


def rounds_from(session: Session, run_id: str, start: int, count: int | None = None) -> Sequence[models.Round]:
    """The rounds of a run in order: at most `count` of them, from round `start` on."""
    query = select(models.Round).where(models.Round.run_id == run_id, models.Round.number >= start)
    return session.scalars(query.order_by(models.Round.number).limit(count)).all()


def summaries(session: Session, items: Sequence[models.Round]) -> list[messages.RoundSummary]:
    """Rounds in numbers; as few queries for many rounds as for one."""
    round_ids = [item.round_id for item in items]
    worst = _worst_clients(session, round_ids)
    rounds = []
    for item, states in zip(items, _tallies(session, round_ids), strict=True):
        ended = item.ended or item.stepped
        present = (*ANSWERED, AssignmentState.OPEN)
        summary = like(
            messages.RoundSummary,
            item,
            round=item.number,
            asked=states.total(),
            accepted=states[AssignmentState.FULFILLED],
            refused=states[AssignmentState.REFUSED],
            missing=states.total() - sum(states[state] for state in present),
            seconds=(ended - item.started).total_seconds() if ended else math.nan,
            worst_client=worst.get(item.round_id, ""),
            undisclosed=undisclosed(
                parsed_spec(item.run.spec),
                item.metrics,
                stepped=item.result_model is not None,
                conceals=concealed(item.run),
            ),
        )
        rounds.append(summary)
    return rounds


def ended_rounds(session: Session, run_id: str) -> int:
    """The first round that has not ended."""
    last = session.scalar(
        select(func.max(models.Round.number)).where(models.Round.run_id == run_id, models.Round.state.in_(ROUND_ENDED))
    )
    return 0 if last is None else last + 1


def _tallies(session: Session, round_ids: list[int]) -> list[Counter[AssignmentState]]:
    """The clients of each round by state: in the last phase that its end depends on, or where they failed before."""
    last: dict[tuple[int, str], tuple[int, str, AssignmentState]] = {}
    final: dict[int, int] = {}
    phase = models.Phase
    rows = (
        select(phase.round_id, phase.number, phase.kind, models.Assignment.client_id, models.Assignment.state)
        .join(models.Phase)
        .join(models.Round)
        .where(models.Phase.round_id.in_(round_ids), COUNTS)
        .order_by(models.Phase.number)
    )
    for round_id, number, kind, client, state in session.execute(rows):
        last[round_id, client] = number, kind, state
        final[round_id] = number
    tallies = {round_id: Counter[AssignmentState]() for round_id in round_ids}
    for (round_id, _), (number, kind, state) in last.items():
        # A second phase of measurements asks only members that were away in the first one.
        ends = number == final[round_id] or kind in (Evaluate.name, Statistics.name)
        if ends or state is not AssignmentState.FULFILLED:
            tallies[round_id][state] += 1
    return list(tallies.values())


def _worst_clients(session: Session, round_ids: list[int]) -> dict[int, str]:
    """The client with the lowest accuracy, by round; or with the highest loss, where no client has an accuracy."""
    row = models.Evaluation
    worst_by_round: dict[int, str] = {}
    for column, worst_first in ((row.accuracy, row.accuracy.asc()), (row.loss, row.loss.desc())):
        missing = [round_id for round_id in round_ids if round_id not in worst_by_round]
        rank = func.row_number().over(partition_by=(row.round_id, row.split), order_by=(worst_first, row.client_id))
        conditions = row.round_id.in_(missing), column.is_not(None)
        ranked = select(row.round_id, row.split, row.client_id, rank.label("rank")).where(*conditions).subquery()
        worst = session.execute(select(ranked).where(ranked.c.rank == 1))
        clients = {(round_id, split): client for round_id, split, client, _ in worst}
        for round_id in missing:
            measured = [clients[round_id, split] for split in SCORED if (round_id, split) in clients]
            if measured:
                worst_by_round[round_id] = measured[0]
    return worst_by_round


def phases_of(session: Session, round_ids: list[int]) -> dict[int, dict[int, messages.PhaseProgress]]:
    """The progress of each phase, by round and by its number in it."""
    asked: Counter[int] = Counter()
    replied: Counter[int] = Counter()
    condition = models.Phase.round_id.in_(round_ids)
    states = (
        select(models.Assignment.phase_id, models.Assignment.state, func.count())
        .join(models.Phase)
        .where(condition)
        .group_by(models.Assignment.phase_id, models.Assignment.state)
    )
    for phase_id, state, count in session.execute(states):
        asked[phase_id] += count
        replied[phase_id] += count if state in ANSWERED else 0
    sizes = (
        select(models.Assignment.phase_id, func.sum(models.Reply.payload_bytes))
        .join(models.Assignment, models.Assignment.assignment_id == models.Reply.assignment_id)
        .join(models.Phase)
        .where(condition)
        .group_by(models.Assignment.phase_id)
    )
    sent = {phase_id: int(total) for phase_id, total in session.execute(sizes)}
    progress: dict[int, dict[int, messages.PhaseProgress]] = {round_id: {} for round_id in round_ids}
    query = select(models.Phase, models.Round.number, EVALUATES).join(models.Round).where(condition)
    for phase, number, evaluates in session.execute(query.order_by(models.Phase.number)):
        progress[phase.round_id][phase.number] = like(
            messages.PhaseProgress,
            phase,
            round=number,
            phase=phase.number,
            decides=not evaluates,
            asked=asked[phase.phase_id],
            replied=replied[phase.phase_id],
            bytes_up=sent.get(phase.phase_id, 0),
        )
    return progress
