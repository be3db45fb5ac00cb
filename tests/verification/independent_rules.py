"""The numbers of a step that depend on its rule, computed from the pages: the rate, weights, noise and preferences.

docs/reference/metrics.md names them; the formulas are in docs/reference/run-spec.md (`server.decay`),
docs/research/algorithms.md, docs/research/objectives.md and docs/member/differential-privacy.md. No code of ours is
imported but the independent verifier.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Numbers = dict[str, float]
# Rules whose coefficients are the weights of the updates, but for one factor.
OF_WEIGHTS = ("fedavg", "afl", "krum", "multi-krum", "geometric-median", "centred-clipping", "dual-cone", "nash-mtl")


def scheduled(run: Mapping[str, Any], number: int) -> float:
    """The rate of a round by the schedule; "auto" begins at 1."""
    server = run.get("server", {})
    first, decay, every = server.get("learning_rate", 1.0), server.get("decay", 0.0), server.get("decay_every", 100)
    first = 1.0 if first == "auto" else first
    if server.get("schedule") == "inverse":
        return float(first * 2 / (number + 2))
    return float(first * decay ** (every / run["rounds"] * (number // every)) if decay else first)


def lower_median(values: Iterable[float]) -> float:
    values = [*values]
    return sorted(values)[(len(values) - 1) // 2]


def spent(privacy: Mapping[str, Any], steps: int) -> float:
    """The epsilon of these steps with noise: the least for which delta is enough (Balle and Wang, 2018, theorem 8)."""
    mu, delta = math.sqrt(steps) / privacy["client_noise"], privacy.get("client_delta", 1e-5)

    def normal(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 0.0, 1000.0
    for _ in range(100):
        epsilon = (low + high) / 2
        beyond = normal(-mu / 2 - epsilon / mu)
        needed = normal(mu / 2 - epsilon / mu) - (math.exp(epsilon + math.log(beyond)) if beyond else 0.0)
        low, high = (epsilon, high) if needed > delta else (low, epsilon)
    return high


def entropy(weights: np.ndarray) -> float:
    shares = weights[weights > 0] / weights.sum()
    return float(-(shares * np.log(shares)).sum())


def of_weights(algorithm: Mapping[str, Any], c: np.ndarray, lengths: np.ndarray) -> Numbers:
    """What follows from the coefficients of the updates, if they have one each, and none is of an earlier round."""
    name, found = algorithm["name"], Numbers()
    if "pre" in algorithm or not c.any() or (c < 0).any():
        return found
    if name in OF_WEIGHTS:
        found["entropy"] = entropy(c)
    if name in ("fedmgda+", "fedavg-n"):
        found["entropy"] = entropy(c * lengths)  # coefficient i is the weight divided by the length
    if name == "fedmgda":
        found["entropy"] = entropy(c)
    if name in ("krum", "multi-krum"):
        found["selected"] = float((c > 0).sum())
    if name == "norm-clipping" and algorithm.get("prior", "uniform") == "uniform":
        found["clipped"] = float((c < 1 / len(c) - 1e-12).sum())
        found["entropy"] = math.log(len(c))
    return found


def divergence(algorithm: Mapping[str, Any], objectives: Sequence[str], losses: Mapping[str, float]) -> float:
    """KL divergence of the shares r F / sum(r F) from equal shares, over the objectives that have a loss."""
    preference = dict(zip(objectives, algorithm.get("preference") or [1.0] * len(objectives), strict=True))
    parts = np.array([preference[name] * loss for name, loss in losses.items()])
    shares = parts / parts.sum()
    return float((shares * np.log(len(shares) * shares)).sum())
