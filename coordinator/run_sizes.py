"""The disk use of the record, and an estimate of the further use by runs that have not ended.

A round keeps its new model and each accepted update. Without `keep_rounds` nothing is ever removed,
because the record can be verified only with its models and updates.
"""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from coordinator.rounds.runs.specification import parse_run
from coordinator.rounds.transitions import ROUND_ENDED, RUN_ENDED
from federation.spec.run_spec import RunSpec
from storage.blobs import BlobStore
from storage.models import Assignment, Model, Phase, Reply, Round, Run
from storage.states import RunState

LAST = 10  # rounds from which the size of the next ones is estimated


@dataclass(frozen=True)
class RunUsage:
    """The disk use of one run, in bytes. Blobs that several runs share count for each of them.

    `needed` estimates what the run will take until its end; 0 when it has ended.
    """

    run_id: str
    name: str
    state: RunState
    models: int
    replies: int
    needed: int


@dataclass(frozen=True)
class Usage:
    """The disk use of the record, in bytes; each blob counts once.

    `other` is of Gram matrices, for example, and of blobs that are no longer referenced; `free` is what the disk of the
    blobs has left, None for a bucket; `runs` are the newest first.
    """

    models: int
    replies: int
    other: int
    database: int
    free: int | None
    runs: tuple[RunUsage, ...]

    @property
    def needed(self) -> int:
        """An estimate of the further use by runs that have not ended."""
        return sum(run.needed for run in self.runs)


def run_bytes(spec: RunSpec, *, model: int, members: int, objectives: int, rounds: int | None = None) -> int:
    """An estimate of the bytes that rounds of a run take: a model for each, and an update from each wanted member.

    The model has `model` bytes. `members` could be asked now; the minimum of the specification counts if it is more. An
    update has at most a row for each of the task's `objectives`. `rounds` is None for all rounds of the run.
    """
    if not spec.trains:
        return len(spec.models) * model  # as submitted; replies have no payload
    replies = spec.selection.wanted(max(members, spec.selection.minimum, 1))
    return (spec.rounds if rounds is None else rounds) * model * (1 + replies * objectives)


def open_runs_bytes(session: Session) -> int:
    """An estimate of the bytes that the runs that have not ended will still take."""
    return sum(_needed(session, run) for run in session.scalars(select(Run).where(Run.state.not_in(list(RUN_ENDED)))))


def usage(session: Session, blobs: BlobStore) -> Usage:
    """Measures the record. It reads the size of every blob, which takes seconds for a million blobs."""
    sizes = {blob.digest: blob.size for blob in blobs.scan()}
    models, replies = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for run_id, *digests in session.execute(
        select(Round.run_id, Round.base_model, Round.result_model, Round.deployed_model)
    ):
        models[run_id].update(filter(None, digests))
    payloads = (
        select(Round.run_id, Reply.payload).join(Reply.assignment).join(Assignment.phase).join(Phase.round).distinct()
    )
    for run_id, payload in session.execute(payloads.where(Reply.payload != "")):
        replies[run_id].add(payload)
    runs = session.scalars(select(Run).order_by(Run.created.desc(), Run.run_id)).all()
    all_models = set(session.scalars(select(Model.digest)))
    all_replies = set[str]().union(*replies.values())

    def total(digests: set[str]) -> int:
        return sum(sizes.get(digest, 0) for digest in digests)

    return Usage(
        models=total(all_models),
        replies=total(all_replies),
        other=total(sizes.keys() - all_models - all_replies),
        database=_database_bytes(session),
        free=blobs.free_bytes(),
        runs=tuple(
            RunUsage(
                run.run_id,
                run.name,
                run.state,
                total(models[run.run_id] | {run.initial_model}),
                total(replies[run.run_id]),
                0 if run.state in RUN_ENDED else _needed(session, run),
            )
            for run in runs
        ),
    )


def _needed(session: Session, run: Run) -> int:
    """An estimate for a run's further rounds, from its last ones, or before them from its specification."""
    spec, _ = parse_run(run.spec)
    if not spec.trains:
        return 0  # its models are here
    ended = select(Round.round_id, Round.number).where(Round.run_id == run.run_id, Round.state.in_(ROUND_ENDED))
    last = session.execute(ended.order_by(Round.number.desc()).limit(LAST)).all()
    left = spec.rounds - (last[0].number + 1 if last else 0)
    model = session.get_one(Model, run.model).size
    if not last:
        return run_bytes(spec, model=model, members=0, objectives=len(run.objectives), rounds=left)
    received = session.scalar(
        select(func.sum(Reply.payload_bytes))
        .join(Reply.assignment)
        .join(Assignment.phase)
        .where(Phase.round_id.in_([row.round_id for row in last]), Reply.accepted)
    )
    return left * (model + int(received or 0) // len(last))


def _database_bytes(session: Session) -> int:
    if session.get_bind().dialect.name == "postgresql":
        return int(session.scalar(text("select pg_database_size(current_database())")) or 0)
    pages, size = (session.scalar(text(f"pragma {name}")) for name in ("page_count", "page_size"))
    return int(pages or 0) * int(size or 0)
