"""Finds the run, round, model or client that an operator names, or refuses with the ones that exist.

The refusal of a blob that retention has removed names what was asked for and what is kept. A lost blob is a fault.
"""

import re
from collections.abc import Sequence
from enum import Enum
from itertools import groupby

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from federation.refusals import Refusal
from federation.text import did_you_mean
from federation.trust.identity import NAME_PATTERN
from storage import models
from storage.blobs import BlobStore
from storage.retention import is_retained
from storage.states import RoundState

_RUN_WORD = re.compile(r"[a-z0-9.-]{1,63}")
_MOST_LISTED = 5  # runs in a message
_MOST_COMPARED = 1000  # names that an unknown one is compared with
_MOST_TRIED = 100  # runs that a member may mean by a name or a beginning


class Choice(Enum):
    """Which run is meant by a name that several runs have."""

    NEWEST = "newest"  # where something is shown
    ONLY = "only"  # where a file is written: none of several
    OPEN = "open"  # where a command is given: the one that has not ended


def find_run(session: Session, text: str, choice: Choice = Choice.NEWEST) -> models.Run:
    """The run with an id, with an unambiguous beginning of the id, or with a name.

    Raises:
        Refusal: `run-unknown`; `run-ambiguous`: several runs begin like this, or have this name and `choice` does not
            say which is meant. The message lists them.
    """
    if not _RUN_WORD.fullmatch(text):  # such text is not sent to the database
        raise _unknown_run(session, text)
    run = session.get(models.Run, text)
    if run is not None:
        return run
    newest_first = select(models.Run).order_by(models.Run.created.desc(), models.Run.run_id)
    named = session.scalars(newest_first.where(models.Run.name == text)).all()
    candidates = named
    if choice is Choice.OPEN:
        candidates = [run for run in named if run.ended is None] or named[:1]  # an ended one is refused by its state
    if len(candidates) > 1 and choice is not Choice.NEWEST:
        raise Refusal("run-ambiguous", f"several runs have the name {text!r}: {_listed_runs(candidates)}; give the id")
    if candidates:
        return candidates[0]
    runs = session.scalars(newest_first.where(models.Run.run_id.startswith(text)).limit(_MOST_LISTED)).all()
    if not runs:
        raise _unknown_run(session, text)
    if len(runs) > 1:
        raise Refusal(
            "run-ambiguous", f"{text!r} begins the ids of several runs: {_listed_runs(runs)}; give more characters"
        )
    return runs[0]


def own_run(session: Session, client_id: str, text: str) -> models.Run:
    """The run that a member names as in `find_run`, among those that have asked it for work.

    It learns nothing of other runs, not even that they exist.

    Raises:
        Refusal: `run-unknown`, `run-ambiguous`.
    """
    if _RUN_WORD.fullmatch(text):
        newest_first = select(models.Run).order_by(models.Run.created.desc(), models.Run.run_id).limit(_MOST_TRIED)
        for condition in (
            models.Run.run_id == text,
            models.Run.name == text,
            models.Run.run_id.startswith(text),
        ):
            found = session.scalars(newest_first.where(condition)).all()
            runs = [run for run in found if _has_asked(session, run, client_id)]
            if len(runs) > 1:
                raise Refusal("run-ambiguous", f"{text!r} is several runs: {_listed_runs(runs)}; give the id")
            if runs:
                return runs[0]
    raise Refusal(
        "run-unknown",
        f"no run {text[:63]!r} has asked {client_id} for work; `fedpareto worker log` lists those that have",
    )


def _has_asked(session: Session, run: models.Run, client_id: str) -> bool:
    asked = select(models.Assignment.assignment_id).join(models.Phase).join(models.Round)
    mine = (models.Round.run_id == run.run_id, models.Assignment.client_id == client_id)
    return session.scalar(asked.where(*mine).limit(1)) is not None


def _unknown_run(session: Session, text: str) -> Refusal:
    names = session.scalars(select(models.Run.name).order_by(models.Run.created.desc()).limit(_MOST_COMPARED))
    near = did_you_mean(text, names)
    return Refusal("run-unknown", f"there is no run {text[:63]!r}{near or ';'} `fedpareto admin runs` lists them")


def _listed_runs(runs: Sequence[models.Run]) -> str:
    """Runs by id, with date and state; of many the first."""
    shown = [
        f"{run.run_id} ({run.created:%Y-%m-%d %H:%M} UTC, {run.state}"
        + (f": {run.reason[:60]})" if run.reason and run.ended else ")")
        for run in runs[:_MOST_LISTED]
    ]
    if len(runs) > _MOST_LISTED:
        shown.append(f"and {len(runs) - _MOST_LISTED} older ones")
    return ", ".join(shown)


def find_round(session: Session, run: models.Run, number: int) -> models.Round:
    """A round of a run; -1 is the last one.

    Raises:
        Refusal: `round-unknown`.
    """
    last = session.scalar(select(func.max(models.Round.number)).where(models.Round.run_id == run.run_id))
    count = 0 if last is None else last + 1
    index = number if number >= 0 else count + number
    query = select(models.Round).where(models.Round.run_id == run.run_id, models.Round.number == index)
    round_ = session.scalar(query) if 0 <= index < count else None
    if round_ is None:
        has = f"it has rounds 0 to {count - 1}" if count else "it has none yet"
        raise Refusal("round-unknown", f"run {run.run_id} has no round {number}: {has}")
    return round_


def model_after(session: Session, run: models.Run, number: int | None) -> tuple[str, int | None]:
    """The newest model of a run to deploy, or the one after a round.

    Returns:
        Its digest, and the round that made it: a round that was skipped leaves the model of an earlier one; None for
        the model that the run began with.

    Raises:
        Refusal: `round-unknown`: no such round, or it has made no model yet.
    """
    query = select(models.Round.deployed_model, models.Round.number).where(
        models.Round.run_id == run.run_id, models.Round.deployed_model.is_not(None)
    )
    if number is not None:
        round_ = find_round(session, run, number)
        if round_.state is RoundState.OPEN:
            raise Refusal(
                "round-unknown", f"round {number} of run {run.run_id} has made no model yet: it is {round_.state}"
            )
        query = query.where(models.Round.number <= round_.number)
    row = session.execute(query.order_by(models.Round.number.desc()).limit(1)).one_or_none()
    return (run.initial_model, None) if row is None else (str(row.deployed_model), row.number)


def check_client(session: Session, client_id: str) -> None:
    """Raises if no client has this name.

    Raises:
        Refusal: `client-unknown`.
    """
    if NAME_PATTERN.fullmatch(client_id) is None or session.get(models.Client, client_id) is None:
        names = session.scalars(select(models.Client.client_id).limit(_MOST_COMPARED))
        near = did_you_mean(client_id, names) or ";"
        raise Refusal(
            "client-unknown", f"there is no member {client_id[:63]!r}{near} `fedpareto admin clients` lists them"
        )


def removed_model(
    session: Session, blobs: BlobStore, run: models.Run, number: int | None, digest: str, keep_rounds: int
) -> Refusal | None:
    """The refusal to export a model that is not stored; None if retention keeps it, so that it is lost.

    `number` is of the round that made the model, None for the newest model; `keep_rounds` is the setting, 0 for all.
    """
    if number is None or is_retained(session, digest, keep_rounds or None):
        return None
    query = select(models.Round.number, models.Round.deployed_model).where(
        models.Round.run_id == run.run_id, models.Round.deployed_model.is_not(None)
    )
    left = [
        after for after, model in session.execute(query.order_by(models.Round.number)) if model and blobs.exists(model)
    ]
    return Refusal(
        "blob-removed",
        f"the model after round {number} of run {run.run_id} was removed: {_retention(keep_rounds)}. Of this run there "
        f"are the models after {_listed(left)}; without --round and --best, the newest is given",
    )


def removed_offer(session: Session, assignment_id: str, digest: str, keep_rounds: int) -> Refusal | None:
    """The refusal to serve a blob that is not stored; None if retention keeps it, so it is lost.

    `assignment_id` is of the assignment that offered it; empty for a model that a member was given.
    """
    if is_retained(session, digest, keep_rounds or None):
        return None
    if not assignment_id:
        return Refusal("blob-removed", f"the model {digest} was removed meanwhile: {_retention(keep_rounds)}")
    round_ = session.get_one(models.Assignment, assignment_id).phase.round
    return Refusal(
        "blob-removed",
        f"{digest} of assignment {assignment_id} was removed: round {round_.number} of run {round_.run_id} "
        f"has ended, and {_retention(keep_rounds)}",
    )


def _retention(keep_rounds: int) -> str:
    return (
        "of each run, only the first, the best and the last rounds keep their models and updates "
        f"(keep_rounds = {keep_rounds} in the coordinator's settings)"
    )


def _listed(numbers: list[int]) -> str:
    """Rising numbers of rounds as text: "rounds 0, 3, 7 to 9"."""
    spans = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        span = [number for _, number in group]
        spans.append(str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}")
    return ("rounds " if len(numbers) > 1 else "round ") + ", ".join(spans) if numbers else "no round"
