"""The coordinator's data for a private round: keys, the members that were named, and secrets of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import Fleet
from federation.aggregation.phases import PrivateSetting, Setting
from federation.secure import hashing
from federation.secure.derivation import taus
from federation.work.secure.orders import asked_coefficients
from federation.work.secure.terms import SessionStage, SessionTerms
from federation.work.secure.wire import terms_bytes
from storage import audit
from storage.models import Assignment, Phase, Round
from storage.records import VoidRecord


def since_pause(current: Round) -> Sequence[VoidRecord]:
    """The attempts at a round that were voided since the run was last paused for it."""
    pauses = [index for index, void in enumerate(current.voided) if void.paused]
    # Section 4: since the pause, somebody has looked, so groups are left out from the first one again.
    return current.voided[pauses[-1] + 1 :] if pauses else current.voided


def record_named(session: Session, current: Round, named: Mapping[str, str], at: datetime) -> None:
    """Records in the audit log that members have cheated in an attempt at a round, and how."""
    where = f"run {current.run_id} round {current.number} attempt {current.attempt}"
    for member, reason in named.items():
        detail = f"{where}: {reason}"
        audit.record(session, at=at, actor="coordinator", action="member.named", subject=member, detail=detail)


def private_facts(
    session: Session, fleet: Fleet, current: Round, base_model: str, keys: Mapping[str, str]
) -> PrivateSetting | None:
    """The facts for an attempt at a round, for work on this model; None for a run with updates in the clear.

    `keys` are the ids of the members' signing keys, hexadecimal.
    """
    run = fleet.run
    if run.spec.privacy.secure == "off":
        return None
    # Section 4: of all rounds: a member that was named once is not invited in a later round, either.
    named = fleet.past.named(session, current.number)
    here = session.get_one(Round, current.round_id)
    return PrivateSetting(
        spec=run.spec,
        document=run.document,
        origin=run.origin(fleet.context.federation_id, base_model),
        keys={name: bytes.fromhex(key) for name, key in keys.items()},
        named=named.union(here.named, *(void.named for void in here.voided)),
        # Section 4: by the record, not by a counter in memory: after a restart, the same group is left out.
        blind=sum(void.blind for void in since_pause(current)),
        settle=partial(
            _settle,
            fleet,
            # Section 3, rule 2: a session that is over is not asked for again, so each attempt has a nonce of its own.
            f"{fleet.run.run_id}\0{current.number}\0{current.attempt}",
            _coefficients(session, current),
        ),
    )


def _coefficients(session: Session, current: Round) -> dict[bytes, tuple[int, ...]]:
    """The coefficients with which members have been asked for masked vectors in this attempt, by session."""
    rows = session.scalars(
        select(Assignment.envelope)
        .join(Phase)
        .where(
            Phase.round_id == current.round_id, Phase.attempt == current.attempt, Phase.kind == SessionStage.MASK.value
        )
    )
    # Section 4: from the signed assignments: members answer MASK once, so a restart must go on with exactly these.
    return asked_coefficients(rows)


def _settle(
    fleet: Fleet, attempt: str, coefficients: Mapping[bytes, tuple[int, ...]], purpose: str, terms: SessionTerms
) -> Setting:
    """The setting of a session in an attempt at a round; nobody else can derive its nonce and its challenge key."""
    context = f"{attempt}\0{purpose}".encode()
    # Section 2: derived, not drawn: after a crash, members that are ready must find the session that they know.
    agreed = replace(terms, nonce=fleet.derive("nonce", context)[:16])
    sent = terms_bytes(agreed)
    return Setting(
        purpose=purpose,
        agreed=agreed,
        terms_bytes=sent,
        # Section 2a: a key for challenges alone, which no member has: who can derive tau2 can deal shares that pass.
        taus=partial(taus, fleet.derive("challenge", context)),
        asked=coefficients.get(hashing.session(sent)),
    )
