"""The results of a simulation: numbers in memory, as tables for a notebook."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from coordinator.rounds.participation import MemberSummary, Outcome, Participation, read_rounds
from federation.runs import RunSpec
from federation.text import counted
from federation.vectors import model_row
from storage.blobs import BlobStore
from storage.models import Assignment, Evaluation, Phase, Reply, Round, Run
from storage.records import ObjectivesRecord
from storage.states import AssignmentState

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]

_WIDTH = 120  # columns of a line of `repr`
_SHOWN = ("accuracy/mean", "accuracy/worst5", "accuracy/worst", "loss/train", "loss/test", "improved", "backdoor")
_WARNINGS = 3  # that `repr` shows


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """A run, read from its record.

    Attributes:
        run_id: its id.
        spec: the run specification.
        state: how it ended: COMPLETED, PAUSED when it was interrupted, or FAILED.
        reason: why, unless it was completed.
        model: the last model, float32 (d,).
        attackers: the clients that attacked.
        seconds: duration of the rounds of this call.
        round_records: see `rounds`; the other records likewise.
        warnings: members that fail or work against the step, and rounds in which nobody improves, in words.
    """

    run_id: str
    spec: RunSpec
    state: str
    reason: str
    model: NDArray[np.float32]
    attackers: tuple[str, ...]
    seconds: float
    round_records: tuple[Record, ...]
    client_records: tuple[Record, ...]
    reply_records: tuple[Record, ...]
    objective_records: tuple[Record, ...] = ()
    member_records: tuple[Record, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The run in at most twelve lines."""
        return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        ended = [record for record in self.round_records if record["state"] in ("COMPLETED", "SKIPPED")]
        skipped = sum(record["state"] == "SKIPPED" for record in ended)
        yield f"{self.spec.name} (run {self.run_id}): {self.state}" + (f", {self.reason}" if self.reason else "")
        rounds = f"{len(ended)} of {counted(self.spec.rounds, 'round')}" + (f", {skipped} skipped" if skipped else "")
        yield f"  {self.spec.algorithm.name} on {self.spec.task}: {rounds}, in {self.seconds:.1f} s"
        if self.attackers:
            yield f"  attackers: {', '.join(self.attackers)}"
        evaluated = next((record for record in reversed(ended) if "evaluated" in record), None)
        if evaluated is not None:
            numbers = [f"{name} {evaluated[name]:.4g}" for name in _SHOWN if name in evaluated]
            own = " (personalised models)" if self.spec.parameters.measured == "personalised" else ""
            yield f"  round {evaluated['round']}{own}: {', '.join(numbers)}"
        accepted = sum(record["accepted"] for record in self.reply_records)
        yield f"  replies: {accepted} of {len(self.reply_records)} accepted"
        for warning in self.warnings[:_WARNINGS]:
            yield f"  warning: {warning}"
        if len(self.warnings) > _WARNINGS:
            yield f"  {len(self.warnings) - _WARNINGS} more in .warnings"
        names = ("rounds", "clients", "replies", "members", *(("objectives",) if self.objective_records else ()))
        yield f"  tables: {', '.join(f'.{name}' for name in names)}; .model: float32 {self.model.shape}"

    @property
    def rounds(self) -> "pd.DataFrame":
        """One row for each round: round, state, reason, seconds, and every metric of the round by its name."""
        return _frame(self.round_records)

    @property
    def clients(self) -> "pd.DataFrame":
        """One row for each evaluated round, client and split: round, client, split, loss, accuracy, samples.

        Of several objectives also "loss/<objective>" and "accuracy/<objective>", of those that the client serves; and
        "<metric>" of each of the task's own metrics, "<metric>/<key>" if it has several values.
        """
        return _frame(self.client_records)

    @property
    def replies(self) -> "pd.DataFrame":
        """One row for each client of each round.

        round, client, accepted, reason and message (why not), samples, loss, norm, weight, coefficient, cosine.
        Of a client that was refused in a phase before training there is a row, too.
        """
        return _frame(self.reply_records)

    @property
    def objectives(self) -> "pd.DataFrame":
        """One row for each round that made a step and each objective of a task that has several.

        round, objective, weight (lambda), loss (of the model before the step, the mean over the clients that serve
        it), clients (that counted for it), left_out (why; empty where it was not). What was measured of the model
        after the step is in `rounds`.
        """
        return _frame(self.objective_records)

    @property
    def members(self) -> "pd.DataFrame":
        """One row for each client: in how many rounds it was asked to train, and how these ended.

        client, asked, replied, declined, refused, missing, not_needed, last_reason and last_reason_round (of the last
        reply that did not come or did not count).
        """
        return _frame(self.member_records)


def read_history(
    session: Session, blobs: BlobStore, run: Run, *, attackers: tuple[str, ...], seconds: float
) -> History:
    """Reads a run's record."""
    rounds = session.scalars(select(Round).where(Round.run_id == run.run_id).order_by(Round.number)).all()
    scores = session.execute(
        select(
            Round.number.label("round"),
            Evaluation.client_id.label("client"),
            Evaluation.split,
            Evaluation.loss,
            Evaluation.accuracy,
            Evaluation.samples,
            Evaluation.others,
        )
        .join(Round, Round.round_id == Evaluation.round_id)
        .where(Round.run_id == run.run_id)
        .order_by(Evaluation.round_id, Evaluation.client_id, Evaluation.split)
    )
    client_records = [dict(row) for row in scores.mappings()]
    participation = Participation()
    for ended in read_rounds(session, run.run_id):
        participation.add(ended)
    return History(
        run_id=run.run_id,
        spec=RunSpec.parse(run.spec),
        state=run.state,
        reason=run.reason,
        model=model_row(blobs.local(run.model)).read(),
        attackers=attackers,
        seconds=seconds,
        round_records=tuple(
            {
                "round": round_.number,
                "state": str(round_.state),
                "reason": round_.reason,
                "seconds": (round_.ended - round_.started).total_seconds() if round_.ended else None,
                **round_.metrics,
            }
            for round_ in rounds
        ),
        client_records=tuple(record | record.pop("others") for record in client_records),
        reply_records=tuple(_reply_records(session, run.run_id)),
        objective_records=tuple(record for round_ in rounds for record in _objective_records(round_)),
        member_records=tuple(map(_member_record, participation.members)),
        warnings=tuple(warning.message for warning in participation.warnings),
    )


def _member_record(member: MemberSummary) -> Record:
    return {
        "client": member.client_id,
        "asked": member.asked,
        **{outcome.lower(): member.outcomes[outcome] for outcome in Outcome},
        "last_reason": member.last_reason,
        "last_reason_round": member.last_reason_round,
    }


def _objective_records(round_: Round) -> list[Record]:
    told = ObjectivesRecord.decode(round_.objectives)
    if told is None:
        return []
    return [
        {
            "round": round_.number,
            "objective": name,
            "weight": told.weights.get(name),
            "loss": told.losses.get(name),
            "clients": told.clients.get(name, 0),
            "left_out": told.left_out.get(name, ""),
        }
        for name in told.names
    ]


def _reply_records(session: Session, run_id: str) -> list[Record]:
    deciding = aliased(Phase)
    last = select(func.max(deciding.number)).where(deciding.round_id == Round.round_id, deciding.decides)
    final = last.correlate(Round).scalar_subquery()
    # Columns, not objects: the manifests of a long run do not fit into memory.
    rows = session.execute(
        select(
            Round.number.label("round"),
            Assignment.client_id.label("client"),
            (Assignment.state == AssignmentState.FULFILLED).label("accepted"),
            Assignment.reason,
            Assignment.message,
            Reply.samples,
            Reply.losses.label("loss"),
            Reply.norm,
            Reply.weight,
            Reply.coefficient,
            Reply.cosine,
            Reply.privacy.label("epsilon"),
        )
        .join(Phase, Phase.round_id == Round.round_id)
        .join(Assignment, Assignment.phase_id == Phase.phase_id)
        .outerjoin(Reply, Reply.assignment_id == Assignment.assignment_id)
        .where(
            Round.run_id == run_id,
            Phase.decides,
            or_(Phase.number == final, Assignment.state != AssignmentState.FULFILLED),
        )
        .order_by(Round.number, Phase.number, Assignment.client_id)
    )
    return [
        {**row, "loss": _loss(row["loss"] or {}), "epsilon": (row["epsilon"] or {}).get("epsilon")}
        for row in rows.mappings()
    ]


def _loss(losses: dict[str, float]) -> float | None:
    return losses.get("loss", next(iter(losses.values()), None))


def _frame(records: tuple[Record, ...]) -> "pd.DataFrame":
    try:
        import pandas as pd  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError("tables need pandas: install fedpareto[experiments]", name="pandas") from None
    return pd.DataFrame.from_records(list(records))
