"""Computes the metrics of a round (`definitions`): over clients, not over samples."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from federation.aggregation.interface import Matrix, Vector
from federation.aggregation.qp import UnsolvedError, min_norm

LARGEST_PROGRAM = 512  # rows of K for which stationarity is measured: half a second at the most


def accuracies(values: Sequence[float], name: str = "accuracy") -> dict[str, float]:
    """Average, spread and tails of the clients' accuracies, each in [0, 1]; see `definitions`.

    The keys begin with `name`.
    """
    if not values:
        return {}
    a = np.sort(np.asarray(values, dtype=np.float64))
    tail = max(1, int(0.05 * len(a)))
    return {
        f"{name}/mean": float(a.mean()),
        f"{name}/std": float(a.std()),
        f"{name}/variance": float(a.var()),
        f"{name}/worst": float(a[0]),
        f"{name}/best": float(a[-1]),
        f"{name}/worst5": float(a[:tail].mean()),
        f"{name}/best5": float(a[-tail:].mean()),
        f"{name}/p5": float(np.percentile(a, 5)),
        f"{name}/p95": float(np.percentile(a, 95)),
        f"{name}/jain": jain(values),
    }


def jain(values: Sequence[float]) -> float:
    """Jain's index (sum x)² / (N sum x²) of numbers that are not negative: 1 when all are equal, also to zero."""
    x = np.asarray(values, dtype=np.float64)
    largest = x.max()
    if largest == 0:
        return 1.0
    x = x / largest  # so that squares neither overflow nor vanish
    return float(x.sum() ** 2 / (len(x) * (x @ x)))


def improved(before: Mapping[str, float], after: Mapping[str, float], participants: Iterable[str]) -> float | None:
    """The share of participants whose training loss did not rise in the round, in [0, 1].

    Ties count as improved, a non-finite loss does not. None when no participant has both losses.
    """
    pairs = [(before[client], after[client]) for client in participants if client in before and client in after]
    if not pairs:
        return None
    return sum(bool(np.isfinite(a) and a <= b) for b, a in pairs) / len(pairs)


def length(K: Matrix, weights: Vector) -> float:
    """||sum weights_i u_i||, from the Gram matrix K (m, m) and the weights (m,)."""
    return math.sqrt(max(0.0, float(weights @ K @ weights)))


def stationarity(K: Matrix) -> dict[str, float]:
    """The distance of the updates from Pareto stationarity: ||J lambda*||, the shortest vector in their hull.

    `stationarity` and `stationarity/relative`, from the Gram matrix K, shape (m, m). Nothing for more than 512 updates,
    for none, and where the program has no certified solution.
    """
    if not 0 < len(K) <= LARGEST_PROGRAM:
        return {}
    try:
        shortest = length(K, min_norm(K).weights)
    except UnsolvedError:
        return {}
    longest = math.sqrt(float(np.diag(K).max()))
    return {"stationarity": shortest, "stationarity/relative": shortest / longest if longest > 0 else 0.0}


def delta_m(values: Sequence[float], baselines: Sequence[float], higher_is_better: Sequence[bool]) -> float:
    """Delta_M %: how much worse a model of all objectives is than one model for each (Fernando et al.).

    100/M times the sum over k of (-1)^delta_k (A_k - B_k) / B_k, with delta_k = 1 where higher is better.

    Args:
        values: A, a measure of each of the M objectives.
        baselines: B, the same of a model that was trained for that objective alone, in the same federation; not 0.
        higher_is_better: for each measure: True for an accuracy, False for a loss.

    Returns:
        In percent; positive is worse.

    Raises:
        ValueError: not the same number of each, none at all, or a baseline of 0.
    """
    if not 0 < len(values) == len(baselines) == len(higher_is_better):
        counts = f"{len(values)} values, {len(baselines)} baselines, {len(higher_is_better)} directions"
        raise ValueError(f"delta_m takes one of each for every objective; got {counts}")
    if 0 in baselines:
        raise ValueError(f"delta_m is relative to the baselines, and one of them is 0: {list(baselines)}")
    each = zip(values, baselines, higher_is_better, strict=True)  # no mutant: there are as many of each
    worse = [(b - a) / b if higher else (a - b) / b for a, b, higher in each]
    return 100.0 * math.fsum(worse) / len(worse)
