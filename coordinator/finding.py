"""Finds the run, round, model or client that an operator names, or refuses with the ones that exist."""

import re

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from federation.identity import NAME_PATTERN
from federation.refusals import Refusal
from storage import models
from storage.records import RunMemory

_RUN_WORD = re.compile(r"[a-z0-9.-]{1,63}")


def find_run(session: Session, text: str) -> models.Run:
    """The run with an id, with an unambiguous beginning of the id, or with a name; of several, the newest.

    Raises:
        Refusal: `run-unknown`, `run-ambiguous`.
    """
    unknown = Refusal("run-unknown", f"there is no run {text[:63]!r}; `fedpareto admin runs` lists them")
    if not _RUN_WORD.fullmatch(text):  # not for a database, then
        raise unknown
    run = session.get(models.Run, text)
    if run is not None:
        return run
    run = session.scalar(select(models.Run).where(models.Run.name == text).order_by(models.Run.created.desc()).limit(1))
    if run is not None:
        return run
    found = session.scalars(select(models.Run).where(models.Run.run_id.startswith(text)).limit(5)).all()
    if not found:
        raise unknown
    if len(found) > 1:
        ids = ", ".join(run.run_id for run in found)
        raise Refusal("run-ambiguous", f"{text!r} begins the ids of several runs: {ids}; give more characters")
    return found[0]


def find_round(session: Session, run: models.Run, number: int) -> models.Round:
    """A round of a run; -1 is the last one.

    Raises:
        Refusal: `round-unknown`.
    """
    last = session.scalar(select(func.max(models.Round.number)).where(models.Round.run_id == run.run_id))
    count = 0 if last is None else last + 1
    wanted = number if number >= 0 else count + number
    query = select(models.Round).where(models.Round.run_id == run.run_id, models.Round.number == wanted)
    found = session.scalar(query) if 0 <= wanted < count else None
    if found is None:
        has = f"it has rounds 0 to {count - 1}" if count else "it has none yet"
        raise Refusal("round-unknown", f"run {run.run_id} has no round {number}: {has}")
    return found


def model_after(session: Session, run: models.Run, number: int | None) -> str:
    """The digest of the newest model of a run to deploy, or of the one after a round.

    Raises:
        Refusal: `round-unknown`: no such round, or it has made no model yet.
    """
    if number is None:
        return RunMemory.decode(run.state_data).deployed(run.model)
    round_ = find_round(session, run, number)
    if round_.state is models.RoundState.OPEN:
        raise Refusal(
            "round-unknown", f"round {number} of run {run.run_id} has made no model yet: it is {round_.state}"
        )
    last = (  # a round that was skipped leaves what was there before
        select(models.Round.deployed_model)
        .where(
            models.Round.run_id == run.run_id,
            models.Round.number <= round_.number,
            models.Round.deployed_model.is_not(None),
        )
        .order_by(models.Round.number.desc())
        .limit(1)
    )
    return session.scalar(last) or run.initial_model


def must_be_client(session: Session, client_id: str) -> None:
    """Raises if no client has this name.

    Raises:
        Refusal: `client-unknown`.
    """
    if NAME_PATTERN.fullmatch(client_id) is None or session.get(models.Client, client_id) is None:
        raise Refusal("client-unknown", f"there is no client {client_id[:63]!r}; `fedpareto admin clients` lists them")
