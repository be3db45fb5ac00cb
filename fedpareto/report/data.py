"""What a report is made of: three calls of the Admin service, whatever the number of rounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from coordinator.rounds.outcome import SCORED
from federation.v1.admin_pb2 import (
    Client,
    ExportRoundsRequest,
    ExportRoundsResponse,
    GetRunRequest,
    ListClientsRequest,
    Participation,
    Run,
)
from federation.v1.admin_pb2_grpc import AdminStub


@dataclass(frozen=True)
class Final:
    """What every client scored at the end.

    Attributes:
        round: the last round that was evaluated.
        split: of "test", "validation", "train".
        measure: "accuracy", or "loss" where nobody has an accuracy.
        values: by client.
    """

    round: int
    split: str
    measure: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class RunData:
    """A run, whole.

    Attributes:
        run: with its specification.
        rounds: in order.
        members: the federation's clients by name.
    """

    run: Run
    rounds: list[ExportRoundsResponse]
    members: dict[str, Client]

    @classmethod
    def read(cls, stub: AdminStub, name: str) -> "RunData":
        """The run of that name or id."""
        run = stub.GetRun(GetRunRequest(run=name)).run
        rounds = list(stub.ExportRounds(ExportRoundsRequest(run=run.run_id)))
        clients = stub.ListClients(ListClientsRequest()).clients
        return cls(run, rounds, {client.client_id: client for client in clients})

    @property
    def numbers(self) -> list[int]:
        """The rounds, from 0."""
        return [item.summary.round for item in self.rounds]

    def metric(self, name: str) -> list[float]:
        """A metric over the rounds; NaN where it is not known."""
        return [item.summary.metrics.get(name, math.nan) for item in self.rounds]

    @cached_property
    def clients(self) -> list[str]:
        """Who was asked to train or evaluated, by name."""
        names = {part.client_id for item in self.rounds for part in item.participations}
        return sorted(names | {scored.client_id for item in self.rounds for scored in item.scores})

    def parts(self, client: str) -> list[Participation]:
        """A client's parts in the rounds that asked it to train."""
        return self._parts.get(client, [])

    @cached_property
    def _parts(self) -> dict[str, list[Participation]]:
        found: dict[str, list[Participation]] = {}
        for item in self.rounds:
            for part in item.participations:
                found.setdefault(part.client_id, []).append(part)
        return found

    @cached_property
    def weights(self) -> dict[str, list[float]]:
        """Every client's lambda over the rounds; NaN where it had none."""
        found = {client: [math.nan] * len(self.rounds) for client in self._parts}
        for i, item in enumerate(self.rounds):
            for part in item.participations:
                if math.isfinite(part.weight):
                    found[part.client_id][i] = part.weight
        return dict(sorted(found.items()))

    @cached_property
    def final(self) -> Final | None:
        """The scores after the last round that was evaluated; None before the first one."""
        for item in reversed(self.rounds):
            for measure in ("accuracy", "loss"):
                for split in SCORED:
                    name = f"{split}/{measure}"
                    values = {one.client_id: one.scores[name] for one in item.scores if name in one.scores}
                    if values:
                        return Final(item.summary.round, split, measure, values)
        return None
