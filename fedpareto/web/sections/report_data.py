"""The data of a report: three calls of the Admin service for each run, whatever the number of rounds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from federation.record.metric_definitions import SCORED
from federation.record.results import accepted
from federation.spec.run_spec import RunSpec, SpecError
from federation.v1.admin_pb2 import (
    RUN_CHOICE_ONLY,
    Client,
    ExportRoundsRequest,
    ExportRoundsResponse,
    GetRunRequest,
    ListClientsRequest,
    ListRunsRequest,
    Participation,
    Run,
)
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import whole
from fedpareto.formatting import natural
from fedpareto.series import known, last, metric, own_names, own_values
from fedpareto.turnout import Turnout
from fedpareto.web.pages.verdict import Standing


@dataclass(frozen=True)
class Final:
    """The scores of all clients after the last evaluated round; `measure` is "loss" if no client has an accuracy."""

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
class RunData:
    """A run with its specification, its rounds in order, and the federation's clients by name.

    `origin` is its id and date where another run on the page has its name, too; otherwise empty.
    """

    run: Run
    rounds: list[ExportRoundsResponse]
    members: dict[str, Client]
    origin: str = ""

    @property
    def label(self) -> str:
        """What the page calls the run."""
        return f"{self.run.name} ({self.origin})" if self.origin else self.run.name

    @classmethod
    def read(cls, stub: AdminStub, name: str) -> "RunData":
        """The run of that name or id; a name that several runs have is refused."""
        run = stub.GetRun(GetRunRequest(run=name, choice=RUN_CHOICE_ONLY)).run
        rounds = list(stub.ExportRounds(ExportRoundsRequest(run=run.run_id)))
        clients = whole(stub.ListClients, ListClientsRequest()).clients
        return cls(run, rounds, {client.client_id: client for client in clients})

    @classmethod
    def newest(cls, stub: AdminStub) -> "RunData | None":
        """The newest run of a coordinator; None if it has none."""
        runs = stub.ListRuns(ListRunsRequest(page_size=1)).runs
        return cls.read(stub, runs[0].run_id) if runs else None

    @property
    def numbers(self) -> list[int]:
        """The rounds, from 0."""
        return [item.summary.round for item in self.rounds]

    @cached_property
    def undisclosed(self) -> frozenset[str]:
        """The numbers of rounds and members that the privacy of this run hides, by name."""
        return frozenset(name for item in self.rounds for name in item.summary.undisclosed)

    @cached_property
    def turnout(self) -> Turnout:
        """Who took part."""
        return Turnout.of(self.run)

    @property
    def has_step(self) -> bool:
        """True if a round has made a step; otherwise the run's model is the initial one."""
        return any(item.summary.result_model for item in self.rounds)

    def metric(self, name: str) -> list[float]:
        """A metric over the rounds; NaN where it is not known."""
        return [metric(item.summary, name) for item in self.rounds]

    @cached_property
    def clients(self) -> list[str]:
        """The names of the clients that were asked for work or evaluated."""
        names = {part.client_id for item in self.rounds for part in item.participations}
        return sorted(names | {scored.client_id for item in self.rounds for scored in item.scores}, key=natural)

    @cached_property
    def parts(self) -> dict[str, list[Participation]]:
        """Every client's parts in the rounds that asked it for more than an evaluation."""
        parts: dict[str, list[Participation]] = {client: [] for client in self.clients}
        for item in self.rounds:
            for part in item.participations:
                parts[part.client_id].append(part)
        return parts

    @cached_property
    def samples(self) -> dict[str, int]:
        """The training samples of every client whose update counted, by its own last statement."""
        parts = ((item.phases, part) for item in self.rounds for part in item.participations)
        return {part.client_id: part.samples for phases, part in parts if accepted(phases, part)}

    @cached_property
    def weights(self) -> dict[str, list[float]]:
        """Every client's lambda over the rounds; NaN where it had none."""
        weights = {client: [math.nan] * len(self.rounds) for client, parts in self.parts.items() if parts}
        for i, item in enumerate(self.rounds):
            for part in item.participations:
                if math.isfinite(part.weight):
                    weights[part.client_id][i] = part.weight
        return weights

    @cached_property
    def final(self) -> Final | None:
        """The scores after the last round that was evaluated; None before the first one."""
        for item in reversed(self.rounds):
            for measure in ("accuracy", "loss"):
                for split in SCORED:
                    name = f"{split}/{measure}"
                    values = {score.client_id: score.scores[name] for score in item.scores if name in score.scores}
                    if values:
                        return Final(item.summary.round, split, measure, values)
        return None

    @property
    def final_split(self) -> str:
        """The split of the last scores; empty without any."""
        return self.final.split if self.final else ""

    @cached_property
    def standing(self) -> Standing | None:
        """Each member's first and last value of the measure of `final`; None if no member's score is known."""
        if self.final is None:
            return None
        name = f"{self.final.split}/{self.final.measure}"
        evaluated = [{s.client_id: s.scores[name] for s in item.scores if name in s.scores} for item in self.rounds]
        evaluated = [values for values in evaluated if values]
        firsts: dict[str, float] = {}
        lasts: dict[str, float] = {}
        for values in evaluated:
            firsts = {**values, **firsts}
            lasts |= values
        higher = self.final.measure == "accuracy"
        return Standing(measure=self.final.measure, first=firsts, last=lasts, higher=higher, rounds=len(evaluated))

    @cached_property
    def own_metrics(self) -> list[str]:
        """The values of the task's own metrics, such as "auc" or "recall/3", by name."""
        return own_names({name: value for item in self.rounds for name, value in item.summary.metrics.items()})

    @cached_property
    def own_final(self) -> OwnFinal | None:
        """The members' last values of the task's own metrics; None if no member has any, or they are hidden."""
        for item in reversed(self.rounds):
            values = {score.client_id: own_values(score.scores) for score in item.scores}
            if any(values.values()):
                return OwnFinal(item.summary.round, values)
        return None

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
        senders = (sum(part.payload_bytes > 0 for part in item.participations) for item in self.rounds)
        return self._per_client("bytes/up", senders)

    @cached_property
    def down(self) -> list[float]:
        """Bytes that each client fetched in a round, on average over those that answered or evaluated."""
        answered = ({part.client_id for part in item.participations if part.answered} for item in self.rounds)
        scored = ({score.client_id for score in item.scores} for item in self.rounds)
        return self._per_client("bytes/down", (len(a | b) for a, b in zip(answered, scored, strict=True)))

    def _per_client(self, name: str, clients: Iterable[int]) -> list[float]:
        return [total / count if count else math.nan for total, count in zip(self.metric(name), clients, strict=True)]
