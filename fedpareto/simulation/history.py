"""The results of a run: numbers in memory, as tables, pictures and a model for a notebook."""

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from coordinator.alerts.about_rounds import read_facts
from coordinator.rounds.runs.participation import RoundOutcome
from coordinator.services.views import overview, watching
from coordinator.services.views.details import export_rounds
from federation.errors import ArgumentError, ArgumentTypeError
from federation.spec.run_spec import RunSpec
from federation.text import counted
from federation.v1.admin_pb2 import ExportRoundsResponse, MemberSummary, RoundSummary
from federation.v1.admin_pb2 import Run as RunMessage
from federation.v1.common_pb2 import RoundState
from federation.vectors import Layout, read_vector
from fedpareto.admin_messages import name_of
from fedpareto.missing_packages import need
from fedpareto.run_table import Outcome, parts_of
from storage.blobs import BlobStore
from storage.models import Run

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes

    from federation.tasks import Task

Record = dict[str, Any]

_ROUNDS_AT_A_TIME = 20  # of the record: the memory that reading takes
_WIDTH = 120  # columns of a line of `repr`
_HEAD = 3  # lines for the end of the run
_SHOWN = ("accuracy/mean", "accuracy/worst5", "accuracy/worst", "loss/train", "loss/test", "improved", "backdoor")
_WARNINGS = 3  # that `repr` shows
_DRAWN = ("accuracy/mean", "accuracy/worst")  # by `plot`, if the run has them
_DRAWN_ELSE = ("loss/train", "loss/test")


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """A run, read from its record.

    Attributes:
        run_id: its id.
        spec: the run specification.
        state: COMPLETED, PAUSED if it was interrupted, or FAILED.
        reason: the cause, unless it was completed.
        model: the model that the last evaluated numbers are of, float32 (d,): the last one, or, of a rule such as AFL,
            the mean of the models after all steps.
        attackers: the clients that attacked.
        seconds: duration of the rounds of this call.
        round_records: see `rounds`; the other records likewise.
        warnings: the alerts that last after the last round, in words: members that fail, or whose updates are far
            longer than the others', rounds in which nobody improves, and so on. The first ones are about measurements
            of this call that were left out.
        statistics: what a run that describes data has shown, as its JSON document says; None of other runs.
        layout: the names and shapes of the model's tensors; None of a run whose model is not known.
        task: the class of the task, if the call was given one; otherwise None, and `spec.task` names it.
        message, exported: the run and its rounds as the Admin service tells them, serialised; for the picture.
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
    statistics: "Mapping[str, Any] | None" = None
    layout: Layout | None = None
    task: "type[Task] | None" = None
    message: bytes = b""
    exported: tuple[bytes, ...] = ()

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
        yield f"  {self.spec.does} on {self.spec.task}: {rounds}, in {self.seconds:.1f} s"
        if self.attackers:
            yield f"  attackers: {', '.join(self.attackers)}"
        evaluated = next((record for record in reversed(ended) if "evaluated" in record), None)
        if evaluated is not None:
            numbers = [f"{name} {evaluated[name]:.4g}" for name in _SHOWN if name in evaluated]
            own = " (personalised models)" if self.spec.parameters.measured == "personalised" else ""
            yield f"  round {evaluated['round']}{own}: {', '.join(numbers)}"
        if self.statistics is not None:
            columns, samples = len(self.statistics["columns"]), self.statistics["samples"]
            yield f"  {counted(columns, 'column')} of {samples:,} samples of {len(self.statistics['members'])} members"
            return
        accepted = sum(record["accepted"] for record in self.reply_records)
        yield f"  replies: {accepted} of {len(self.reply_records)} accepted"
        for warning in self.warnings[:_WARNINGS]:
            yield f"  warning: {warning}"
        if len(self.warnings) > _WARNINGS:
            yield f"  {len(self.warnings) - _WARNINGS} more in .warnings"
        names = ("rounds", "clients", "replies", "members", *(("objectives",) if self.objective_records else ()))
        yield f"  tables: {', '.join(f'.{name}' for name in names)}; .model: float32 {self.model.shape}"

    def _repr_html_(self) -> str | None:
        """The picture in a notebook: the verdict, the members' curves, and each member at the end."""
        if not self.message:
            return None
        from fedpareto.web.report import summary  # noqa: PLC0415 - only a notebook needs the drawings
        from fedpareto.web.sections.shown_run import ShownRun  # noqa: PLC0415

        rounds = map(ExportRoundsResponse.FromString, self.exported)
        return summary(ShownRun.of(RunMessage.FromString(self.message), rounds))

    def plot(self, *metrics: str, axes: "Axes | None" = None) -> "Axes":
        """Draws numbers of the rounds with matplotlib: by default the mean and the worst accuracy, else the losses.

        Args:
            metrics: columns of `rounds`.
            axes: draws into these, such as those of another run; None makes new ones.

        Raises:
            PackagesMissing: matplotlib is not installed.
            ArgumentError: no round has a number of this name.
        """
        need("plot() needs", "matplotlib", extra="experiments")
        import matplotlib.pyplot as plt  # noqa: PLC0415 - an extra

        names = {name for record in self.round_records for name, value in record.items() if isinstance(value, float)}
        if absent := [name for name in metrics if name not in names]:
            raise ArgumentError(f"no round has the number {absent[0]!r}; there are: {', '.join(sorted(names))}")
        chosen = metrics or next(
            (there for group in (_DRAWN, _DRAWN_ELSE) if (there := tuple(name for name in group if name in names))), ()
        )
        if not chosen:
            raise ArgumentError(f"{self.spec.name} has no evaluated round to draw; name numbers of its rounds")
        drawn = plt.subplots()[1] if axes is None else axes
        for name in chosen:
            points = [(record["round"], record[name]) for record in self.round_records if name in record]
            drawn.plot([at for at, _ in points], [value for _, value in points], label=f"{self.spec.name}: {name}")
        drawn.set_xlabel("round")
        drawn.legend()
        return drawn

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """The tensors of the last model by name, as `load_state_dict` of PyTorch takes them.

        They are the parameters that the run shares, and averaged buffers; all are float32.

        Raises:
            PackagesMissing: PyTorch is not installed.
        """
        if self.layout is None:
            raise ArgumentError(f"the model of {self.spec.name} is not known; `warnings` of the run say why")
        return tensors(self.layout, self.model)

    def module(self, task: "type[Task] | None" = None) -> "torch.nn.Module":
        """The task's model with the last values, in evaluation mode.

        Parameters that the run does not share have the values with which each member builds the model.

        Args:
            task: the class of the task; None takes that of the run.

        Raises:
            PackagesMissing: PyTorch is not installed.
            TaskError: the task is not on this machine, or has no PyTorch model.
            ArgumentError: the model is of another task, or not known.
        """
        state = self.state_dict()
        from federation import tasks  # noqa: PLC0415 - with the next one
        from federation.tasks.parameters import build  # noqa: PLC0415 - it imports PyTorch

        kind = task or self.task
        module = build(tasks.task(self.spec.task) if kind is None else tasks.task_of(kind, self.spec.task))
        own = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if foreign := [name for name, tensor in state.items() if own.get(name) != tuple(tensor.shape)]:
            raise ArgumentError(
                f"the model of {self.spec.name} has {foreign[0]} {tuple(state[foreign[0]].shape)}, "
                f"the task's has {own.get(foreign[0], 'no such tensor')}: give the task of the run"
            )
        module.load_state_dict(state, strict=False)
        return module.eval()

    def compare(self, *others: "History") -> "pd.DataFrame":
        """Runs beside each other: one column for each, and one row for each number of the last evaluated round.

        A run that measures models has a column for each model.
        Rows before these: algorithm, state, rounds (that ended), evaluated (after which round).

        Raises:
            ArgumentError: one of them is a run of another task.
        """
        for other in others:
            if not isinstance(other, History):
                raise ArgumentTypeError(f"compare() takes runs, such as simulate() returns, not {type(other).__name__}")
            if other.spec.task != self.spec.task and (self.task is None or other.task is not self.task):
                raise ArgumentError(
                    f"{other.spec.name} is a run of {other.spec.task}, {self.spec.name} one of {self.spec.task}; only "
                    "runs of the same task compare"
                )
        runs = (self, *others)
        named = Counter(run.spec.name for run in runs)
        titles = [
            run.spec.name if named[run.spec.name] == 1 else f"{run.spec.name} ({at})" for at, run in enumerate(runs, 1)
        ]
        named_runs = zip(titles, runs, strict=True)
        columns = [(title + model, column) for title, run in named_runs for model, column in run._columns()]
        frame = _frame(tuple(column for _, column in columns)).T
        frame.columns = [title for title, _ in columns]
        return frame

    def _columns(self) -> Iterator[tuple[str, Record]]:
        """The numbers of the last evaluated round, or of each model, after what the run is; and the model in words."""
        ended = [record for record in self.round_records if record["state"] in ("COMPLETED", "SKIPPED")]
        evaluated = [record for record in ended if "evaluated" in record] or [{}]
        for last in evaluated[-1:] if self.spec.trains else evaluated:
            yield "" if self.spec.trains else f", model {last.get('round', 0)}", self._column(ended, last)

    def _column(self, ended: Sequence[Record], last: Record) -> Record:
        numbers = {name: value for name, value in last.items() if isinstance(value, float) and name != "evaluated"}
        first = {
            "algorithm": self.spec.does,
            "state": self.state,
            "rounds": len(ended),
        }
        return {**first, "evaluated": last.get("round"), **numbers}

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


def tensors(layout: Layout, model: NDArray[np.float32]) -> "dict[str, torch.Tensor]":
    """A model's tensors by name, as copies. Raises PackagesMissing: PyTorch is not installed."""
    need("state_dict() needs", "torch", extra="torch")
    import torch  # noqa: PLC0415 - an extra

    return {name: torch.tensor(values) for name, values in layout.split(model).items()}


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
    message = overview.run(session, run, spec=True)
    watching.add_members(message, facts.participation)
    layout, model = read_vector(blobs.local(message.model))  # with AFL, not the one that the next round begins with

    def exported() -> Iterator[ExportRoundsResponse]:
        done = 0
        while items := export_rounds(session, run.run_id, done, _ROUNDS_AT_A_TIME):
            yield from items
            done += len(items)

    return history_of(
        message,
        exported(),
        (layout, np.array(model)),  # in memory: its file may go with the record
        attackers=attackers,
        seconds=seconds,
        warnings=(*notes, *(f"{fact.message}; {fact.remedy}" for fact in facts.open)),
    )


def history_of(
    run: RunMessage,
    rounds: Iterable[ExportRoundsResponse],
    model: tuple[Layout | None, NDArray[np.float32]],
    *,
    attackers: tuple[str, ...] = (),
    seconds: float,
    warnings: tuple[str, ...],
    task: "type[Task] | None" = None,
) -> History:
    """A run as the Admin service tells of it: with its specification and members, its rounds, and its model."""
    tables: dict[str, list[Record]] = {"round": [], "client": [], "reply": [], "objective": []}
    exported, document = [], b""
    for item in rounds:
        document = item.document or document
        exported.append(item.SerializeToString())
        tables["round"].append(_round_record(item.summary))
        tables["client"] += _client_records(item)
        tables["reply"] += _reply_records(item)
        tables["objective"] += _objective_records(item)
    return History(
        run_id=run.run_id,
        spec=RunSpec.parse(run.spec),
        state=name_of(run, "state"),
        reason=run.reason,
        model=model[1],
        attackers=attackers,
        seconds=seconds,
        member_records=tuple(map(_member_record, run.members)),
        warnings=warnings,
        statistics=json.loads(document) if document else None,
        layout=model[0],
        task=task,
        message=run.SerializeToString(),
        exported=tuple(exported),
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
        **{outcome.lower(): getattr(member, outcome.lower()) for outcome in RoundOutcome},
        "last_reason": member.last_reason,
        "last_reason_round": member.last_reason_round,
    }


def _frame(records: tuple[Record, ...]) -> "pd.DataFrame":
    need("tables need", "pandas", extra="experiments")
    import pandas as pd  # noqa: PLC0415 - an extra

    return pd.DataFrame.from_records(list(records))
