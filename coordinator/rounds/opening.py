"""The beginning of a round: ends the run or selects clients; both are recorded before a client is asked."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds import selection
from coordinator.rounds.fleets.base import Fleet, Held
from coordinator.rounds.runs.client_noise import noisy_steps, over_budget
from coordinator.rounds.runs.scores import why_stopped
from coordinator.rounds.runs.task_offers import missing_offer
from coordinator.rounds.transitions import move_run
from storage import audit
from storage.columns import cleaned
from storage.models import RUN_REASON, Assignment, Phase, Round, Run
from storage.states import AssignmentState, RoundState, RunState

log = logging.getLogger(__name__)


def open_round(fleet: Fleet) -> Round | None:
    """The round that is under way, or a new one; None when the run has ended.

    Raises:
        Held: the run is not RUNNING.
    """
    with fleet.context.database.read() as session:
        steps = noisy_steps(session, fleet.run.run_id) if fleet.conceals else 0
    overspends = over_budget(fleet.run.spec.privacy, steps)
    complete = fleet.complete()  # asked first: a client that makes it complete must be in the pool
    with fleet.context.database.begin() as session:
        run = fleet.run.running(session)
        latest = select(Round).where(Round.run_id == fleet.run.run_id).order_by(Round.number.desc())
        recent = session.scalars(latest.limit(fleet.run.spec.limits.skipped_rounds)).all()
        if recent and recent[0].state in (RoundState.OPEN, RoundState.STEPPED):
            return recent[0]
        number = recent[0].number + 1 if recent else 0
        if _ended(session, fleet, run, number, recent, overspends):
            return None
        pool = fleet.pool(session)
        begun = None
        if not _missing(session, fleet, pool, complete):
            run.reason = ""
            begun = _selected(session, fleet, run, number, pool)
    begun = begun or _begin_round(fleet, number)
    log.info("run %s round %d: selected %s", fleet.run.run_id, number, ", ".join(begun.selected))
    return begun


def _ended(session: Session, fleet: Fleet, run: Run, number: int, recent: Sequence[Round], overspends: str) -> bool:
    """Ends the run if it is complete, too many rounds were skipped, or another one would overspend its budget.

    A run that trains and made no step has failed, because its model is the initial one. A round whose model stayed as
    it was, since no direction is good for every participant, has a step. A run that evaluates has failed if no model
    was measured, and one that describes data if nothing was described.
    """
    now, spec = fleet.context.clock(), fleet.run.spec
    limit = spec.limits.skipped_rounds
    if len(recent) == limit and all(round_.state is RoundState.SKIPPED for round_ in recent):
        why = f"{limit} rounds in a row were skipped{_failed(session, run)}; the last one: {recent[0].reason}"
        move_run(run, RunState.FAILED, now, why)
    elif number >= spec.rounds and not _has_result(session, run):
        which = "its only round" if number == 1 else f"any of its {number} rounds"
        what = "step was made" if spec.trains else "model was measured" if spec.measures else "data were described"
        why = f"no {what} in {which}{_failed(session, run)}; the last one: {recent[0].reason}"
        move_run(run, RunState.FAILED, now, why)
    elif number >= spec.rounds or (enough := why_stopped(fleet.run, recent[0].metrics if recent else {})):
        move_run(run, RunState.COMPLETED, now, "" if number >= spec.rounds else enough)
    elif overspends:
        move_run(run, RunState.STOPPED, now, overspends)
    else:
        return False
    action = f"run.{run.state.lower()}"
    audit.record(session, at=now, actor="coordinator", action=action, subject=run.run_id, detail=run.reason)
    log.info("run %s: %s %s", run.run_id, run.state, run.reason)
    return True  # no mutant: otherwise Held ends the conductor in _begin_round


def _failed(session: Session, run: Run) -> str:
    """The most frequent reason of declined and refused answers, as the end of a clause; empty without any."""
    reasons = (
        select(Assignment.reason, func.count())
        .join(Phase, Assignment.phase_id == Phase.phase_id)
        .join(Round, Phase.round_id == Round.round_id)
        .where(Round.run_id == run.run_id)
        .where(Assignment.state.in_([AssignmentState.DECLINED, AssignmentState.REFUSED]))
        .group_by(Assignment.reason)
    )
    counts = Counter(dict(session.execute(reasons).all()))
    if not counts:
        return ""
    reason = min(counts, key=lambda reason: (-counts[reason], reason))
    return f", with {reason} in {counts[reason]} of {counts.total()} failed answers"


def _has_result(session: Session, run: Run) -> bool:
    ended_well = select(Round.round_id).where(Round.run_id == run.run_id, Round.state == RoundState.COMPLETED)
    return session.scalar(ended_well.limit(1)) is not None


def _begin_round(fleet: Fleet, number: int) -> Round:
    """Waits until a round can begin, selects, and records the selection before any client is asked.

    A round whose required clients are not there in time begins without a selection, and is skipped.
    """
    context, run_id = fleet.context, fleet.run.run_id
    patience = fleet.run.spec.selection.patience_seconds
    ends = context.clock() + timedelta(seconds=patience) if patience else None
    while True:
        complete = fleet.complete()  # asked first: a client that makes it complete must be in the pool
        with context.database.read() as session:
            run = session.get_one(Run, run_id)
            if run.state is not RunState.RUNNING:
                raise Held  # no mutant: so does running(), as the reason of a pause or a stop is another one
            missing = _missing(session, fleet, fleet.pool(session), complete)
        if missing != run.reason or not missing:  # only then is there anything to write
            with context.database.begin() as session:
                run = fleet.run.running(session)
                pool = fleet.pool(session)  # read once: a client may leave before the selection
                run.reason = missing = _missing(session, fleet, pool, complete)
                if not missing:
                    begun = _selected(session, fleet, run, number, pool)
                    break
            log.info("run %s: %s", run_id, missing)
            context.changed()
        left = None if ends is None else (ends - context.clock()).total_seconds()
        if left is not None and left <= 0 and complete:
            with context.database.begin() as session:
                run = fleet.run.running(session)
                if absent := _absent_required(session, fleet, fleet.pool(session)):
                    run.reason = ""
                    begun = _unselected(session, fleet, run, number, absent)
                    break
            left = None
        context.wait(left if complete else 1.0)  # no mutant: coordinator/rounds/test_control.py shows that it sleeps
    return begun


def _absent_required(session: Session, fleet: Fleet, pool: Mapping[str, int]) -> dict[str, str]:
    """The required clients that are not in the pool, by name, with the reason."""
    missing = [name for name in fleet.run.spec.selection.required if name not in pool]
    why = fleet.absent(session) if missing else {}
    return {name: why.get(name, "does not attend, or does not offer the task") for name in missing}


def _missing(session: Session, fleet: Fleet, pool: Mapping[str, int], complete: bool) -> str:
    """Describes what a round waits for, as the reason of its run is kept; empty when it can begin with this pool."""
    ready, spec = len(pool), fleet.run.spec
    if ready < spec.selection.minimum:
        reasons = [*filter(None, [missing_offer(session, spec)])]
        reasons += [f"{name} {why}" for name, why in fleet.absent(session).items()]
        others = "".join(f"; {reason}" for reason in reasons)
        why = f"waiting for members: {ready} of {spec.selection.minimum} are ready for {spec.task}{others}"
        return cleaned(why, RUN_REASON)
    if absent := _absent_required(session, fleet, pool):
        reasons_of_clients = "; ".join(f"{name} {why}" for name, why in absent.items())
        return cleaned(f"waiting for required members: {reasons_of_clients}", RUN_REASON)
    return "" if complete else "waiting for members to come back after a restart"


def _unselected(session: Session, fleet: Fleet, run: Run, number: int, absent: Mapping[str, str]) -> Round:
    """A round that asks no client, since required clients were absent."""
    begun = Round(
        run_id=run.run_id,
        number=number,
        state=RoundState.OPEN,
        **_begins(fleet, run, number),
        selected=[],
        not_asked={**fleet.absent(session), **absent},
        wanted=0,
        started=fleet.context.clock(),
    )
    session.add(begun)
    return begun


def _selected(session: Session, fleet: Fleet, run: Run, number: int, pool: Mapping[str, int]) -> Round:
    if fleet.run.spec.trains:
        fleet.memory(session, number, None)  # raises if the record differs from what was signed
    rule = fleet.run.spec.selection
    selected = selection.select(rule, pool, seed=fleet.run.spec.seed, round_number=number)
    begun = Round(
        run_id=run.run_id,
        number=number,
        state=RoundState.OPEN,
        **_begins(fleet, run, number),
        selected=selected,
        not_asked=fleet.absent(session),
        wanted=min(len(selected), rule.wanted(len(pool))),
        started=fleet.context.clock(),
    )
    session.add(begun)
    return begun


def _begins(fleet: Fleet, run: Run, number: int) -> dict[str, Any]:
    """The model that a round begins with; in a run that does not train, no phase of the round decides on a step."""
    spec = fleet.run.spec
    begins = {"base_model": spec.models[number] if spec.measures else run.model}
    return begins if spec.trains else {**begins, "evaluation_phase": 0}
