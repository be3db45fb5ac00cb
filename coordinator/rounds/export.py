"""The record of a round as messages, for bundles, and for the checks whenever it is shown."""

import json
from collections.abc import Iterable

from google.protobuf.message import DecodeError
from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from federation.trust.envelope import envelope_digest
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.record_pb2 import Answer, Exchange, PhaseRecord, RoundRecord
from storage.models import Assignment, Phase, Reply, Round
from storage.states import AssignmentState


def parsed(data: bytes) -> SignedEnvelope | None:
    """An envelope from its recorded bytes; None if they are not one."""
    try:
        return SignedEnvelope.FromString(data)
    except DecodeError:
        return None


def newest_step(session: Session, run_id: str, *, before: int | None = None) -> str:
    """The digest of the signed envelope of a run's newest step; empty if there is none.

    With `before`, of the rounds before the one of this number.
    """
    steps = select(Round.step).where(Round.run_id == run_id, Round.step.is_not(None))
    if before is not None:
        steps = steps.where(Round.number < before)
    step = session.scalar(steps.order_by(Round.number.desc()).limit(1))
    return "" if step is None else envelope_digest(_envelope(step))


def recorded_phases(session: Session, round_id: int) -> list[Phase]:
    """The phases of a round in their order, with their assignments and replies."""
    query = (
        select(Phase)
        .where(Phase.round_id == round_id)
        .order_by(Phase.number)
        .options(selectinload(Phase.assignments).selectinload(Assignment.replies))
    )
    return list(session.scalars(query))


def round_record(row: Round, phases: Iterable[Phase]) -> RoundRecord:
    """The record of a round, with its phases; an envelope whose bytes are damaged is empty."""
    return RoundRecord(
        number=row.number,
        state=row.state,
        reason=row.reason,
        attempt=row.attempt,
        step=None if row.step is None else _envelope(row.step),
        state_after=json.dumps(row.state_after, sort_keys=True, separators=(",", ":")) if row.step else "",
        phases=[_phase(phase, row.evaluation_phase) for phase in phases],
        metrics=row.metrics,
        result=None if row.result is None else _envelope(row.result),
        document=row.document or b"",
    )


def in_order(replies: Iterable[Reply]) -> list[Reply]:
    """The replies to an assignment in the order in which they were recorded."""
    return sorted(replies, key=lambda reply: reply.reply_id)


def exchange_of(assignment: Assignment, replies: Iterable[Reply]) -> Exchange:
    """An assignment with its decline and some of its replies."""
    declined = assignment.decline is not None or assignment.state is AssignmentState.DECLINED
    return Exchange(
        assignment=_envelope(assignment.envelope),
        answers=[_answer(reply) for reply in replies],
        decline=_envelope(assignment.decline or b"") if declined else None,
    )


def _phase(row: Phase, evaluation: int | None) -> PhaseRecord:
    return PhaseRecord(
        number=row.number,
        attempt=row.attempt,
        kind=row.kind,
        decides=row.decides and (evaluation is None or row.number < evaluation),
        exchanges=[exchange_of(assignment, in_order(assignment.replies)) for assignment in row.assignments],
    )


def _answer(row: Reply) -> Answer:
    return Answer(reply=_envelope(row.envelope), receipt=_envelope(row.receipt) if row.receipt else None)


def _envelope(data: bytes) -> SignedEnvelope:
    return parsed(data) or SignedEnvelope()
