"""Differential privacy at a site: the owner's noise on every training, and the ledger of the epsilon that is spent.

The worker enforces it, not the coordinator: it adds noise before anything leaves the site, and declines an assignment
that would spend more than the owner's budget. The spending is on the disk before the noise is drawn, so after a crash
the ledger may record too much, never too little.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from federation.spec.accounting import (
    DELTA,
    AccountingError,
    Epsilon,
    Mechanism,
    NoiseBudget,
    SamplePrivacy,
    epsilon,
    summed_up,
)
from federation.spec.computation import Computation, Descend, Measure
from federation.training.trainer import Trainer
from federation.v1.common_pb2 import AssignmentManifest
from federation.work.base import WorkError
from worker.ledgers.privacy_ledger import Ledger, PrivacyEntry, read_ledger, read_mechanisms
from worker.site.policy_file import SamplePolicy


@dataclass(frozen=True)
class DataSet:
    """A data set of the site, with the owner's rule for it; None where there is none."""

    name: str
    rule: SamplePolicy | None

    @property
    def delta(self) -> float:
        """The delta for which epsilon is computed."""
        return self.rule.delta if self.rule is not None else DELTA


def data_sets(rules: Mapping[str, SamplePolicy]) -> dict[str, DataSet]:
    """The data sets with rules, by task."""
    return {task: DataSet(name, rule) for name, rule in rules.items() for task in rule.tasks or (name,)}


@dataclass(frozen=True, eq=False)
class SitePrivacy:
    """Applies the owner's rules to a computation, and keeps the ledger. `rules` are the owner's, by data set."""

    rules: Mapping[str, SamplePolicy]
    ledger: Ledger

    def data_set(self, task: str) -> DataSet:
        """The data set of a task; without a rule, it has the task's name."""
        return data_sets(self.rules).get(task, DataSet(task, None))

    def told(self, task: str) -> NoiseBudget | None:
        """The budget of a task's data set for the coordinator; None without a rule, or where it cannot be told."""
        data = self.data_set(task)
        if data.rule is None:
            return None
        spent = summed_up(self.ledger.mechanisms(data.name))
        try:
            return NoiseBudget(noise=data.rule.noise, epsilon=data.rule.epsilon, delta=data.delta, spent=spent)
        except ValueError:  # numbers that accountants of others cannot use, such as a delta of 1e-20
            return None

    def check_suits(self, offers: Mapping[str, Trainer]) -> None:
        """Checks that every task with a rule can be trained with noise, and that its delta is below 1 / samples.

        Raises:
            WorkError: one cannot; the message names it.
        """
        for task, trainer in offers.items():
            if (rule := self.data_set(task).rule) is not None:
                if trainer.samples * rule.delta >= 1:
                    raise WorkError(
                        f"task {task}: delta = {rule.delta:g} of policy.toml allows one of {trainer.samples} samples "
                        "to be shown; it has to be far below 1 / samples"
                    )
                try:
                    trainer.check_private()
                except WorkError as error:
                    raise WorkError(f"task {task}, which policy.toml wants trained with noise: {error}") from error

    def admit(
        self, order: AssignmentManifest, computation: Computation, trainer: Trainer, now: datetime
    ) -> tuple[Computation, SamplePrivacy | None]:
        """Returns the computation that the owner's rules allow, and the statement for an update with noise.

        The noise is the larger of the owner's and the coordinator's, the bound on a sample the smaller. Under a rule,
        the training split is not measured, and gradients without noise are declined.

        Raises:
            WorkError: `dp-work`, `dp-budget`, `dp-model` or `dp-missing`.
            OSError: the entry in the ledger cannot be written.
        """
        data = self.data_set(order.task)
        if isinstance(computation, Measure):
            return (computation if data.rule is None else _evaluation(computation, data.rule)), None
        if not isinstance(computation, Descend):
            if data.rule is not None:
                raise WorkError("this site gives no gradients and no training losses without noise", reason="dp-work")
            return computation, None
        private = computation.private
        if data.rule is not None:
            private = data.rule.floor if private is None else private.with_floor(data.rule.floor)
        if private is None:
            return computation, None
        if computation.from_jacobian:
            raise WorkError("the first step would be made of gradients without noise", reason="dp-work")
        if problem := computation.sgd.without_noise():
            raise WorkError(f"this site trains with noise. train.{problem}", reason="dp-work")
        trainer.check_private()
        mechanism = private.mechanism(computation.sgd, trainer.samples, len(computation.targets))
        spent = self._spend(order, data, private.clip, mechanism, now)
        statement = SamplePrivacy(
            **asdict(mechanism), clip=private.clip, epsilon=spent.value, bound=spent.bound, delta=data.delta
        )
        return replace(computation, private=private, measure=False), statement

    def _spend(
        self, order: AssignmentManifest, data: DataSet, clip: float, mechanism: Mechanism, now: datetime
    ) -> Epsilon:
        """Adds a training to the ledger, unless that would overspend. Returns the epsilon that is spent with it."""
        before = self.ledger.mechanisms(data.name)
        try:
            after = epsilon([*before, mechanism], data.delta)
            if data.rule is not None and after.value > data.rule.epsilon:
                spent = epsilon(before, data.delta).value
                raise WorkError(
                    f"this data set has spent epsilon = {spent:.4g} of {data.rule.epsilon:g} (delta = {data.delta:g}), "
                    f"{max(0.0, data.rule.epsilon - spent):.4g} is left; this training would bring it to "
                    f"{after.value:.4g}",
                    reason="dp-budget",
                )
        except AccountingError as error:
            raise WorkError(str(error), reason="dp-missing") from None
        at = now.astimezone(UTC).isoformat(timespec="seconds")
        origin = (order.task, order.run_id, order.round, order.assignment_id)
        self.ledger.add(PrivacyEntry(at, data.name, *origin, mechanism.noise, clip, mechanism.rate, mechanism.steps))
        return after


@dataclass(frozen=True)
class OfRun:
    """The steps of one run on a data set, with one noise and one sampling rate."""

    run: str
    noise: float
    rate: float
    steps: int


@dataclass(frozen=True)
class SpentNoise:
    """The epsilon that a data set has spent; `budget` is None if the owner has set none."""

    data_set: str
    epsilon: float
    bound: float
    delta: float
    budget: float | None

    @property
    def left(self) -> float | None:
        """What is left of the budget, never below 0; None without a budget."""
        return None if self.budget is None else max(0.0, self.budget - self.epsilon)


@dataclass(frozen=True)
class PrivacyAccount(SpentNoise):
    """The same, with the trainings and their sums by run."""

    entries: list[PrivacyEntry]
    by_run: list[OfRun]


def spent_noise(path: Path, rules: Mapping[str, SamplePolicy]) -> list[SpentNoise]:
    """The epsilon of each data set that `spent` has, from the sums of the ledger at `path`. Errors are those of it."""
    found = read_mechanisms(path)
    return [_spent_noise(name, rules.get(name), found.get(name, [])) for name in sorted({*rules, *found})]


def _spent_noise(name: str, rule: SamplePolicy | None, mechanisms: Sequence[Mechanism]) -> SpentNoise:
    data = DataSet(name, rule)
    total = epsilon(mechanisms, data.delta) if mechanisms else Epsilon(0.0, 0.0)
    return SpentNoise(name, total.value, total.bound, data.delta, None if rule is None else rule.epsilon)


def spent(path: Path, rules: Mapping[str, SamplePolicy]) -> list[PrivacyAccount]:
    """The account of each data set that has a rule, or a training with noise in the ledger at `path`, by name.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
        AccountingError: `dp-accounting` is not installed, and there are entries.
    """
    entries = read_ledger(path)
    accounts = []
    for name in sorted({*rules, *(entry.data_set for entry in entries)}):
        own = [entry for entry in entries if entry.data_set == name]
        total = _spent_noise(name, rules.get(name), [entry.mechanism for entry in own])
        steps: Counter[tuple[str, float, float]] = Counter()
        for entry in own:
            steps[entry.run, entry.noise, entry.rate] += entry.steps
        runs = [OfRun(*key, count) for key, count in steps.items()]
        accounts.append(PrivacyAccount(**vars(total), entries=own, by_run=runs))
    return accounts


def _evaluation(computation: Measure, rule: SamplePolicy) -> Measure:
    """Keeps the splits that the owner allows to be measured; the training split is never among them."""
    splits = tuple(split for split in computation.splits if split != "train") if rule.evaluate else ()
    return replace(computation, splits=splits)
