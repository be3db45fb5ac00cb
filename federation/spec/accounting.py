"""Accounting of differential privacy: what noisy training on one data set has spent, over all its runs.

`dp-accounting` computes it: the privacy loss distribution (PLD) gives the epsilon that is reported, and Renyi
differential privacy (RDP) an upper bound of its own. Both hold for data sets that differ in one sample: it is there, or
in its place is one that contributes nothing. The number of samples is taken to be known.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

LEAST_NOISE = 0.3  # a noise multiplier below it promises nothing, and its PLD takes minutes
DELTA = 1e-5
INTERVAL = 1e-4  # of the discretised privacy loss
COARSE = 1e-3  # ten times as fast; epsilon comes out larger, but for 10^5 steps at tiny rates by less than 1 %
_FEW = 4  # pairs of noise and rate for which the fine interval is used
_HOPELESS = 100.0  # an epsilon for which no PLD is computed
_ORDERS = (*range(2, 65), 80, 96, 128, 256, 512)  # of RDP
INSTALL = "it is not installed here: pip install 'fedpareto[dp]'"


class AccountingError(Exception):
    """Nothing can be accounted; the message says what to do."""


@dataclass(frozen=True, order=True)
class Mechanism:
    """Steps that each release a sum over a Poisson sample, with Gaussian noise.

    Attributes:
        noise: the noise's standard deviation, as a multiple of the most that one sample contributes to the sum.
        rate: q, the probability of each sample to be drawn, in (0, 1].
        steps: how many.
    """

    noise: float
    rate: float
    steps: int


@dataclass(frozen=True)
class Epsilon:
    """What was spent, for some delta: `value` by PLD, `bound` by RDP. `value` is never above `bound`."""

    value: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class SamplePrivacy:
    """What a client states of an update that it trained with noise, and signs.

    Attributes:
        noise, rate, steps: of the training behind this update; see `Mechanism`.
        clip: the largest norm of one sample's gradient.
        epsilon: what the data set has spent over all runs, this training included, by PLD.
        bound: the same by RDP.
        delta: for which both hold.
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
        """From the numbers on record, by field; what is missing is 0. None where nothing was stated."""
        if not stated:
            return None
        numbers: dict[str, Any] = {item.name: stated.get(item.name, 0.0) for item in fields(cls)}
        return cls(**{**numbers, "steps": int(numbers["steps"])})


def must_be_there() -> None:
    """Raises AccountingError if `dp-accounting` is not installed."""
    if find_spec("dp_accounting") is None:
        raise AccountingError(f"differential privacy is accounted with the package dp-accounting; {INSTALL}")


def epsilon(mechanisms: Iterable[Mechanism], delta: float, interval: float = INTERVAL) -> Epsilon:
    """What these mechanisms on one data set spend together.

    It takes about half a CPU second for each pair of noise and rate; with `COARSE`, or for many pairs, a tenth of that.

    Raises:
        AccountingError: `dp-accounting` is not installed.
    """
    steps: Counter[tuple[float, float]] = Counter()
    for one in mechanisms:
        steps[one.noise, one.rate] += one.steps
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
            dp_accounting.PoissonSampledDpEvent(one.rate, dp_accounting.GaussianDpEvent(one.noise)), one.steps
        )
        for one in mechanisms
    ]
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    together = dp_accounting.ComposedDpEvent(events)
    bound = float(RdpAccountant(_ORDERS, relation).compose(together).get_epsilon(delta))
    if bound > _HOPELESS:
        return Epsilon(bound, bound)
    value = float(PLDAccountant(relation, interval).compose(together).get_epsilon(delta))
    return Epsilon(min(value, bound), bound)


def gaussian_epsilon(noise: float, times: int, delta: float) -> float:
    """What a Gaussian mechanism spends that is used some times, in closed form (Balle and Wang, 2018, theorem 8).

    Args:
        noise: the standard deviation, as a multiple of the sensitivity.
        times: how many times; they add up to one mechanism with noise / sqrt(times).
        delta: in (0, 1).
    """
    from scipy.optimize import brentq  # noqa: PLC0415 - commands that account nothing do without it
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
