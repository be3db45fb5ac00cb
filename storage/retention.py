"""Garbage collection: blobs that no retained row refers to are removed."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, true
from sqlalchemy.orm import Session

from federation.record.best_round import BestSoFar
from federation.spec.run_spec import RunSpec
from federation.work.base import Work, WorkError
from federation.work.registry import kind
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Assignment, Client, Evaluation, Federation, Input, Model, Phase, Reply, Round, Run
from storage.records import RunMemory
from storage.states import RoundState
from storage.table_claims import forget_claims

_AT_A_TIME = 500  # digests in one statement, which takes a bounded number of values
_ENDED = Round.state.in_((RoundState.COMPLETED, RoundState.SKIPPED))
_FORGOTTEN = and_(Client.forgotten.is_not(None), Reply.received <= Client.forgotten)


@dataclass(frozen=True)
class Collection:
    """The result of a garbage collection."""

    kept: int  # number of blobs
    deleted: int  # number of blobs
    freed: int  # bytes


def collect(
    database: Database,
    blobs: BlobStore,
    *,
    now: datetime,
    grace_seconds: float,
    keep_rounds: int | None = None,
) -> Collection:
    """Removes the blobs that no retained row refers to; rows stay.

    It keeps the initial and the current model of each run and the vectors of its state; until the run ends, the other
    blobs of its algorithm; of each retained round the models, the Gram matrix, the noise, and the accepted payloads,
    unless the round has ended and their member was forgotten since. After a round has ended, the kind of work decides
    whether inputs and payloads are kept; those of a private round lose the ciphertexts and the inputs.

    It may run beside live runs: a blob is stored or claimed before a row refers to it, and until that row is committed,
    the age of the blob protects it. The check of the age and the removal are one step. Claims that are older than the
    grace are removed from the database, too.

    Args:
        database: the rows.
        blobs: the store.
        now: the present time, with a time zone.
        grace_seconds: younger blobs are kept; longer than any upload or aggregation takes to commit its row.
        keep_rounds: the number of last rounds of each run that are retained, beside its first and its best one; None
            retains all. The best round has the best value of the metric that stops the run; without such a metric
            the highest "accuracy/mean", or else the lowest "loss/test"; of equals, see `best_round_of`. A round that
            has not ended is retained in any case.

    Raises:
        ValueError: a negative number of rounds or seconds.
    """
    if grace_seconds < 0 or (keep_rounds is not None and keep_rounds < 0):
        raise ValueError(f"negative numbers: grace_seconds={grace_seconds}, keep_rounds={keep_rounds}")
    young = now.timestamp() - grace_seconds
    # Listed before the rows are read: an old blob that gets a reference later is claimed first, which makes it young.
    stored = list(blobs.scan())
    with database.read() as session:
        needed = referenced(session, keep_rounds)
    deleted = freed = 0
    for blob in stored:
        old = blob.modified < young and blob.digest not in needed
        if old and (size := blobs.delete(blob.digest, older_than=young)) is not None:
            deleted += 1
            freed += size
    if database.serves_many:
        forget_claims(database, before=young)
    return Collection(kept=len(stored) - deleted, deleted=deleted, freed=freed)


def remove_forgotten(
    database: Database, blobs: BlobStore, client_id: str, *, now: datetime, keep_rounds: int | None
) -> Collection:
    """Removes the payloads of a client that was marked as forgotten, without the grace of `collect`.

    Payloads that an open round needs, or the algorithm of a run that has not ended, are kept; `collect` removes them
    afterwards. `keep_rounds` is that of `collect`.
    """
    with database.read() as session:
        query = select(Reply.payload).join(Client, Reply.client_id == Client.client_id)
        rows = query.where(Reply.client_id == client_id, Reply.payload != "", _FORGOTTEN).distinct()
        payloads = set(session.scalars(rows))
        needed = payloads & referenced(session, keep_rounds)
    sizes = (blobs.delete(digest, older_than=now.timestamp()) for digest in sorted(payloads - needed))
    freed = [size for size in sizes if size is not None]
    return Collection(kept=len(needed), deleted=len(freed), freed=sum(freed))


def is_retained(session: Session, digest: str, keep_rounds: int | None) -> bool:
    """True if a retained row refers to a blob, so that no collection removes it; see `collect`."""
    return digest in referenced(session, keep_rounds)


def _first_and_best(session: Session, run_ids: Iterable[str] | None = None) -> set[int]:
    """The ids of the first and of the best round of each run, or of each of these."""
    columns = select(Round.run_id, Round.number, Round.round_id, Round.metrics).order_by(Round.run_id, Round.number)
    if run_ids is not None:
        columns = columns.where(Round.run_id.in_(run_ids))
    ids: set[int] = set()
    for run_id, rows in itertools.groupby(session.execute(columns), key=lambda row: row.run_id):
        best, rounds, split = BestSoFar(), dict[int, int](), partial(stop_split, session, run_id)
        for row in rows:
            rounds[row.number] = row.round_id
            best.add(row.number, row.metrics, split)
        ids.add(next(iter(rounds.values())))
        if best.number is not None:
            ids.add(rounds[best.number])
    return ids


def payloads_of(session: Session, round_ids: Iterable[int]) -> set[str]:
    """The digests of all payloads that members sent in these rounds, accepted or not."""
    query = select(Reply.payload).join(Reply.assignment).join(Assignment.phase)
    return set(session.scalars(query.where(Phase.round_id.in_(round_ids), Reply.payload != "").distinct()))


def needed_elsewhere(session: Session, digests: Iterable[str], left: Iterable[int], keep_rounds: int) -> set[str]:
    """Those of these blobs that something needs besides rounds that are not retained.

    It finds the rows by indexes, so that its time does not grow with the number of rounds. It may name more than
    `referenced` does, for example a blob that is the model of a round that is not retained.

    Args:
        session: reads the rows.
        digests: of blobs.
        left: the ids of rounds that are known not to be retained.
        keep_rounds: that of `collect`.
    """
    asked = sorted(digests)
    parts = (asked[start : start + _AT_A_TIME] for start in range(0, len(asked), _AT_A_TIME))
    return {digest for part in parts for digest in _needed_elsewhere(session, part, left, keep_rounds)}


def _needed_elsewhere(session: Session, asked: Sequence[str], left: Iterable[int], keep_rounds: int) -> set[str]:
    queries: list[Select[Any]] = [
        select(Model.digest).where(Model.digest.in_(asked)),
        select(Input.digest).where(Input.digest.in_(asked)),
        select(Federation.shared_blob),
    ]
    queries += [select(column).where(column.in_(asked)) for column in (Round.gram, Round.combined, Round.noise)]
    needed = {digest for query in queries for digest in session.scalars(query)}
    for state, ended in session.execute(select(Run.state_data, Run.ended)):
        memory = RunMemory.decode(state)
        needed.update(memory.vectors.values())
        if ended is None:
            needed.update(memory.blobs)
    rows = select(Reply.payload, Round.round_id, Round.run_id).join(Reply.assignment).join(Assignment.phase)
    found = session.execute(rows.join(Phase.round).where(Reply.payload.in_(asked), Round.round_id.not_in(left))).all()
    if found:  # an update that equals one of another round
        retained = _retained(keep_rounds, _first_and_best(session, {row.run_id for row in found}))
        others = select(Round.round_id).where(Round.round_id.in_({row.round_id for row in found}), retained)
        kept = set(session.scalars(others))
        needed.update(row.payload for row in found if row.round_id in kept)
    return needed & set(asked)


def stop_split(session: Session, run_id: str) -> str:
    """The split of the metric that stops a run."""
    return RunSpec.parse(session.get_one(Run, run_id).spec).stop.split


def referenced(session: Session, keep_rounds: int | None) -> set[str]:
    """The digests that retained rounds and runs refer to; see `collect`."""
    retained = true() if keep_rounds is None else _retained(keep_rounds, _first_and_best(session))
    queries: tuple[Select[Any], ...] = (
        select(Round.base_model),
        select(Round.result_model),
        select(Round.deployed_model),
        select(Round.gram),
        select(Round.combined),
        select(Round.noise),
        select(Assignment.base_model).join(Assignment.phase).join(Phase.round),
        select(Input.digest)
        .join(Assignment)
        .join(Assignment.phase)
        .join(Phase.round)
        .where(_needed(session, lambda work: work.keeps_inputs)),
        select(Evaluation.model).join(Round, Evaluation.round_id == Round.round_id),
        select(Reply.payload)
        .join(Reply.assignment)
        .join(Assignment.phase)
        .join(Phase.round)
        .join(Client, Reply.client_id == Client.client_id)
        .where(Reply.accepted, _needed(session, lambda work: work.keeps_payload), or_(~_ENDED, ~_FORGOTTEN)),
    )
    digests: set[str | None] = set()
    for query in queries:
        digests.update(session.scalars(query.where(retained).distinct()))
    digests.update(session.scalars(select(Federation.shared_blob)))
    runs = select(Run.initial_model, Run.model, Run.state_data, Run.ended)
    for initial, current, state, ended in session.execute(runs):
        memory = RunMemory.decode(state)
        digests.update((initial, current, *memory.vectors.values()))
        if ended is None:
            digests.update(memory.blobs)
    return {digest for digest in digests if digest}


def _needed(session: Session, keeps: Callable[[type[Work]], bool]) -> ColumnElement[bool]:
    """The condition that a blob is of a round that has not ended, or of a kind of work that keeps such blobs."""
    names = session.scalars(select(Phase.kind).distinct())
    return or_(~_ENDED, Phase.kind.not_in([name for name in names if not _keeps(name, keeps)]))


def _keeps(name: str, keeps: Callable[[type[Work]], bool]) -> bool:
    try:
        return keeps(kind(name).work)
    except WorkError:  # the package of this kind is no longer installed
        return True


def _retained(keep_rounds: int, others: set[int]) -> ColumnElement[bool]:
    all_rounds = Round.__table__.alias("all_rounds")
    last = select(func.max(all_rounds.c.number)).where(all_rounds.c.run_id == Round.run_id).scalar_subquery()
    condition = or_(
        Round.number > last - keep_rounds,
        and_(Round.state != RoundState.COMPLETED, Round.state != RoundState.SKIPPED),
        Round.round_id.in_(others),
    )
    # A subquery of ids, so that an index finds the rows that belong to these rounds.
    return Round.round_id.in_(select(Round.round_id).where(condition))
