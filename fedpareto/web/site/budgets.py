"""What a site's budgets have spent and have left: epsilon by data set, private rounds and evaluations by task."""

from collections.abc import Mapping
from dataclasses import dataclass

from federation.spec.accounting import AccountingError
from worker.home import WorkerHome
from worker.ledgers.round_ledger import SessionCounts, count_sessions
from worker.site.policy_file import Policy
from worker.site.privacy import SpentNoise, data_sets, spent_noise


@dataclass(frozen=True)
class Allowance:
    """How much of a number was used, and the most that the owner allows."""

    used: int
    most: int

    @property
    def left(self) -> int:
        """What is left; never below 0."""
        return max(0, self.most - self.used)


@dataclass(frozen=True)
class RoundsBudget:
    """The private rounds and the evaluations of a task, together with the tasks that share its data set."""

    task: str
    training: Allowance
    evaluations: Allowance


@dataclass(frozen=True)
class SiteBudgets:
    """The budgets of a site.

    Attributes:
        policy: the owner's rules.
        noise: the epsilon that each data set has spent, by name; empty if `problem` says why it is not known.
        problem: why no epsilon can be computed here.
        counts: by task, the private rounds and evaluations that count.
    """

    policy: Policy
    noise: Mapping[str, SpentNoise]
    problem: str
    counts: Mapping[str, SessionCounts]

    @classmethod
    def read(cls, home: WorkerHome, policy: Policy) -> "SiteBudgets":
        """Reads the sums of the ledgers of a home. Raises WorkerHomeError and OSError as `LedgerFile.reading`."""
        noise, problem = list[SpentNoise](), ""
        try:
            noise = spent_noise(home.privacy, policy.privacy)
        except AccountingError as error:
            problem = str(error)
        return cls(policy, {each.data_set: each for each in noise}, problem, count_sessions(home.rounds))

    def rounds(self, task: str) -> RoundsBudget:
        """The private rounds and the evaluations of a task."""
        beside = self.policy.data_sets.get(task, frozenset({task}))
        counts = [self.counts.get(name, SessionCounts(0, 0)) for name in beside]
        allowed = self.policy.secure.of(task)
        return RoundsBudget(
            task,
            Allowance(sum(count.training for count in counts), allowed.sessions),
            Allowance(sum(count.evaluations for count in counts), allowed.evaluations),
        )

    def noise_of(self, task: str) -> SpentNoise | None:
        """The epsilon of the data set of a task for which the owner has a rule; None without a rule."""
        data_set = data_sets(self.policy.privacy).get(task)
        return None if data_set is None else self.noise.get(data_set.name)
