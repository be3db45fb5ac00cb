"""A run as a page shows it: the run, the table of its rounds, and what the sections take from both."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.spec.run_spec import RunSpec, SpecError
from federation.text import counted
from federation.v1.admin_pb2 import (
    RUN_CHOICE_ONLY,
    Client,
    ExportRoundsRequest,
    ExportRoundsResponse,
    GetRunRequest,
    ListClientsRequest,
    ListRunsRequest,
    MemberSummary,
    Run,
)
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto import formatting
from fedpareto.admin_messages import whole
from fedpareto.run_names import ENDED, EVALUATE, STATISTICS
from fedpareto.run_table import MemberNumber, RoundLine, RunTable
from fedpareto.series import known, last, metric, own_names, own_values
from fedpareto.turnout import Turnout
from fedpareto.web.pages.scales import ACCURACY, Axis, general
from fedpareto.web.pages.verdict import Standing, verdict


@dataclass(frozen=True)
class Scored:
    """What the members' scores are, and how they are written: "test accuracy", and larger is better."""

    split: str
    measure: str
    higher: bool
    share: bool

    @property
    def title(self) -> str:
        """Such as "test accuracy"."""
        return f"{self.split} {self.measure}".strip()

    @property
    def axis(self) -> Axis:
        """Of the scores."""
        return replace(ACCURACY, name=self.title) if self.share else Axis(self.title, general)

    def text(self, value: float) -> str:
        """A score as text."""
        return formatting.percent(value) if self.share else formatting.number(value)


@dataclass(frozen=True)
class Final:
    """The scores of all clients after the last evaluated round."""

    round: int
    split: str
    measure: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class OwnFinal:
    """The values of the task's own metrics by client and name, after the last round in which they were measured."""

    round: int
    values: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ShownRun:
    """A run as a page shows it.

    Attributes:
        run: as `GetRun` gives it, with its specification.
        table: its rounds.
        members: the federation's members by name.
        origin: its id and date where another run on the page has its name, too; otherwise empty.
        root: in the console, the beginning of its addresses; None in a file.
    """

    run: Run
    table: RunTable
    members: Mapping[str, Client]
    origin: str = ""
    root: str | None = None

    @property
    def live(self) -> bool:
        """True in the console, whose page changes while the run goes on; False in a file."""
        return self.root is not None

    @property
    def label(self) -> str:
        """What the page calls the run."""
        return f"{self.run.name} ({self.origin})" if self.origin else self.run.name

    @classmethod
    def of(cls, run: Run, rounds: Iterable[ExportRoundsResponse], clients: Iterable[Client] = ()) -> "ShownRun":
        """A run with its rounds as they are exported."""
        table = RunTable(stop_metric(run.spec))
        for item in rounds:
            table.add(item)
        return cls(run, table, {client.client_id: client for client in clients})

    @classmethod
    def read(cls, stub: AdminStub, name: str) -> "ShownRun":
        """The run of that name or id, by three calls; a name that several runs have is refused."""
        run = stub.GetRun(GetRunRequest(run=name, choice=RUN_CHOICE_ONLY)).run
        rounds = stub.ExportRounds(ExportRoundsRequest(run=run.run_id))
        return cls.of(run, rounds, whole(stub.ListClients, ListClientsRequest()).clients)

    @classmethod
    def newest(cls, stub: AdminStub) -> "ShownRun | None":
        """The newest run of a coordinator; None if it has none."""
        runs = stub.ListRuns(ListRunsRequest(page_size=1)).runs
        return cls.read(stub, runs[0].run_id) if runs else None

    # --- rounds

    @cached_property
    def numbers(self) -> list[int]:
        """The rounds, from 0."""
        return self.table.numbers

    @cached_property
    def lines(self) -> list[RoundLine]:
        """The rounds, in order."""
        return [self.table.lines[number] for number in self.numbers]

    @cached_property
    def undisclosed(self) -> frozenset[str]:
        """The numbers of rounds and members that the privacy of this run hides, by name."""
        return frozenset(self.table.undisclosed)

    @property
    def complete(self) -> bool:
        """True once all rounds that have ended were read."""
        return len(self.table.whole) >= self.run.rounds_done

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.run.state in ENDED

    @property
    def evaluates(self) -> bool:
        """True if its rounds measure one model each, and make no step."""
        return self.run.algorithm == EVALUATE

    @cached_property
    def has_means_alone(self) -> bool:
        """True if it measures models privately: only means over the members are known."""
        try:
            return self.evaluates and RunSpec.parse(self.run.spec.encode()).evaluates_privately
        except SpecError:
            return False

    @property
    def describes(self) -> bool:
        """True if its only round describes the members' data."""
        return self.run.algorithm == STATISTICS

    @property
    def has_step(self) -> bool:
        """True if a round has made a step; otherwise the run's model is the initial one."""
        return any(line.summary.result_model for line in self.lines)

    def metric(self, name: str) -> list[float]:
        """A metric over the rounds; NaN where it is not known."""
        return [metric(line.summary, name) for line in self.lines]

    # --- members

    @cached_property
    def names(self) -> list[str]:
        """The members that were asked for work or evaluated."""
        return self.table.names

    def row(self, measure: MemberNumber, member: str) -> list[float]:
        """A member's numbers over the rounds; NaN where one is not known."""
        values: list[float] = self.table.row(measure, member)[self.numbers].tolist()
        return values

    def rows(self, measure: MemberNumber) -> dict[str, list[float]]:
        """The numbers of all members that were asked for an update; NaN where one is not known."""
        asked = {summary.client_id for summary in self.table.summaries()}
        return {name: self.row(measure, name) for name in self.names if name in asked}

    def over_median(self, measure: MemberNumber) -> NDArray[np.float64]:
        """The numbers over the median of their round, (members, rounds) in the order of `table.members`."""
        values = self.table.values(measure).astype(np.float64)
        values = np.where(values > 0, values, np.nan)
        middle = np.full(values.shape[1], np.nan)
        there = np.isfinite(values).any(axis=0)
        middle[there] = np.nanmedian(np.where(np.isfinite(values), values, np.nan)[:, there], axis=0)
        ratios: NDArray[np.float64] = values / middle
        return ratios

    @cached_property
    def pulls(self) -> dict[str, float]:
        """Each member's share of the last step: its coefficient times its norm, over the sum of all."""
        table = self.table
        lengths = np.abs(table.values(MemberNumber.COEFFICIENT).astype(np.float64) * table.values(MemberNumber.NORM))
        places = np.flatnonzero(np.isfinite(lengths).any(axis=0))
        newest = lengths[:, places[-1]] if places.size else np.zeros(0)
        total = float(np.nansum(newest))
        return dict(zip(table.members, (newest / total).tolist(), strict=True)) if total > 0 else {}

    def longest(self, measure: MemberNumber) -> dict[str, float]:
        """The largest of each member's numbers, each over the median of its round; without those of which none is."""
        ratios = self.over_median(measure)
        return {
            name: float(np.nanmax(row))
            for name, row in zip(self.table.members, ratios, strict=True)
            if np.isfinite(row).any()
        }

    @cached_property
    def summaries(self) -> Mapping[str, MemberSummary]:
        """How the rounds ended for each member, by name; empty where that is not known yet.

        A coordinator sums it up for a report, and lets the console do this by the rounds.
        """
        ours = self.complete and (self.live or not self.run.members)
        return {summary.client_id: summary for summary in (self.table.summaries() if ours else self.run.members)}

    @cached_property
    def turnout(self) -> Turnout:
        """Who took part."""
        known = self.complete or self.summaries
        return Turnout.of(self.run, self.summaries.values()) if known else Turnout()

    # --- scores

    @cached_property
    def scored(self) -> Scored:
        """What the members' scores are."""
        split, measure = self.table.scored or ("", "accuracy")
        own = next((item for item in self.run.metrics if item.name == measure.partition("/")[0]), None)
        higher = measure != "loss" if own is None else own.better == "higher"
        return Scored(split, measure, higher, measure == "accuracy" or (own is not None and own.largest == 1.0))

    @cached_property
    def final(self) -> Final | None:
        """The scores after the last round that was evaluated; None before the first one."""
        evaluation = self.table.evaluation
        if evaluation is None or self.table.scored is None:
            return None
        name = "/".join(self.table.scored)
        values = {member: scores[name] for member, scores in evaluation.scores.items() if name in scores}
        return Final(evaluation.round, *self.table.scored, values) if values else None

    @cached_property
    def standing(self) -> Standing | None:
        """Each member's first and last score; None if no member has one, or they are hidden."""
        first, last = self.table.first_and_last()
        if not last:
            return None
        kind, rounds = self.scored, 1 if self.evaluates else self.table.evaluated  # of other models: no progress
        return Standing(measure=kind.measure, first=first, last=last, higher=kind.higher, rounds=rounds)

    @property
    def _measured(self) -> str:
        """How many models were measured, and the one with the best mean, in one sentence."""
        means = {line.number: line.mean for line in self.lines if math.isfinite(line.mean)}
        if not means:
            return "No model was measured." if self.over else "No model has been measured yet."
        kind = self.scored
        best = (max if kind.higher else min)(means, key=lambda number: means[number])
        model = next(formatting.short(line.summary.base_model) for line in self.lines if line.number == best)
        most = "the best mean" if len(means) > 1 else "the mean"
        said = f"{most} {kind.title} is {kind.text(means[best])}, of {model} (round {best})"
        return f"{counted(len(means), 'model')} measured; {said}."

    @property
    def verdict(self) -> str:
        """How the members fare, in one sentence."""
        if not self.run.rounds_done and not self.lines:
            return f"It ended without a round. {self.run.reason}" if self.over else "The first round has not ended yet."
        if not self.lines:
            return "Its rounds are being read."
        if self.evaluates:
            return self._measured
        if self.describes:
            return "The members' data are described." if self.table.document else "No data were described."
        mean = last(self.metric("accuracy/mean"))
        sentence = verdict(self.standing, over=self.over, accuracy=mean, turnout=self.turnout)
        return sentence if sentence.endswith(".") else f"{sentence}."

    @cached_property
    def own_metrics(self) -> list[str]:
        """The values of the task's own metrics, such as "auc" or "recall/3", by name."""
        return own_names({name for line in self.lines for name in line.summary.metrics})

    @cached_property
    def own_final(self) -> OwnFinal | None:
        """The members' last values of the task's own metrics; None if no member has any, or they are hidden."""
        evaluation = self.table.evaluation
        if evaluation is None:
            return None
        values = {member: own_values(scores) for member, scores in evaluation.scores.items()}
        return OwnFinal(evaluation.round, values) if any(values.values()) else None

    # --- objectives

    @property
    def objectives(self) -> list[str]:
        """The objectives of the task, in its order; empty if it has only one."""
        names = list(self.run.objectives)
        return names if len(names) > 1 else []

    def losses(self, split: str) -> dict[str, list[float]]:
        """The mean loss in each objective over the rounds; NaN where it is not known."""
        return {name: self.metric(f"loss/{split}/{name}") for name in self.objectives}

    def split(self, order: Sequence[str]) -> str | None:
        """The first of these splits on which a client measured an objective."""
        return next((split for split in order if any(map(known, self.losses(split).values()))), None)

    def at_the_end(self, prefix: str) -> list[float]:
        """The last known value of a number of each objective; NaN where there is none."""
        return [last(self.metric(f"{prefix}{name}")) for name in self.objectives]

    @cached_property
    def _hyperparameters(self) -> Mapping[str, Any]:
        try:
            return RunSpec.parse(self.run.spec.encode()).algorithm.hyperparameters
        except SpecError:
            return {}

    @property
    def preference(self) -> list[float] | None:
        """r, by objective, of a run that has a preference."""
        if self.run.algorithm != "fedcmoo-pref":
            return None
        given = self._hyperparameters.get("preference") or [1.0] * len(self.objectives)
        return [float(value) for value in given]

    @property
    def alone(self) -> str | None:
        """The only objective that this run trains for, if it is one out of several; otherwise None."""
        weights = list(self._hyperparameters.get("weights", ())) if self.run.algorithm == "scalarised" else []
        heavy = [name for name, weight in zip(self.objectives, weights, strict=False) if weight]
        return heavy[0] if len(heavy) == 1 else None

    # --- traffic

    @cached_property
    def up(self) -> list[float]:
        """Bytes that each client sent in a round, on average over those that sent something."""
        return self._per_client("bytes/up", [line.senders for line in self.lines])

    @cached_property
    def down(self) -> list[float]:
        """Bytes that each client fetched in a round, on average over those that answered or evaluated."""
        return self._per_client("bytes/down", [line.fetchers for line in self.lines])

    def _per_client(self, name: str, clients: Iterable[int]) -> list[float]:
        return [total / count if count else math.nan for total, count in zip(self.metric(name), clients, strict=True)]


def stop_metric(document: str) -> str:
    """The metric of a specification that ends its run; empty for accuracy, loss, and none."""
    try:
        metric = RunSpec.parse(document.encode()).stop.metric if document else ""
    except SpecError:
        return ""
    return metric if metric not in ("accuracy", "loss") else ""
