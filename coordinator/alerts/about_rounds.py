"""The facts about the rounds of a run: a function of the rounds that have ended, one after the other.

The same rounds give the same facts with the same beginnings, so they can be computed again after a crash.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from statistics import median

import numpy as np
from sqlalchemy.orm import Session

from coordinator.alerts.facts import AlertFact, Key
from coordinator.rounds.runs.participation import EndedRound, MemberRound, Participation, read_rounds
from coordinator.rounds.runs.specification import parse_run
from federation.aggregation.base import Algorithm
from federation.spec.run_spec import SpecError
from federation.text import counted
from storage.models import Run
from storage.states import AlertKind, AlertSeverity

IN_A_ROW = 3  # rounds in which a member fails or opposes, or nobody improves
RISES = 2  # of the loss, among the last `LOOK_BACK`: a loss that zigzags falls in every other round
LOOK_BACK = 6  # evaluated rounds
OPPOSING = -0.5  # the cosine with the step below which a member's update counts as against it
OUTLIER = 10.0  # times the median
LEAST_FOR_MEDIAN = 3  # members
AT_CAP = 10  # steps in a row
QUIET = 10  # replies of a member without an outlier, after which the alert has ended
_CLOSE = 1e-6  # of a weight to its largest value


@dataclass(frozen=True)
class WeightBounds:
    """The largest weight of each member of a round, for rules that bound it."""

    rule: Algorithm | None = None  # None in private rounds, and with several objectives: rows are not members there
    by_samples: bool = False

    @property
    def auto(self) -> str:
        """The words that name "auto" as a rate for the rule; empty where it cannot be one, or the rule is not known."""
        return ' or to "auto"' if self.rule is not None and not self.rule.no_auto else ""

    @classmethod
    def of(cls, run: Run) -> "WeightBounds":
        """Those of a run; none if its rule is a plug-in that is not installed any more."""
        try:
            spec, rule = parse_run(run.spec)
        except SpecError:
            return cls()
        if spec.privacy.secure != "off" or len(run.objectives) > 1:
            return cls()
        return cls(rule, spec.algorithm.prior == "samples")

    def largest(self, members: tuple[MemberRound, ...]) -> Mapping[str, float]:
        """By the names of the members whose updates entered the step; empty where nothing bounds them."""
        weighed = [member for member in members if math.isfinite(member.weight)]
        if self.rule is None or not weighed:
            return {}
        shares = np.array([member.samples if self.by_samples else 1.0 for member in weighed], dtype=np.float64)
        if shares.sum() <= 0:
            return {}
        bounds = self.rule.largest_weights(shares / shares.sum())
        return {} if bounds is None else dict(zip((m.client_id for m in weighed), bounds.tolist(), strict=True))


@dataclass(frozen=True)
class _Case:
    """What holds after a round."""

    kind: AlertKind
    severity: AlertSeverity
    message: str
    remedy: str
    first_round: int
    last_round: int
    client_id: str = ""


@dataclass
class _Streak:
    """Rounds in a row."""

    first: int = 0
    last: int = 0
    count: int = 0
    value: float = math.nan  # of the last one

    def add(self, number: int, value: float = math.nan) -> None:
        if not self.count:
            self.first = number
        self.last, self.value, self.count = number, value, self.count + 1

    def end(self) -> None:
        self.count = 0


@dataclass
class _Outlier:
    """Rounds in which a member's number was far over the median."""

    rounds: _Streak
    worst: float = 0.0  # times the median
    quiet: int = 0  # replies since the last of them

    def add(self, number: int, ratio: float) -> None:
        if ratio > OUTLIER:
            self.rounds.add(number, ratio)
            self.worst, self.quiet = max(self.worst, ratio), 0
        elif self.rounds.count:
            self.quiet += 1
            if self.quiet >= QUIET:
                self.rounds.end()
                self.worst = 0.0


class RoundFacts:
    """The facts about the rounds of one run; rounds are added in order."""

    def __init__(self, run_id: str, bounds: WeightBounds) -> None:
        self.run_id = run_id
        self.participation = Participation()
        self.seconds: list[float] = []  # that each round took
        self._bounds = bounds
        self._failing: dict[str, _Streak] = {}
        self._opposing: dict[str, _Streak] = {}
        self._at_cap: dict[str, _Streak] = {}
        self._caps: dict[str, float] = {}
        self._norms: dict[str, _Outlier] = {}
        self._losses: dict[str, _Outlier] = {}
        self._worse = _Streak()  # the last evaluated rounds, in a row, in which no client improved
        self._evaluated: deque[EndedRound] = deque(maxlen=LOOK_BACK + 1)  # the last ones, with a loss
        self._open: dict[Key, AlertFact] = {}
        self._changed: list[AlertFact] = []

    @property
    def open(self) -> list[AlertFact]:
        """The facts that hold after the last round: about the run first, then by the names of the members."""
        return sorted(self._open.values(), key=lambda fact: (fact.client_id, list(AlertKind).index(fact.kind)))

    def take_changed(self) -> list[AlertFact]:
        """The facts that began, changed or ended since the last call, in their last form, in order."""
        changed, self._changed = self._changed, []
        last = {(fact.key, fact.began): fact for fact in changed}
        return list(last.values())

    def add(self, round_: EndedRound) -> None:
        """Adds the next round."""
        self.participation.add(round_)
        self.seconds.append((round_.ended - round_.started).total_seconds())
        self._add_members(round_)
        if math.isfinite(round_.improved):
            if round_.improved == 0:
                self._worse.add(round_.number)
            else:
                self._worse.end()
        if math.isfinite(round_.loss):
            self._evaluated.append(round_)
        self._compare({self._key(case): case for case in self._cases()}, round_.ended)

    def end(self, at: datetime) -> None:
        """The run has ended: so have its facts."""
        self._compare({}, at)

    def _key(self, case: _Case) -> Key:
        return case.kind, self.run_id, case.client_id

    def _compare(self, cases: Mapping[Key, _Case], at: datetime) -> None:
        for key in self._open.keys() - cases.keys():
            self._changed.append(replace(self._open.pop(key), ended=at))
        for key, case in cases.items():
            before = self._open.get(key)
            now = AlertFact(
                kind=case.kind,
                severity=case.severity,
                run_id=self.run_id,
                client_id=case.client_id,
                message=case.message,
                remedy=case.remedy,
                first_round=case.first_round if before is None else before.first_round,
                last_round=case.last_round,
                began=at if before is None else before.began,
            )
            if now != before:
                self._open[key] = now
                self._changed.append(now)

    # --- the members of a round

    def _add_members(self, round_: EndedRound) -> None:
        norms, losses = _median(m.norm for m in round_.members), _median(m.loss for m in round_.members)
        caps = self._bounds.largest(round_.members)
        for member in round_.members:
            name, number = member.client_id, round_.number
            failing = self._failing.setdefault(name, _Streak())
            if not self.participation.of(name).failed_in_a_row:
                failing.end()
            elif member.outcome.failed:
                failing.add(number)
            if math.isfinite(member.cosine):
                self._opposing.setdefault(name, _Streak())
                _count(self._opposing[name], member.cosine < OPPOSING, number, member.cosine)
            if name in caps:
                self._caps[name] = caps[name]
                at_cap = caps[name] < 1 and member.weight >= caps[name] - _CLOSE
                _count(self._at_cap.setdefault(name, _Streak()), at_cap, number, member.weight)
            for outliers, value, middle in ((self._norms, member.norm, norms), (self._losses, member.loss, losses)):
                if not math.isnan(value) and middle > 0:
                    outliers.setdefault(name, _Outlier(_Streak())).add(number, value / middle)

    # --- the cases after a round

    def _cases(self) -> Iterator[_Case]:
        yield from self._nobody_improves()
        yield from self._steps_too_long()
        for member in self.participation.members:
            name, failed = member.client_id, member.failed_in_a_row
            if failed >= IN_A_ROW and member.last_reason_round is not None:
                yield _Case(
                    AlertKind.MEMBER_FAILS,
                    AlertSeverity.WARNING,
                    f"{name} failed in {failed} rounds in a row, last in round {member.last_reason_round}: "
                    f"{member.last_reason.rstrip('.')}",
                    f"see the log of its worker; `fedpareto worker doctor` on the machine of {name} says what is wrong",
                    self._failing[name].first,
                    member.last_reason_round,
                    name,
                )
            if (streak := self._opposing.get(name)) is not None and streak.count >= IN_A_ROW:
                yield _Case(
                    AlertKind.MEMBER_OPPOSES,
                    AlertSeverity.WARNING,
                    f"{name} worked against the step in {streak.count} rounds in a row: in round {streak.last} the "
                    f"cosine between its update and the step was {streak.value:.2f}",
                    "its data or labels differ from the others', or it attacks: ask the member what its data are",
                    streak.first,
                    streak.last,
                    name,
                )
            if (streak := self._at_cap.get(name)) is not None and streak.count >= AT_CAP:
                yield _Case(
                    AlertKind.WEIGHT_AT_CAP,
                    AlertSeverity.NOTICE,
                    f"{name} had the largest weight that the algorithm allows, {self._caps[name]:.3g}, in "
                    f"{streak.count} steps in a row, last in round {streak.last}",
                    "the model serves it least, because its data differ from the others' or because it steers: compare "
                    "its result with the others', and its cosines in `fedpareto admin round`",
                    streak.first,
                    streak.last,
                    name,
                )
            yield from self._outliers(name)

    def _outliers(self, name: str) -> Iterator[_Case]:
        norm, loss = self._norms.get(name), self._losses.get(name)
        if norm is not None and norm.rounds.count:
            yield _Case(
                AlertKind.NORM_OUTLIER,
                AlertSeverity.WARNING,
                f"the updates of {name} were up to {_times(norm.worst)} times as long as the median of the members', "
                f"in {counted(norm.rounds.count, 'round')}, last in round {norm.rounds.last}",
                "it has few samples or wrong data, trains at another rate, has minibatches that are too small for "
                "BatchNorm, or attacks: ask the member; a rule that normalises updates, such as fedmgda+, gives a long "
                "update no more influence",
                norm.rounds.first,
                norm.rounds.last,
                name,
            )
        if loss is not None and loss.rounds.count:
            yield _Case(
                AlertKind.LOSS_OUTLIER,
                AlertSeverity.WARNING,
                f"{name} reported up to {_times(loss.worst)} times the median loss of the members, in "
                f"{counted(loss.rounds.count, 'round')}, last in round {loss.rounds.last}",
                "its data differ from the others', or it reports a false loss to gain influence: a rule that reads no "
                "losses, such as fedmgda+, is safe from that",
                loss.rounds.first,
                loss.rounds.last,
                name,
            )

    def _nobody_improves(self) -> Iterator[_Case]:
        if (rounds := self._worse.count) >= IN_A_ROW:
            yield _Case(
                AlertKind.NOBODY_IMPROVES,
                AlertSeverity.WARNING,
                f"nobody improved in {rounds} evaluated rounds in a row, last in round {self._worse.last}: every "
                "participant's training loss rose",
                "the learning rate may be too large, or a member may work against the others: see their cosines in "
                "`fedpareto admin round`",
                self._worse.first,
                self._worse.last,
            )

    def _steps_too_long(self) -> Iterator[_Case]:
        """The case that steps that are too long have raised the loss again and again, up to the last step."""
        rises = [
            (after, after.step)
            for before, after in pairwise(self._evaluated)
            if after.step is not None and after.step.long and after.loss > before.loss
        ]
        newest = self._evaluated[-1].step if self._evaluated else None
        if len(rises) < RISES or newest is None or not newest.long:
            return
        last, step = rises[-1]
        yield _Case(
            AlertKind.STEP_TOO_LONG,
            AlertSeverity.WARNING,
            f"the mean training loss rose in {len(rises)} of the last {len(self._evaluated) - 1} evaluated rounds, "
            f"last in round {last.number}, where the step was {step.ratio:.1f} times as long as the median of the "
            f"updates ({step.median:.3g}): the steps go too far",
            f"set server.learning_rate to about {step.rate / step.ratio:.2g} (it is {step.rate:.3g})"
            f"{self._bounds.auto}, or let it decay (server.decay)",
            rises[0][0].number,
            last.number,
        )


def read_facts(session: Session, run: Run) -> RoundFacts:
    """The facts about the rounds of a run that have ended."""
    facts = RoundFacts(run.run_id, WeightBounds.of(run))
    for round_ in read_rounds(session, run.run_id):
        facts.add(round_)
    return facts


def _count(streak: _Streak, counts: bool, number: int, value: float) -> None:
    if counts:
        streak.add(number, value)
    else:
        streak.end()


def _times(ratio: float) -> str:
    """A ratio as text: in two digits, or as a whole number."""
    return "infinitely many" if math.isinf(ratio) else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"


def _median(values: Iterator[float]) -> float:
    """The median of the known values; 0 if there are too few, or most are infinite."""
    known = [value for value in values if not math.isnan(value)]
    middle = median(known) if len(known) >= LEAST_FOR_MEDIAN else 0.0
    return middle if math.isfinite(middle) else 0.0
