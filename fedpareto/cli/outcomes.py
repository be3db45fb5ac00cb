"""What a run came to, read from the coordinator's record, and the table that sets runs side by side."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from federation.v1.admin_pb2 import ExportRoundsRequest, ExportRoundsResponse, GetRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto import formatting
from fedpareto.cli import render
from fedpareto.messages import name_of


@dataclass(frozen=True)
class Outcome:
    """A run's end.

    Attributes:
        run_id: its id.
        name: its name.
        algorithm: its algorithm.
        attacked: whether one member was malicious.
        state: how it ended, COMPLETED if all went well.
        reason: why, if it did not.
        rounds_done: rounds that ended.
        seconds: from its first round to its last.
        accuracy: of the members on their own test parts after the last evaluated round: "mean", "std", "worst5",
            "best5", "worst", "best", in [0, 1].
        improved: the share of participants whose training loss did not rise in a round, averaged over the rounds.
        weight: lambda of the watched member, averaged over the rounds.
        pull: the watched member's share of sum |c_i| ||u_i||, what the step is made of, averaged over the rounds.
        model: the digest of the final model.
    """

    run_id: str
    name: str
    algorithm: str
    attacked: bool
    state: str
    reason: str
    rounds_done: int
    seconds: float
    accuracy: dict[str, float]
    improved: float
    weight: float
    pull: float
    model: str


def outcome(stub: AdminStub, run_id: str, *, attacked: bool, watched: str) -> Outcome:
    """Reads what a run came to.

    Args:
        stub: the Admin service.
        run_id: the run.
        attacked: whether `watched` was malicious.
        watched: the member whose weight is of interest.
    """
    run = stub.GetRun(GetRunRequest(run=run_id)).run
    rounds = list(stub.ExportRounds(ExportRoundsRequest(run=run_id)))
    shares = [_shares(item, watched) for item in rounds]
    seconds = math.nan
    if run.HasField("started") and run.HasField("ended"):
        seconds = (run.ended.ToNanoseconds() - run.started.ToNanoseconds()) / 1e9
    return Outcome(
        run_id=run.run_id,
        name=run.name,
        algorithm=run.algorithm,
        attacked=attacked,
        state=name_of(run, "state"),
        reason=run.reason,
        rounds_done=run.rounds_done,
        seconds=seconds,
        accuracy={
            name: render.metric(run.latest, f"accuracy/{name}")
            for name in ("mean", "std", "worst5", "best5", "worst", "best")
        },
        improved=_mean([render.metric(item.summary, "improved") for item in rounds]),
        weight=_mean([weight for weight, _ in shares]),
        pull=_mean([pull for _, pull in shares]),
        model=run.model,
    )


def _shares(detail: ExportRoundsResponse, watched: str) -> tuple[float, float]:
    """The lambda of a member, and its share of what the step is made of; NaN where it took no part."""
    pulls = {
        part.client_id: abs(part.coefficient) * part.update_norm
        for part in detail.participations
        if math.isfinite(part.coefficient)
    }
    weights = {part.client_id: part.weight for part in detail.participations}
    total = sum(pulls.values())
    pull = pulls[watched] / total if watched in pulls and total > 0 else math.nan
    return weights.get(watched, math.nan), pull


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def table(outcomes: Sequence[Outcome], watched: str) -> Table:
    """Runs side by side."""
    found = Table(title="Accuracy of the members on their own test data", title_justify="left", caption_justify="left")
    found.add_column("")
    for item in outcomes:
        found.add_column(f"{item.algorithm}\n{'attacked' if item.attacked else 'all honest'}", justify="right")
    rows = {
        "average": [formatting.percent(item.accuracy["mean"]) for item in outcomes],
        "standard deviation": [formatting.percent(item.accuracy["std"]) for item in outcomes],
        "worst 5 %": [formatting.percent(item.accuracy["worst5"]) for item in outcomes],
        "best 5 %": [formatting.percent(item.accuracy["best5"]) for item in outcomes],
        "improved participants": [formatting.percent(item.improved) for item in outcomes],
        f"weight of {watched} (lambda)": [formatting.number(item.weight) for item in outcomes],
        f"pull of {watched} on the step": [formatting.percent(item.pull) for item in outcomes],
        "rounds": [str(item.rounds_done) for item in outcomes],
        "time": [f"{item.seconds:.1f} s" if math.isfinite(item.seconds) else "–" for item in outcomes],
    }
    for name, cells in rows.items():
        found.add_row(name, *cells)
    found.caption = (
        "Improved participants, weight and pull are averages over the rounds. Pull is the share of "
        f"sum |c_i| ||u_i||. {watched} is the attacker where there is one."
    )
    return found
