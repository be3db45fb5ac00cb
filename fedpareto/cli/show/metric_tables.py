"""Tables of a task's own metrics, and of several runs beside each other."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from federation.record.metric_definitions import OWN, SUMMARIES
from federation.v1.admin_pb2 import GetRoundRequest, Participation, RoundSummary, Run
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import name_of
from fedpareto.cli.show.tables import NAME_WIDTH, new_table, state
from fedpareto.formatting import DIGITS, UNKNOWN, natural, number, recorded, seconds, short, size
from fedpareto.run_names import EVALUATE
from fedpareto.series import known, metric, own_names, own_values

_COLUMNS = 6  # metrics that the table of members has room for


def own_metrics(summary: RoundSummary) -> RenderableType:
    """A row for each value of the task's metrics: mean, mean by samples, worst and best member."""
    table = new_table("metric", *(f">{of}" for of in SUMMARIES))
    for name in own_names(summary.metrics):
        names = (f"{OWN}{name}/{of}" for of in SUMMARIES)
        table.add_row(name, *(recorded(full, summary.metrics, summary.undisclosed) for full in names))
    return table


def members_at_the_end(stub: AdminStub, run: Run) -> list[RenderableType]:
    """The tables of `members` after the last evaluated round of a run."""
    if not own_names(run.latest.metrics):
        return []
    request = GetRoundRequest(run=run.run_id, round=run.latest.round)
    return list(members(stub.GetRound(request).participations))


def members(parts: Sequence[Participation]) -> Iterator[RenderableType]:
    """The task's metrics by member, each on the first split that the member evaluated."""
    values_by_client = {part.client_id: own_values(part.evaluation) for part in parts}
    names = sorted({name for values in values_by_client.values() for name in values})
    if not names:
        return
    table = new_table("member", *(f">{name}" for name in names[:_COLUMNS]))
    for client, values in sorted(values_by_client.items(), key=lambda row: natural(row[0])):
        table.add_row(client, *(number(values.get(name, math.nan)) for name in names[:_COLUMNS]))
    yield table
    if more := names[_COLUMNS:]:
        yield Text(f"{len(more)} more with --json: {', '.join(more[:_COLUMNS])}{', ...' if more[_COLUMNS:] else ''}")


def comparison(runs: Sequence[tuple[Run, Sequence[RoundSummary]]]) -> dict[str, Any]:
    """Several runs beside each other: their states, the numbers of the last evaluated round, and their costs.

    A run that measures models is there once for each model that it has measured. A number that a run does not have is
    not there; `undisclosed` names those that privacy hides.
    """
    compared_runs = []
    shown = [(run, rounds, latest) for run, rounds in runs for latest in _shown(run, rounds)]
    for run, rounds, latest in shown:
        measures = run.algorithm == EVALUATE
        of_run = [latest] if measures else rounds
        scores = {name: value for name, value in sorted(latest.metrics.items()) if math.isfinite(value)}
        compared_runs.append(
            {
                "run": run.run_id,
                "name": run.name,
                "task": run.task,
                "algorithm": run.algorithm,
                "state": name_of(run, "state"),
                "reason": run.reason,
                "rounds": run.rounds_done,
                "model": latest.base_model if measures else "",
                "evaluated_round": latest.round if measures or run.HasField("latest") else None,
                "metrics": scores,
                "undisclosed": list(latest.undisclosed),
                "bytes_up": math.fsum(known(metric(item, "bytes/up") for item in of_run)),
                "bytes_down": math.fsum(known(metric(item, "bytes/down") for item in of_run)),
                "seconds": math.fsum(known(item.seconds for item in of_run)),
            }
        )
    return {"runs": compared_runs}


def _shown(run: Run, rounds: Sequence[RoundSummary]) -> list[RoundSummary]:
    """The rounds of a run that are compared: the last evaluated one, or each that has measured a model."""
    if run.algorithm != EVALUATE:
        return [run.latest]
    return [summary for summary in rounds if "evaluated" in summary.metrics] or [run.latest]


def compared(comparison: Mapping[str, Any], created: Mapping[str, str]) -> RenderableType:
    """A comparison as a table: a column for each run or model, a row for each number.

    `created` says when each run was submitted, by its id.
    """
    runs = comparison["runs"]
    table = new_table("", *(f">{run['name'][:NAME_WIDTH]}" for run in runs))

    def row(title: str, text: Callable[[Any], Any]) -> None:
        table.add_row(title, *(text(run) for run in runs))

    row("run", lambda run: run["run"][:DIGITS])
    row("created", lambda run: created[run["run"]])
    row("task", lambda run: run["task"])
    row("algorithm", lambda run: run["algorithm"])
    row("state", lambda run: state(run["state"]))
    if any(run["model"] for run in runs):
        row("model", lambda run: short(run["model"]) or UNKNOWN)
    row("rounds", lambda run: str(run["rounds"]))
    row("evaluated after", lambda run: UNKNOWN if run["evaluated_round"] is None else f"round {run['evaluated_round']}")
    for name in _compared({name for run in runs for name in (*run["metrics"], *run["undisclosed"])}):
        table.add_row(name, *(recorded(name, run["metrics"], run["undisclosed"]) for run in runs))
    row("bytes up", lambda run: size(run["bytes_up"]))
    row("bytes down", lambda run: size(run["bytes_down"]))
    row("time", lambda run: seconds(run["seconds"]))
    notes = [Text(f"{run['name']}: {run['reason']}") for run in runs if run["reason"]]
    if len({run["task"] for run in runs}) > 1:
        notes.append(Text("These runs have different tasks: their numbers are not comparable.", style="yellow"))
    return Group(table, *notes)


def _compared(recorded_names: Set[str]) -> list[str]:
    """The numbers that are worth a row, in order, of those that a run has or hides."""
    names = (
        *(f"accuracy/{name}" for name in ("mean", "weighted", "std", "worst5", "worst")),
        *(f"loss/{split}" for split in ("train", "validation", "test")),
        *(f"{OWN}{name}/{of}" for name in own_names(recorded_names) for of in SUMMARIES if of != "best"),
        *("improved", "epsilon/clients", "epsilon/samples"),
    )
    return [name for name in names if name in recorded_names]
