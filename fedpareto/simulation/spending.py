"""The epsilon that simulated clients spend in training with noise: each has a ledger of its run, without a budget."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from sqlalchemy import func, select

from federation.spec.accounting import COARSE, DELTA, Mechanism, SamplePrivacy, epsilon
from federation.spec.computation import Computation, Descend
from storage.database import Database
from storage.models import Assignment, Phase, Reply, Round

DIVERGED = "training-diverged"  # the reason of a client whose training gave no finite numbers


@dataclass(eq=False)
class Spending:
    """The ledgers of the clients of a run; `samples` are their training samples, by name."""

    run_id: str
    database: Database
    samples: Mapping[str, int]
    _released: dict[str, list[Mechanism]] | None = field(default=None, init=False)
    _diverged: dict[str, int] = field(default_factory=dict, init=False)  # trainings before the simulation was resumed

    def statements(self, computations: Mapping[str, Computation]) -> dict[str, SamplePrivacy]:
        """The statements of the clients whose computations have noise, by name."""
        statements = {}
        for name, descent in computations.items():
            if not isinstance(descent, Descend) or descent.private is None:
                continue
            mechanism = descent.private.mechanism(descent.sgd, self.samples[name], len(descent.targets))
            released = self._ledgers().setdefault(name, [])
            # The mechanism follows from the run and the client, and is the same in all trainings.
            released.extend([mechanism] * (1 + self._diverged.pop(name, 0)))
            spent = epsilon(released, DELTA, COARSE)
            numbers = asdict(mechanism) | {"epsilon": spent.value, "bound": spent.bound, "delta": DELTA}
            statements[name] = SamplePrivacy(**numbers, clip=descent.private.clip)
        return statements

    def _ledgers(self) -> dict[str, list[Mechanism]]:
        """The mechanisms of each client so far. For a resumed simulation they are read from the record.

        Trainings that diverged have no statement there; they are counted in `_diverged`.
        """
        if self._released is None:
            self._released = {}
            with self.database.read() as session:
                rows = session.execute(
                    select(Reply.client_id, Reply.privacy)
                    .join(Assignment)
                    .join(Phase)
                    .join(Round)
                    .where(Round.run_id == self.run_id)
                )
                for client, numbers in rows:
                    if statement := SamplePrivacy.decode(numbers):
                        mechanism = Mechanism(statement.noise, statement.rate, statement.steps)
                        self._released.setdefault(client, []).append(mechanism)
                declined = (
                    select(Assignment.client_id, func.count())
                    .join(Phase)
                    .join(Round)
                    .where(Round.run_id == self.run_id, Assignment.reason == DIVERGED)
                    .group_by(Assignment.client_id)
                )
                self._diverged = {row[0]: row[1] for row in session.execute(declined)}
        return self._released
