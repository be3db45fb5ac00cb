"""The demo's second act: the same federation learns two objectives, of which one member serves one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from federation.v1.admin_pb2 import ExportRoundsRequest, GetRunRequest
from fedpareto import formatting
from fedpareto.cli import render, watch
from fedpareto.cli.upload import made_model, submit
from fedpareto.messages import name_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from federation.v1.admin_pb2_grpc import AdminStub
    from fedpareto.cli.rehearsal import Rehearsal

TASK = "two-digits"
OBJECTIVES = ("left", "right")

_SPEC = """\
name = "{name}"
task = "{task}"
rounds = {rounds}
seed = {seed}

[algorithm]
{algorithm}

[train]
steps = 15
batch_size = 20
learning_rate = 0.4

[selection]
minimum = {members}  # a round waits until this number of members attends
"""
_ALGORITHMS = {
    "scalarised": 'name = "scalarised"',
    "fsmgda": 'name = "fsmgda"',
    "fedcmoo": 'name = "fedcmoo"\nweights = "exact"\nbudget = 0.1',
}


@dataclass(frozen=True)
class Served:
    """How a run served its objectives.

    Attributes:
        run_id: its id.
        name: its name.
        algorithm: its algorithm.
        state: how it ended, COMPLETED if all went well.
        reason: why, if it did not.
        rounds_done: rounds that ended.
        accuracy: of each objective, over the members that serve it, after the last evaluated round, in [0, 1].
        loss: of each objective, likewise.
        bytes_up: what one member sent in a round, on average.
        model: the digest of the final model.
    """

    run_id: str
    name: str
    algorithm: str
    state: str
    reason: str
    rounds_done: int
    accuracy: dict[str, float]
    loss: dict[str, float]
    bytes_up: float
    model: str


def perform(console: "Console", rehearsal: "Rehearsal", stub: "AdminStub", rounds: int, seed: int) -> list[Served]:
    """Each algorithm from the same model with the same seed, one after the other."""
    initial = made_model(TASK, seed)
    found = []
    for short, algorithm in _ALGORITHMS.items():
        name = f"{short}-objectives"
        members = len(rehearsal.names)
        text = _SPEC.format(name=name, task=TASK, rounds=rounds, seed=seed, algorithm=algorithm, members=members)
        spec = rehearsal.keep_spec(name, text)
        console.print(f"\n{name}  ({spec})", style="bold")
        run_id = submit(stub, text.encode(), initial).run.run_id
        watch.show(stub, run_id, console)
        found.append(_served(stub, run_id))
    return found


def _served(stub: "AdminStub", run_id: str) -> Served:
    run = stub.GetRun(GetRunRequest(run=run_id)).run
    sent = [
        item.summary.metrics.get("bytes/up", math.nan) / max(1, item.summary.accepted)
        for item in stub.ExportRounds(ExportRoundsRequest(run=run_id))
    ]
    return Served(
        run_id=run.run_id,
        name=run.name,
        algorithm=run.algorithm,
        state=name_of(run, "state"),
        reason=run.reason,
        rounds_done=run.rounds_done,
        accuracy={name: render.metric(run.latest, f"accuracy/objective/{name}") for name in OBJECTIVES},
        loss={name: render.metric(run.latest, f"loss/test/{name}") for name in OBJECTIVES},
        bytes_up=sum(sent) / len(sent) if sent else math.nan,
        model=run.model,
    )


def table(outcomes: Sequence[Served]) -> "Table":
    """Runs side by side."""
    from rich.table import Table  # noqa: PLC0415

    found = Table(title="Two objectives, one model", title_justify="left")
    found.add_column("")
    for item in outcomes:
        found.add_column(item.algorithm, justify="right")
    for name in OBJECTIVES:
        found.add_row(f"accuracy, {name} digit", *(formatting.percent(item.accuracy[name]) for item in outcomes))
    for name in OBJECTIVES:
        found.add_row(f"loss, {name} digit", *(formatting.number(item.loss[name]) for item in outcomes))
    found.add_row("upload of a member, each round", *(formatting.size(item.bytes_up) for item in outcomes))
    return found
