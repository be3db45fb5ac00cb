"""What a private round needs of its coordinator: keys, the members that were named, and secrets of its own."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.aggregation.phases import Private
from coordinator.rounds.fleets.base import Fleet
from federation.secure.thresholds import Mode
from federation.work.base import Origin
from federation.work.secure.wire import terms_bytes
from storage.models import Round


def since_pause(current: Round) -> list[dict[str, Any]]:
    """The attempts at a round that were voided since the run was last paused for it."""
    voided = list(current.voided)
    paused = [place for place, void in enumerate(voided) if void["paused"]]
    return voided[paused[-1] + 1 :] if paused else voided


def private_facts(session: Session, fleet: Fleet, current: Round, base_model: str) -> Private | None:
    """The facts for an attempt at a round, for work on this model; None for a run with updates in the clear."""
    spec, around = fleet.run.spec, fleet.around
    if spec.privacy.secure == "off":
        return None
    rounds = session.scalars(select(Round).where(Round.run_id == fleet.run.run_id)).all()
    return Private(
        mode=Mode(spec.privacy.secure),
        disclose=tuple(name for name in spec.privacy.disclose if name != "evaluation"),
        clip=spec.privacy.clip,
        origin=Origin(
            federation_id=around.federation_id,
            run_id=fleet.run.run_id,
            task=spec.task,
            spec=fleet.run.spec_digest,
            base_model=base_model,
        ),
        keys=fleet.keys(session),
        named=frozenset(name for round_ in rounds for void in round_.voided for name in void["named"]),
        blind=sum(void["blind"] for void in since_pause(current)),
        serialise=terms_bytes,
        derive=fleet.derive,
    )
