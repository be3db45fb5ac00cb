"""Makes runs: the largest cosines that a search finds."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.leakage.federation import AttackedFederation, Reals, unit_rows
from experiments.leakage.specification import LeakageSpecification as Attack
from experiments.results import Measures
from experiments.search.members import SearchMembers
from experiments.search.optimiser import PlanSearch
from experiments.search.specification import SearchSpecification
from experiments.search.target import CosineTarget, individual_parts
from federation.secure.bounds import EVALUATION, Bounds, bounds
from federation.secure.thresholds import Thresholds

_DRAWS = 200


def measure(specification: SearchSpecification) -> Measures:
    """The measures of a run.

    Returns:
        `bound`, 1 / sqrt(E*); `cosine`, the largest found of what is left of the sum with the attacked member's update;
        `individual`, the largest found of individual parts: from each update the mean of the other members' is
        projected out; `equal` and `equal/individual`, the same with equal weights, where the coordinator chooses
        members and losses only. A coordinator that knows nothing chooses for uncorrelated updates, and cosines are
        means over random members. `effective` is E*, `correlation` the mean cosine of two members' updates, `repeated`
        that of a member's updates in two sums; `seconds` of processor time that the four searches took.
    """
    m = specification.members
    random = np.random.default_rng([specification.seed, m])
    cohort = Thresholds(m, specification.mode)
    members, level = SearchMembers(_rule(specification), cohort), SearchMembers(EVALUATION, cohort)
    visits = _updates(specification)
    began = time.process_time()
    gram, parts = _inner(visits), _inner([individual_parts(visit) for visit in visits])
    pairs = {"cosine": (members, gram), "individual": (members, parts)}
    pairs |= {"equal": (level, gram), "equal/individual": (level, parts)}
    cosines = _cosines(gram)
    return {
        "effective": float(members.least),
        "bound": members.bound,
        **{name: _largest(specification, CosineTarget(*pair), random) for name, pair in pairs.items()},
        "correlation": float((cosines[:m, :m].sum() - m) / (m * (m - 1))),
        **({"repeated": float(np.diag(cosines[:m, m:]).mean())} if specification.sums > 1 else {}),
        "seconds": time.process_time() - began,
    }


def _largest(specification: SearchSpecification, target: CosineTarget, random: np.random.Generator) -> float:
    members, sums, trials = target.members, specification.sums, specification.trials
    if members.fixed:  # nothing but members and losses: cheap to try
        trials *= 2
    if specification.knows == "gram":
        return target.cosine(PlanSearch(target, sums, trials, random).best())
    plan = PlanSearch(CosineTarget(members, _uncorrelated(target.gram, sums)), sums, trials, random).best()
    draws = (replace(plan, places=random.permutation(len(plan.places))) for _ in range(_DRAWS))
    return float(np.mean([target.cosine(draw) for draw in draws]))


def _rule(specification: SearchSpecification) -> Bounds:
    if specification.algorithm == "evaluation":
        return EVALUATION
    rule = bounds(specification.algorithm, "uniform", specification.epsilon, ())
    if rule is None:
        raise ValueError(f"algorithm: {specification.algorithm} is not known")
    return rule


def _updates(specification: SearchSpecification) -> list[Reals]:
    """The members' updates in each sum, (m, d)."""
    if specification.updates == "ideal":
        return [np.eye(specification.members)]
    same = specification.model_dump(include={"name", "seed", "members", "alpha", "train"})
    attack = Attack(attack="labels", view="update", colluders_at_most=0, shadow=20, **same)
    federation = AttackedFederation(attack)
    visits = [federation.updates(specification.rounds, visit) for visit in range(specification.sums)]
    return visits if specification.raw else [unit_rows(visit) for visit in visits]


def _inner(visits: Sequence[Reals]) -> Reals:
    rows = np.vstack(visits)
    return rows @ rows.T


def _uncorrelated(gram: Reals, sums: int) -> Reals:
    """Inner products of updates of length 1 that only resemble those of the same member in another sum."""
    m = len(gram) // sums
    between = np.full((sums, sums), np.diag(_cosines(gram)[:m, -m:]).mean())
    np.fill_diagonal(between, 1.0)
    return np.kron(between, np.eye(m)).astype(np.float64)


def _cosines(gram: Reals) -> Reals:
    lengths = np.sqrt(np.diag(gram))
    return np.asarray(gram / np.outer(lengths, lengths))
