"""Metrics of a round (docs/metrics.md): over clients, not over samples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from coordinator.aggregation.qp import UnsolvedError, min_norm
from coordinator.aggregation.rules import Matrix, Vector

SCORED = ("test", "validation", "train")  # a round is judged by the first split that a client measured
LARGEST_PROGRAM = 512  # rows of K for which stationarity is measured: half a second at the most

_JAIN = "Jain, 1984"
_HU = "Hu et al., 2022"
_OURS = "this project"
_WANG = "Wang et al., 2021"
_YANG = "Yang et al., 2023"
_ASKIN = "Askin et al., 2025"

# Every number that a round records, whatever its algorithm: (definition, source). docs/metrics.md shows this table.
# "<objective>" stands for each of a task's objectives; those names are recorded where it has several.
DEFINITIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "accuracy/mean": (
            "mean of the clients' accuracies, each on its own test split (without one, on the validation or "
            "training split); every client counts the same",
            _OURS,
        ),
        "accuracy/std": ("standard deviation of these accuracies, of the population (ddof 0)", _WANG),
        "accuracy/weighted": (
            "mean of the accuracies weighted by the samples of the split that each client claims",
            _OURS,
        ),
        "accuracy/variance": ("the square of `accuracy/std`", _OURS),
        "accuracy/worst": ("the lowest accuracy of a client; the record names the client", _OURS),
        "accuracy/best": ("the highest accuracy of a client", _OURS),
        "accuracy/worst5": ("mean of the lowest 5 %: of floor(0.05 N) clients, at least one", _WANG),
        "accuracy/best5": ("mean of the highest 5 %: of floor(0.05 N) clients, at least one", _WANG),
        "accuracy/p5": ("5th percentile of the accuracies, interpolated linearly", f"{_HU}, table 8"),
        "accuracy/p95": ("95th percentile of the accuracies, interpolated linearly", f"{_HU}, table 8"),
        "accuracy/jain": ("(sum a)² / (N sum a²): 1 if all accuracies are equal, 1/N if all but one are 0", _JAIN),
        "epsilon/clients": (
            "what the noise on the steps has spent so far, for `privacy.client_delta`",
            "[differential privacy](differential-privacy.md)",
        ),
        "epsilon/samples": (
            "the largest epsilon that a reply states of its client's samples over all runs, each for its own delta",
            "[differential privacy](differential-privacy.md)",
        ),
        "loss/train": ("mean of the losses of the new model that the clients measured on their training splits", _OURS),
        "loss/validation": ("the same on their validation splits", _OURS),
        "loss/test": ("the same on their test splits", _OURS),
        "loss/train/<objective>": (
            "mean of the losses of the new model in that objective, on the training splits of the clients "
            "that serve it",
            _OURS,
        ),
        "loss/validation/<objective>": ("the same on their validation splits", _OURS),
        "loss/test/<objective>": ("the same on their test splits", _OURS),
        "accuracy/objective/<objective>": (
            "mean of the accuracies in that objective, over the clients that serve it, on the splits of "
            "`accuracy/mean`",
            _OURS,
        ),
        "metric/<metric>/mean": (
            "mean of a metric of the task over the clients, on the first of the test, validation and training splits "
            "that was evaluated; `<metric>/<key>` for each value of a metric with several",
            _OURS,
        ),
        "metric/<metric>/weighted": ("the same weighted by the samples that each client claims", _OURS),
        "metric/<metric>/worst": ("the worst of these values; `[evaluate.metrics]` says which is better", _OURS),
        "metric/<metric>/best": ("the best of these values", _OURS),
        "stop/value": ("the value by which `[stop]` ends the run", _OURS),
        "stop/best": ("the best of these values so far", _OURS),
        "stop/since": (
            "evaluations since the last one that counted as better (`stop.improvement`); 0 if it is this one",
            _OURS,
        ),
        "required/missing": ("in a skipped round: the required clients that it lacks", "`selection.required`"),
        "loss/worst": ("the highest loss of a client, for a task without accuracy", _OURS),
        "loss/jain": ("(sum F)² / (N sum F²) of the clients' losses, for a task without accuracy", _JAIN),
        "improved": (
            "share of the round's participants whose training loss did not rise in the step; an equal loss "
            "counts as improved, a loss that is no longer finite does not. Missing for `afl`, whose clients "
            "train from one model and evaluate another, and if the training split is not evaluated",
            _HU,
        ),
        "direction_norm": ("length of the direction d that the algorithm computed from the updates", _OURS),
        "stationarity": (
            "length of the shortest vector in the convex hull of the participants' updates: 0 if and only if "
            "no direction is good for all of them; measured for up to 512 updates",
            _HU,
        ),
        "stationarity/relative": ("`stationarity` divided by the length of the longest update, in [0, 1]", _OURS),
        "stationary": ("1 if the algorithm found no direction and the model stayed as it was, else 0", _OURS),
        "conflicts": ("number of pairs of updates with a negative inner product", _WANG),
        "conflict_depth": ("the least cosine of such a pair; 0 without conflicts", _WANG),
        "conflict_mean": ("the mean cosine of such pairs; 0 without conflicts", _WANG),
        "descent_min": (
            "the least cosine between d and an update: if negative, the step raises the loss of some client, "
            "to first order",
            _OURS,
        ),
        "descent_share": ("share of the updates that have no negative cosine with d", _OURS),
        "entropy": (
            "- sum lambda log lambda of the weights: log m if all m weights are equal, 0 if one client has "
            "all the weight",
            _OURS,
        ),
        "weight/<objective>": (
            "lambda of the objective in the step, absent in a round that left it out; the weights sum to 1, "
            "or to less if weights are fixed and an objective was left out",
            f"{_YANG}; {_ASKIN}",
        ),
        "objective/conflicts": (
            "number of pairs of objectives whose gradients (or averaged updates) have a negative inner "
            "product, by the algorithm's estimate",
            _OURS,
        ),
        "objective/conflict_depth": ("the least cosine of such a pair; 0 without conflicts", _OURS),
        "objective/conflict_mean": ("the mean cosine of such pairs; 0 without conflicts", _OURS),
        "objective/stationarity": (
            "sqrt(lambda' G lambda), the length of the weighted sum of the objectives' gradients (or averaged "
            "updates); of their exact gradients with `algorithm.exact_stationarity`",
            _YANG,
        ),
        "preference/divergence": (
            "KL divergence of the shares r_k F_k / sum r F from equal shares: 0 if the losses are as "
            "preferred, at most log M",
            _ASKIN,
        ),
        "step/rate": ("the server's learning rate of the round, times the step size that a line search chose", _OURS),
        "private/members": ("members whose updates are in the sum of a private round", _OURS),
        "private/rule_share": (
            "how much of the rule is left in the coefficients of a private round, from 0, plain averaging, to 1: they "
            "move towards plain averaging until every member's update is covered",
            _OURS,
        ),
        "bytes/up": (
            "bytes of the payloads that clients sent, accepted or refused (a refused one with its declared "
            "size); without the signed envelopes, about 1 kB each, and without TLS",
            _OURS,
        ),
        "bytes/refused": ("the part of `bytes/up` that was refused", _OURS),
        "bytes/down": (
            "bytes of the model files that clients fetched. A model counts once for each client that replied "
            "to an assignment with it, in the first such round, since workers keep the last models. The sums "
            "that `svd-two-way` sends back count, too. Fetched models without a reply are not counted, nor, "
            "in a simulation, models that only evaluations need",
            _OURS,
        ),
        "backdoor": (
            "share of the triggered test samples of other classes that the new model assigns to the "
            "attacker's class; in a simulation with such an attacker",
            _OURS,
        ),
        "evaluated": ("number of clients that evaluated the new model", _OURS),
        "evaluation/noise": (
            "of a private evaluation: the standard deviation of the noise on the mean accuracy; of a loss it is 10 "
            "times, of another metric `largest` times as large (`privacy.evaluation_noise`)",
            "[private rounds](privacy.md)",
        ),
    }
)


def accuracies(values: Sequence[float], name: str = "accuracy") -> dict[str, float]:
    """Average, spread and tails of the clients' accuracies, each in [0, 1]; see `DEFINITIONS`.

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
    """How far the updates are from Pareto stationarity: ||J lambda*||, the shortest vector in their hull.

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
