"""The results of the demo's runs, read from the coordinator's record, and tables that compare them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from federation.v1.admin_pb2 import ExportRoundsRequest, ExportRoundsResponse, GetRunRequest, Run
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.formatting import UNKNOWN, number, percent, size
from fedpareto.messages import name_of
from fedpareto.series import mean, metric

OBJECTIVES = ("left", "right")
_ACCURACIES = ("mean", "std", "worst5", "best5", "worst", "best")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: COMPLETED if all went well; otherwise `reason` says why. The digest is of the final model."""

    run_id: str
    name: str
    algorithm: str
    state: str
    reason: str
    rounds_done: int
    model: str


@dataclass(frozen=True, kw_only=True)
class Outcome(Ended):
    """The result of a run with one objective.

    Attributes:
        attacked: whether one member was malicious.
        seconds: from its first round to its last.
        accuracy: of the members on their own test parts after the last evaluated round: "mean", "std", "worst5",
            "best5", "worst", "best", in [0, 1].
        improved: the share of participants whose training loss did not rise in a round, averaged over the rounds.
        weight: lambda of the watched member, averaged over the rounds.
        pull: the watched member's share of sum |c_i| ||u_i|| of the step, averaged over the rounds.
    """

    attacked: bool
    seconds: float
    accuracy: dict[str, float]
    improved: float
    weight: float
    pull: float


@dataclass(frozen=True, kw_only=True)
class Served(Ended):
    """The result of a run with two objectives.

    Attributes:
        accuracy: of each objective, over the members that serve it, after the last evaluated round, in [0, 1].
        loss: of each objective, likewise.
        bytes_up: what one member sent in a round, on average.
    """

    accuracy: dict[str, float]
    loss: dict[str, float]
    bytes_up: float


def _read(stub: AdminStub, run_id: str) -> tuple[Run, list[ExportRoundsResponse], dict[str, Any]]:
    """A run, its rounds, and the fields of `Ended`."""
    run = stub.GetRun(GetRunRequest(run=run_id)).run
    return run, list(stub.ExportRounds(ExportRoundsRequest(run=run_id))), how_it_ended(run)


def how_it_ended(run: Run) -> dict[str, Any]:
    """The fields of `Ended`."""
    names = ("run_id", "name", "algorithm", "reason", "rounds_done", "model")
    return {**{name: getattr(run, name) for name in names}, "state": name_of(run, "state")}


def outcome(stub: AdminStub, run_id: str, *, attacked: bool, watched: str) -> Outcome:
    """Reads the result of a run with one objective; `watched` is the member that is malicious if `attacked`."""
    run, rounds, ended = _read(stub, run_id)
    shares = [_shares(item, watched) for item in rounds]
    over = run.HasField("started") and run.HasField("ended")
    return Outcome(
        **ended,
        attacked=attacked,
        seconds=(run.ended.ToNanoseconds() - run.started.ToNanoseconds()) / 1e9 if over else math.nan,
        accuracy={name: metric(run.latest, f"accuracy/{name}") for name in _ACCURACIES},
        improved=mean(metric(item.summary, "improved") for item in rounds),
        weight=mean(weight for weight, _ in shares),
        pull=mean(pull for _, pull in shares),
    )


def served(stub: AdminStub, run_id: str) -> Served:
    """Reads the result of a run with two objectives."""
    run, rounds, ended = _read(stub, run_id)
    sent = [metric(item.summary, "bytes/up") / max(1, item.summary.accepted) for item in rounds]
    return Served(
        **ended,
        accuracy={name: metric(run.latest, f"accuracy/objective/{name}") for name in OBJECTIVES},
        loss={name: metric(run.latest, f"loss/test/{name}") for name in OBJECTIVES},
        bytes_up=sum(sent) / len(sent) if sent else math.nan,
    )


def _shares(detail: ExportRoundsResponse, watched: str) -> tuple[float, float]:
    """The lambda of a member and its share of the step; NaN where it took no part."""
    pulls = {
        part.client_id: abs(part.coefficient) * part.update_norm
        for part in detail.participations
        if math.isfinite(part.coefficient)
    }
    weights = {part.client_id: part.weight for part in detail.participations}
    total = sum(pulls.values())
    pull = pulls[watched] / total if watched in pulls and total > 0 else math.nan
    return weights.get(watched, math.nan), pull


def table(outcomes: Sequence[Outcome], watched: str) -> Table:
    """Runs with one objective side by side."""
    rows: dict[str, Callable[[Outcome], str]] = {
        "average": lambda item: percent(item.accuracy["mean"]),
        "standard deviation": lambda item: percent(item.accuracy["std"]),
        "worst 5 %": lambda item: percent(item.accuracy["worst5"]),
        "best 5 %": lambda item: percent(item.accuracy["best5"]),
        "improved participants": lambda item: percent(item.improved),
        f"weight of {watched} (lambda)": lambda item: number(item.weight),
        f"pull of {watched} on the step": lambda item: percent(item.pull),
        "rounds": lambda item: str(item.rounds_done),
        "time": lambda item: f"{item.seconds:.1f} s" if math.isfinite(item.seconds) else UNKNOWN,
    }
    heads = [f"{item.algorithm}\n{'attacked' if item.attacked else 'all honest'}" for item in outcomes]
    found = _side_by_side("Accuracy of the members on their own test data", heads, outcomes, rows)
    found.caption = (
        "Improved participants, weight and pull are averages over the rounds. Pull is the share of "
        f"sum |c_i| ||u_i||. {watched} is the attacker where there is one."
    )
    return found


def table_of_objectives(outcomes: Sequence[Served]) -> Table:
    """Runs with two objectives side by side."""
    left, right = OBJECTIVES
    rows: dict[str, Callable[[Served], str]] = {
        f"accuracy, {left} digit": lambda item: percent(item.accuracy[left]),
        f"accuracy, {right} digit": lambda item: percent(item.accuracy[right]),
        f"loss, {left} digit": lambda item: number(item.loss[left]),
        f"loss, {right} digit": lambda item: number(item.loss[right]),
        "upload of a member, each round": lambda item: size(item.bytes_up),
    }
    return _side_by_side("Two objectives, one model", [item.algorithm for item in outcomes], outcomes, rows)


def _side_by_side(
    title: str, heads: Sequence[str], items: Sequence[Any], rows: dict[str, Callable[[Any], str]]
) -> Table:
    found = Table(title=title, title_justify="left", caption_justify="left")
    found.add_column("")
    for head in heads:
        found.add_column(head, justify="right")
    for name, words in rows.items():
        found.add_row(name, *map(words, items))
    return found
