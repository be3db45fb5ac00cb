"""Accounting of differential privacy: the epsilon that noisy training on one data set spends, over all its runs.

`dp-accounting` computes it: the privacy loss distribution (PLD) gives the epsilon that is reported, and Renyi
differential privacy (RDP) an upper bound of its own. Both hold for data sets that differ in one sample: one that is
present, or replaced by a sample that contributes nothing. The number of samples counts as known.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from federation.errors import Error

LEAST_NOISE = 0.3  # a smaller noise multiplier protects nothing, and its PLD takes minutes
MOST_NOISE = 10_000.0  # that is searched
DELTA = 1e-5
INTERVAL = 1e-4  # of the discretised privacy loss
COARSE = 1e-3  # ten times as fast; epsilon is larger, but for 10^5 steps at tiny rates by less than 1 %
_FEW = 4  # pairs of noise and rate for which the fine interval is used
_HOPELESS = 100.0  # an epsilon for which no PLD is computed
MOST_TOLD = 16  # mechanisms in the description of a budget
MOST_STEPS = 10**9
_LEAST = 1e-12  # delta and rate in the description of a budget: with smaller ones the accountants lose their precision
_ORDERS = (*range(2, 65), 80, 96, 128, 256, 512)  # of RDP
INSTALL = "it is not installed here: pip install 'fedpareto[dp]'"


class AccountingError(Error):
    """Epsilon cannot be computed; the message has the remedy."""


@dataclass(frozen=True, order=True)
class Mechanism:
    """Steps that each release a sum over a Poisson sample, with Gaussian noise.

    Attributes:
        noise: the noise's standard deviation, as a multiple of the most that one sample contributes to the sum.
        rate: q, the probability of each sample to be drawn, in (0, 1].
        steps: the number of steps.
    """

    noise: float
    rate: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class NoiseBudget:
    """An owner's budget for a data set, as its worker tells it.

    Attributes:
        noise: the least noise of every training.
        epsilon: the budget: what all runs together may spend.
        delta: for which epsilon holds.
        spent: what was spent; at most `MOST_TOLD` mechanisms.

    Raises:
        ValueError: a number out of range.
    """

    noise: float
    epsilon: float
    delta: float
    spent: tuple[Mechanism, ...] = ()

    def __post_init__(self) -> None:
        if not (LEAST_NOISE <= self.noise <= MOST_NOISE and 0 < self.epsilon < math.inf and _LEAST <= self.delta < 1):
            raise ValueError(
                f"noise = {self.noise:g}, epsilon = {self.epsilon:g}, delta = {self.delta:g}: out of range"
            )
        if len(self.spent) > MOST_TOLD:
            raise ValueError(f"{len(self.spent)} trainings that were spent; at most {MOST_TOLD}, summed up")
        for one in self.spent:
            if not (
                LEAST_NOISE <= one.noise <= MOST_NOISE and _LEAST <= one.rate <= 1 and 0 <= one.steps <= MOST_STEPS
            ):
                raise ValueError(f"spent: noise = {one.noise:g}, rate = {one.rate:g}, {one.steps} steps: out of range")

    @classmethod
    def decode(cls, stored: Mapping[str, Any]) -> "NoiseBudget":
        """Reads what `dataclasses.asdict` has made."""
        return cls(**{**stored, "spent": tuple(Mechanism(**one) for one in stored["spent"])})

    def affords(self, mechanism: Mechanism, most: int) -> int:
        """The number of trainings like this one, at most `most`, that the budget allows: by the coarse grid.

        Raises:
            AccountingError: `dp-accounting` is not installed.
        """

        def within(times: int) -> bool:
            more = replace(mechanism, steps=mechanism.steps * times)
            return epsilon([*self.spent, more], self.delta, COARSE).value <= self.epsilon

        if within(most):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low


def summed_up(mechanisms: Sequence[Mechanism]) -> tuple[Mechanism, ...]:
    """At most `MOST_TOLD` mechanisms that spend no less than these: of more, the last ones as one that spends more."""
    if len(mechanisms) <= MOST_TOLD:
        return tuple(mechanisms)
    kept, others = mechanisms[: MOST_TOLD - 1], mechanisms[MOST_TOLD - 1 :]
    worst = min(one.noise for one in others), max(one.rate for one in others), sum(one.steps for one in others)
    return (*kept, Mechanism(*worst))


@dataclass(frozen=True)
class Epsilon:
    """The epsilon that was spent, for some delta: `value` by PLD, `bound` by RDP. `value` is never above `bound`."""

    value: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class SamplePrivacy:
    """A client's signed statement about an update that it trained with noise.

    Attributes:
        noise, rate, steps: of the training behind this update; see `Mechanism`.
        clip: the largest norm of one sample's gradient.
        epsilon: spent by the data set over all runs, this training included, by PLD.
        bound: the same by RDP.
        delta: of both.
    """

    noise: float
    clip: float
    rate: float
    steps: int
    epsilon: float
    bound: float
    delta: float

    @classmethod
    def decode(cls, stated: Mapping[str, float]) -> "SamplePrivacy | None":
        """Reads the numbers on record, by field; missing ones are 0. None if the client stated nothing."""
        if not stated:
            return None
        numbers: dict[str, Any] = {item.name: stated.get(item.name, 0.0) for item in fields(cls)}
        return cls(**{**numbers, "steps": int(numbers["steps"])})


def check_there() -> None:
    """Raises AccountingError if `dp-accounting` is not installed."""
    if find_spec("dp_accounting") is None:
        raise AccountingError(f"differential privacy is accounted with the package dp-accounting; {INSTALL}")


def epsilon(mechanisms: Iterable[Mechanism], delta: float, interval: float = INTERVAL) -> Epsilon:
    """The epsilon that these mechanisms on one data set spend together.

    It takes about half a CPU second for each pair of noise and rate; with `COARSE`, or for many pairs, a tenth of that.

    Raises:
        AccountingError: `dp-accounting` is not installed, or there are too many steps.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for mechanism in mechanisms:
        steps[mechanism.noise, mechanism.rate] += mechanism.steps
    merged = tuple(sorted(Mechanism(*pair, count) for pair, count in steps.items() if count))
    return _epsilon(merged, delta, interval if len(merged) <= _FEW else COARSE)


@lru_cache(maxsize=256)
def _epsilon(mechanisms: tuple[Mechanism, ...], delta: float, interval: float) -> Epsilon:
    check_there()
    import dp_accounting  # noqa: PLC0415 - an extra; two seconds
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    if not mechanisms:
        return Epsilon(0.0, 0.0)
    events = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(step.rate, dp_accounting.GaussianDpEvent(step.noise)), step.steps
        )
        for step in mechanisms
    ]
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    together = dp_accounting.ComposedDpEvent(events)
    bound = float(RdpAccountant(_ORDERS, relation).compose(together).get_epsilon(delta))
    if bound > _HOPELESS:
        return Epsilon(bound, bound)
    if (count := sum(step.steps for step in mechanisms)) > MOST_STEPS:
        raise AccountingError(f"epsilon is computed for at most {MOST_STEPS:,} steps, not for {count:,}")
    value = float(PLDAccountant(relation, interval).compose(together).get_epsilon(delta))
    return Epsilon(min(value, bound), bound)


def least_noise(spends: Callable[[float], float], target: float) -> float:
    """The least noise multiplier that spends at most a target epsilon, rounded up to thousandths.

    Args:
        spends: epsilon by the noise; it falls as the noise grows.
        target: the epsilon that may be spent.

    Raises:
        AccountingError: more than `MOST_NOISE` would be needed.
    """
    low, high = round(LEAST_NOISE * 1000), round(LEAST_NOISE * 1000)
    while spends(high / 1000) > target:
        low, high = high, 2 * high
        if high > MOST_NOISE * 1000:
            raise AccountingError(
                f"no noise up to {MOST_NOISE:g} spends at most epsilon = {target:g}: ask for fewer rounds, smaller "
                "minibatches, or a larger epsilon"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if spends(middle / 1000) <= target else (middle, high)
    return high / 1000


def gaussian_epsilon(noise: float, times: int, delta: float) -> float:
    """The epsilon of a Gaussian mechanism that is used some times, in closed form (Balle and Wang, 2018, theorem 8).

    Args:
        noise: the standard deviation, as a multiple of the sensitivity.
        times: the number of uses; they add up to one mechanism with noise / sqrt(times).
        delta: in (0, 1).
    """
    from scipy.optimize import brentq  # noqa: PLC0415 - commands without accounting do not load it
    from scipy.special import log_ndtr  # noqa: PLC0415

    if times == 0:
        return 0.0
    mu = math.sqrt(times) / noise

    def excess(value: float) -> float:
        low, high = log_ndtr([mu / 2 - value / mu, -mu / 2 - value / mu])
        return math.exp(low) - math.exp(value + high) - delta

    if excess(0.0) <= 0:
        return 0.0
    top = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # where delta is below its bound by Mironov
    return float(brentq(excess, 0.0, top, xtol=1e-10))
