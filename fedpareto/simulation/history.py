"""The results of a simulation: numbers in memory, as tables for a notebook."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from coordinator.alerts.about_rounds import read_facts
from coordinator.rounds.runs.participation import MemberSummary, RoundOutcome
from coordinator.services.views.details import export_rounds
from federation.spec.run_spec import RunSpec
from federation.text import counted
from federation.v1.admin_pb2 import ExportRoundsResponse, RoundSummary
from federation.v1.common_pb2 import RoundState
from federation.vectors import model_row
from fedpareto.run_table import Outcome, parts_of
from storage.blobs import BlobStore
from storage.models import Run

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]

_ROUNDS_AT_A_TIME = 20  # of the record: the memory that reading takes
_WIDTH = 120  # columns of a line of `repr`
_HEAD = 3  # lines for the end of the run
_SHOWN = ("accuracy/mean", "accuracy/worst5", "accuracy/worst", "loss/train", "loss/test", "improved", "backdoor")
_WARNINGS = 3  # that `repr` shows


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """A run, read from its record.

    Attributes:
        run_id: its id.
        spec: the run specification.
        state: COMPLETED, PAUSED if it was interrupted, or FAILED.
        reason: the cause, unless it was completed.
        model: the last model, float32 (d,).
        attackers: the clients that attacked.
        seconds: duration of the rounds of this call.
        round_records: see `rounds`; the other records likewise.
        warnings: the alerts that last after the last round, in words: members that fail, or whose updates are far
            longer than the others', rounds in which nobody improves, and so on. The first ones are about measurements
            of this call that were left out.
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
        why = self.failure if self.state == "FAILED" else self.reason
        ended = f"{self.spec.name} (run {self.run_id}): {self.state}" + (f", {why}" if why else "")
        head = textwrap.wrap(ended, _WIDTH, subsequent_indent="    ", max_lines=_HEAD, placeholder=" …")
        lines = (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in self._lines())
        return "\n".join([*head, *lines])

    @property
    def failure(self) -> str:
        """The most frequent reason of failed answers with the words of the last client that gave it, then `reason`."""
        failed = [record for record in self.reply_records if not record["accepted"]]
        if not failed:
            return self.reason
        counts = Counter(record["reason"] for record in failed)
        first = min(counts, key=lambda reason: (-counts[reason], reason))
        message = next(record["message"] for record in reversed(failed) if record["reason"] == first)
        return f"{first}: {message}; {self.reason}" if message else f"{first}; {self.reason}"

    def _lines(self) -> Iterator[str]:
        ended = [record for record in self.round_records if record["state"] in ("COMPLETED", "SKIPPED")]
        skipped = sum(record["state"] == "SKIPPED" for record in ended)
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

        round, client, accepted, reason and message (of a refusal), samples, loss, norm, weight, coefficient, cosine.
        A client that was refused in a phase before training has a row, too.
        """
        return _frame(self.reply_records)

    @property
    def objectives(self) -> "pd.DataFrame":
        """One row for each round that made a step and each objective of a task that has several.

        round, objective, weight (lambda), loss (of the model before the step, the mean over the clients that serve
        it), clients (that counted for it), left_out (the reason; empty if it was not). The metrics of the model
        after the step are in `rounds`.
        """
        return _frame(self.objective_records)

    @property
    def members(self) -> "pd.DataFrame":
        """One row for each client: the number of rounds in which it was asked to train, and of their outcomes.

        client, asked, replied, declined, refused, missing, not_needed, last_reason and last_reason_round (of the last
        reply that did not come or did not count).
        """
        return _frame(self.member_records)


def read_history(
    session: Session,
    blobs: BlobStore,
    run: Run,
    *,
    attackers: tuple[str, ...],
    seconds: float,
    notes: tuple[str, ...] = (),
) -> History:
    """Reads a run's record, as the Admin service exports it; `notes` are further warnings."""
    facts = read_facts(session, run)
    participation = facts.participation
    tables: dict[str, list[Record]] = {"round": [], "client": [], "reply": [], "objective": []}
    while exported := export_rounds(session, run.run_id, len(tables["round"]), _ROUNDS_AT_A_TIME):
        for item in exported:
            tables["round"].append(_round_record(item.summary))
            tables["client"] += _client_records(item)
            tables["reply"] += _reply_records(item)
            tables["objective"] += _objective_records(item)
    return History(
        run_id=run.run_id,
        spec=RunSpec.parse(run.spec),
        state=run.state,
        reason=run.reason,
        model=np.array(model_row(blobs.local(run.model)).read()),  # in memory: its file may go with the record
        attackers=attackers,
        seconds=seconds,
        member_records=tuple(map(_member_record, participation.members)),
        warnings=(*notes, *(f"{fact.message}; {fact.remedy}" for fact in facts.open)),
        **{f"{name}_records": tuple(records) for name, records in tables.items()},
    )


def _round_record(summary: RoundSummary) -> Record:
    return {
        "round": summary.round,
        "state": RoundState.Name(summary.state).removeprefix("ROUND_STATE_"),
        "reason": summary.reason,
        "seconds": _known(summary.seconds),
        "undisclosed": list(summary.undisclosed),
        **dict(sorted(summary.metrics.items())),
    }


def _client_records(item: ExportRoundsResponse) -> Iterator[Record]:
    for client in item.scores:
        first = {"round": item.summary.round, "client": client.client_id}
        splits: dict[str, Record] = {}
        for name, value in sorted(client.scores.items()):
            split, _, measure = name.partition("/")
            splits.setdefault(split, {**first, "split": split, "loss": None, "accuracy": None})[measure] = value
        yield from ({**record, "samples": int(record["samples"])} for record in splits.values())


def _reply_records(item: ExportRoundsResponse) -> Iterator[Record]:
    for part in parts_of(item):
        if part.outcome is Outcome.REPLIED and not part.counts:
            continue  # the round went on without asking it again
        reason, _, message = part.reason.partition(": ")
        yield {
            "round": item.summary.round,
            "client": part.name,
            "accepted": part.counts,
            "reason": reason,
            "message": message,
            "samples": part.samples,
            **{name: _known(value) for name, value in part.numbers.items()},
            "epsilon": part.epsilon,
        }


def _objective_records(item: ExportRoundsResponse) -> Iterator[Record]:
    for result in item.objectives.results:
        yield {
            "round": item.summary.round,
            "objective": result.name,
            "weight": _known(result.weight),
            "loss": _known(result.loss),
            "clients": result.clients,
            "left_out": result.left_out,
        }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _member_record(member: MemberSummary) -> Record:
    return {
        "client": member.client_id,
        "asked": member.asked,
        **{outcome.lower(): member.outcomes[outcome] for outcome in RoundOutcome},
        "last_reason": member.last_reason,
        "last_reason_round": member.last_reason_round,
    }


def _frame(records: tuple[Record, ...]) -> "pd.DataFrame":
    try:
        import pandas as pd  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError("tables need pandas: install fedpareto[experiments]", name="pandas") from None
    return pd.DataFrame.from_records(list(records))
