"""The record of private rounds, as an outsider needs it to verify them: signed bytes, gathered from the database."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import RunFacts
from federation.v1.common_pb2 import SignedEnvelope, StepManifest
from federation.work.registry import STAGES
from storage.database import Database
from storage.models import Assignment, Client, Phase, Round, Run, Update

_IN_LIST = 500  # digests that one query looks up


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is on record of a run.

    Attributes:
        run: its facts.
        federation_id: its federation.
        initial_model: the digest of the model that it began with.
        keys: the public signing keys of all members, raw, by client id.
    """

    run: RunFacts
    federation_id: str
    initial_model: str
    keys: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What is on record of a private round that made a step. Envelopes are serialized SignedEnvelopes.

    Attributes:
        number: of the round, from 0.
        step: the envelope of its step.
        replies: those of the replies that the step names.
        evaluations: those of the replies in the session that evaluated its model; none without one.
        orders: those of the assignments of READY in all its sessions.
        metrics: of the round.
    """

    number: int
    step: bytes
    replies: tuple[bytes, ...]
    evaluations: tuple[bytes, ...]
    orders: tuple[bytes, ...]
    metrics: Mapping[str, float]


def run_record(database: Database, run_id: str, federation_id: str) -> RunRecord:
    """What is on record of a run."""
    run = RunFacts.load(database, run_id)
    with database.read() as session:
        initial = session.get_one(Run, run_id).initial_model
        keys = dict(session.execute(select(Client.client_id, Client.signing_key)).all())
    return RunRecord(run=run, federation_id=federation_id, initial_model=initial, keys=keys)


def round_records(database: Database, run_id: str) -> Iterator[RoundRecord]:
    """What is on record of the rounds of a run that made a step, one at a time, in their order."""
    with database.read() as session:
        query = select(Round.round_id).where(Round.run_id == run_id, Round.step.is_not(None)).order_by(Round.number)
        ids = session.scalars(query).all()
    for round_id in ids:
        with database.read() as session:
            yield _round_record(session, session.get_one(Round, round_id))


def _round_record(session: Session, row: Round) -> RoundRecord:
    step = StepManifest.FromString(SignedEnvelope.FromString(row.step or b"").manifest)
    named = [*step.updates, *step.consulted]
    replies: list[bytes] = []
    for start in range(0, len(named), _IN_LIST):
        some = named[start : start + _IN_LIST]
        replies += session.scalars(select(Update.envelope).where(Update.envelope_digest.in_(some)))
    here = (Phase.round_id == row.round_id, Phase.attempt == row.attempt)
    orders = select(Assignment.envelope).join(Phase).where(*here, Phase.kind == STAGES[0])
    measured = (
        select(Update.envelope)
        .join(Assignment)
        .join(Phase)
        .where(*here, Phase.number >= row.evaluation_phase, Phase.kind.in_(STAGES), Update.accepted)
        .order_by(Update.update_id)
    )
    return RoundRecord(
        number=row.number,
        step=row.step or b"",
        replies=tuple(replies),
        evaluations=tuple(session.scalars(measured)),
        orders=tuple(session.scalars(orders)),
        metrics=dict(row.metrics),
    )
