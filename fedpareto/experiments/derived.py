"""Measures of several runs or rounds: rounds to a target, losses against single objectives, order on a front."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from federation.aggregation.metrics.drawn_round import delta_q, round_weights
from federation.aggregation.metrics.metrics import delta_m
from federation.aggregation.rules.preference import divergence
from fedpareto.experiments.definition import DeltaQ, Derived, Experiment, Target
from fedpareto.experiments.result_store import Measures, RunResult


def derived(experiment: Experiment, results: Sequence[RunResult]) -> list[RunResult]:
    """The results, with the experiment's derived measures in `final`.

    For each target: `rounds_to/VALUE/MEASURE`, the first evaluated round that reached it; `uploaded_to/...`, the amount
    that each participant had sent by then (MB); `steps_to/...`, the number of its local steps. `delta_m` (%) against
    the baselines of the same seed and condition, see `federation.aggregation.metrics.metrics`. `delta_q/last`,
    Delta_Q of the last model before which the weights were found and that was evaluated, against the reference of the
    same seed and condition; with mu and eta `delta_q/drawn`, its mean over such models, each with the probability
    that its round is drawn. On a front, for
    methods with a preference: `front/wanted` and `front/place`, the ranks by preference and by result, from 1, where
    the first objective counts most; `front/tau`, Kendall's tau-b of the two ranks, the same for all methods and NaN
    for a single one; `front/divergence`, mu of the last losses and the preference; `front/spread`, the largest r_k F_k
    divided by the smallest. For each group of clients, by their numbers from 0: `group/NAME`, the mean of their
    accuracies (%); it needs `client/...`, so there are at most ten clients. After each number of rounds in `after`, if
    the models were evaluated then: `after/NUMBER/...`, the measures of that round.
    """
    wanted = experiment.derived
    extended = []
    for item in results:
        together = [other for other in results if (other.condition, other.seed) == (item.condition, item.seed)]
        final = dict(item.final)
        for target in wanted.targets:
            final |= _reached(target, item.rounds)
        final |= _against_baselines(wanted, final, {other.method: other.final for other in together})
        if wanted.delta_q is not None:
            final |= _from_optimal(wanted.delta_q, item, together)
        final |= _of_groups(wanted.groups, final)
        final |= {
            f"after/{measures['round']:g}/{name}": value
            for measures in item.rounds
            if measures["round"] in wanted.after
            for name, value in measures.items()
        }
        if wanted.front is not None:
            final |= _on_the_front(wanted.front, item, together)
        extended.append(replace(item, final=final))
    return extended


def _reached(target: Target, rounds: Iterable[Measures]) -> Measures:
    for measures in rounds:
        value = measures.get(target.measure, math.nan)
        beyond = value > target.value if _higher_is_better(target.measure) else value < target.value
        if beyond or math.isclose(value, target.value):  # rounding can make a mean of 90 smaller by 1e-14
            name = f"{target.value:g}/{target.measure}"
            first = {"rounds_to": "round", "uploaded_to": "uploaded", "steps_to": "steps"}
            return {f"{what}/{name}": measures[key] for what, key in first.items() if key in measures}
    return {}


def _against_baselines(wanted: Derived, final: Measures, by_method: Mapping[str, Measures]) -> Measures:
    names = list(wanted.delta_m)
    baselines = [by_method.get(wanted.delta_m[name], {}).get(name, math.nan) for name in names]
    values = [final.get(name, math.nan) for name in names]
    if not names or not np.isfinite([*values, *baselines]).all():
        return {}
    return {"delta_m": delta_m(values, baselines, [_higher_is_better(name) for name in names])}


def _from_optimal(wanted: DeltaQ, item: RunResult, together: Iterable[RunResult]) -> Measures:
    """Delta_Q of models that were evaluated, and then got weights in the next round, which was evaluated, too."""
    optimal = next((other.final for other in together if other.method == wanted.reference), {})
    names = list(wanted.weights)
    best = [optimal.get(name, math.nan) for name in names]
    found = dict[int, float]()
    for before, after in pairwise(item.rounds):
        losses = [before.get(name, math.nan) for name in names]
        weights = [after.get(wanted.weights[name], math.nan) for name in names]
        if after["round"] == before["round"] + 1 and np.isfinite([*best, *losses, *weights]).all():
            found[int(before["round"])] = delta_q(weights, losses, best)
    if not found:
        return {}
    last = {"delta_q/last": found[max(found)]}
    if not wanted.mu:
        return last
    p = round_weights(max(found), mu=wanted.mu, eta=wanted.eta)[np.array(list(found)) - 1]
    return {**last, "delta_q/drawn": float(p @ np.array(list(found.values())) / p.sum())}


def _of_groups(groups: Mapping[str, Sequence[int]], final: Measures) -> Measures:
    """The mean accuracy of each group whose clients were all measured; clients are ordered by name."""
    clients = [final[name] for name in sorted(final) if name.startswith("client/")]
    return {
        f"group/{name}": float(np.mean([clients[number] for number in numbers]))
        for name, numbers in groups.items()
        if numbers and max(numbers) < len(clients)
    }


def _on_the_front(front: tuple[str, str], item: RunResult, together: Iterable[RunResult]) -> Measures:
    wanted, reached = dict[str, float](), dict[str, float]()
    for other in together:
        r, F = preference_of(other.spec), [other.final.get(name, math.nan) for name in front]
        if r and all(0 < loss < math.inf for loss in F):
            # On the ray r_1 F_1 = r_2 F_2, F_2 / F_1 = r_1 / r_2: the larger, the smaller the first loss should be.
            wanted[other.method], reached[other.method] = r[0] / r[1], F[1] / F[0]
    if item.method not in wanted:
        return {}
    from scipy.stats import kendalltau  # noqa: PLC0415 - loading takes 0.7 s

    tau = float(kendalltau(list(wanted.values()), list(reached.values())).statistic) if len(wanted) > 1 else math.nan
    preference, losses = np.array(preference_of(item.spec)), np.array([item.final[name] for name in front])
    return {
        "front/wanted": 1.0 + sum(value > wanted[item.method] for value in wanted.values()),
        "front/place": 1.0 + sum(value > reached[item.method] for value in reached.values()),
        "front/tau": tau,
        "front/divergence": divergence(losses, preference / preference.mean()),
        "front/spread": float((preference * losses).max() / (preference * losses).min()),
    }


def preference_of(spec: Mapping[str, object]) -> tuple[float, ...]:
    """The preference over two objectives in a run specification; empty if there is none."""
    algorithm = spec.get("algorithm")
    preference = tuple(algorithm.get("preference", ())) if isinstance(algorithm, Mapping) else ()
    return preference if len(preference) == 2 else ()


def _higher_is_better(measure: str) -> bool:
    return not measure.startswith("loss/")
