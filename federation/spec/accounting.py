"""Accounting of differential privacy: the epsilon that noisy training on one data set spends, over all its runs.

`dp-accounting` computes it: the privacy loss distribution (PLD) gives the epsilon that is reported, and Renyi
differential privacy (RDP) an upper bound of its own. Both hold for data sets that differ in one sample: one that is
present, or replaced by a sample that contributes nothing. The number of samples counts as known.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

LEAST_NOISE = 0.3  # a smaller noise multiplier protects nothing, and its PLD takes minutes
MOST_NOISE = 10_000.0  # that is searched
DELTA = 1e-5
INTERVAL = 1e-4  # of the discretised privacy loss
COARSE = 1e-3  # ten times as fast; epsilon is larger, but for 10^5 steps at tiny rates by less than 1 %
_FEW = 4  # pairs of noise and rate for which the fine interval is used
_HOPELESS = 100.0  # an epsilon for which no PLD is computed
_ORDERS = (*range(2, 65), 80, 96, 128, 256, 512)  # of RDP
INSTALL = "it is not installed here: pip install 'fedpareto[dp]'"


class AccountingError(Exception):
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


def must_be_there() -> None:
    """Raises AccountingError if `dp-accounting` is not installed."""
    if find_spec("dp_accounting") is None:
        raise AccountingError(f"differential privacy is accounted with the package dp-accounting; {INSTALL}")


def epsilon(mechanisms: Iterable[Mechanism], delta: float, interval: float = INTERVAL) -> Epsilon:
    """The epsilon that these mechanisms on one data set spend together.

    It takes about half a CPU second for each pair of noise and rate; with `COARSE`, or for many pairs, a tenth of that.

    Raises:
        AccountingError: `dp-accounting` is not installed.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for mechanism in mechanisms:
        steps[mechanism.noise, mechanism.rate] += mechanism.steps
    merged = tuple(sorted(Mechanism(*pair, count) for pair, count in steps.items() if count))
    return _epsilon(merged, delta, interval if len(merged) <= _FEW else COARSE)


@lru_cache(maxsize=256)
def _epsilon(mechanisms: tuple[Mechanism, ...], delta: float, interval: float) -> Epsilon:
    must_be_there()
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
