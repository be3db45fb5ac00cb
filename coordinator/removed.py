"""Blobs that retention has removed: refused with what was asked for and what is kept. A lost blob is another matter."""

from itertools import groupby

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.refusals import Refusal
from storage.blobs import BlobStore
from storage.models import Assignment, Round, Run
from storage.retention import is_retained


def removed_model(
    session: Session, blobs: BlobStore, run: Run, number: int | None, digest: str, keep_rounds: int
) -> Refusal | None:
    """The refusal to export a model that is not stored; None if retention keeps it, so that it is lost.

    Args:
        session: reads.
        blobs: the blob store.
        run: of the model.
        number: of the round that made the model; None for the newest model.
        digest: of the model.
        keep_rounds: the setting; 0 keeps all rounds.
    """
    if number is None or is_retained(session, digest, keep_rounds or None):
        return None
    made = select(Round.number, Round.deployed_model).where(
        Round.run_id == run.run_id, Round.deployed_model.is_not(None)
    )
    left = [after for after, model in session.execute(made.order_by(Round.number)) if model and blobs.exists(model)]
    return Refusal(
        "blob-removed",
        f"the model after round {number} of run {run.run_id} was removed: {_retention(keep_rounds)}. Of this run there "
        f"are the models after {_listed(left)}; without --round the newest is exported",
    )


def removed_offer(session: Session, assignment_id: str, digest: str, keep_rounds: int) -> Refusal | None:
    """The refusal to serve a blob of an assignment that is not stored; None if retention keeps it, so it is lost."""
    if is_retained(session, digest, keep_rounds or None):
        return None
    round_ = session.get_one(Assignment, assignment_id).phase.round
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
        found = [number for _, number in group]
        spans.append(str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}")
    return ("rounds " if len(numbers) > 1 else "round ") + ", ".join(spans) if numbers else "no round"
