"""Makes runs: the largest cosines that a search finds."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.leakage.federation import AttackedFederation
from experiments.leakage.specification import LeakageSpecification as Attack
from experiments.results import Measures
from experiments.search.members import Reals, SearchMembers
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
    random = np.random.default_rng([specification.seed, specification.members])
    m = specification.members
    cohort = Thresholds(m, specification.mode)
    members, level = SearchMembers.of(_rule(specification), cohort), SearchMembers.of(EVALUATION, cohort)
    visits = _updates(specification)
    began = time.process_time()
    gram, parts = _inner(visits), _inner([individual_parts(visit) for visit in visits])
    largest = {
        "cosine": CosineTarget(members, gram),
        "individual": CosineTarget(members, parts),
        "equal": CosineTarget(level, gram),
        "equal/individual": CosineTarget(level, parts),
    }
    lengths = np.sqrt(np.diag(gram))
    cosines = gram / np.outer(lengths, lengths)
    repeated = {"repeated": float(np.diag(cosines[:m, m:]).mean())} if specification.sums > 1 else {}
    return {
        "effective": float(members.least),
        "bound": members.bound,
        **{name: _largest(specification, target, random) for name, target in largest.items()},
        "correlation": float((cosines[:m, :m].sum() - m) / (m * (m - 1))),
        **repeated,
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
    federation = AttackedFederation(
        Attack(
            name=specification.name,
            seed=specification.seed,
            attack="labels",
            view="update",
            members=specification.members,
            colluders_at_most=0,
            alpha=specification.alpha,
            shadow=20,
            train=specification.train,
        )
    )
    visits = [federation.updates(specification.rounds, visit) for visit in range(specification.sums)]
    return [visit.raw if specification.raw else visit.units for visit in visits]


def _inner(visits: Sequence[Reals]) -> Reals:
    rows = np.vstack(visits)
    return rows @ rows.T


def _uncorrelated(gram: Reals, sums: int) -> Reals:
    """Inner products of updates of length 1 that only resemble those of the same member in another sum."""
    m = len(gram) // sums
    lengths = np.sqrt(np.diag(gram))
    repeated = float(np.diag((gram / np.outer(lengths, lengths))[:m, -m:]).mean())
    between: Reals = np.full((sums, sums), repeated)
    np.fill_diagonal(between, 1.0)
    return np.kron(between, np.eye(m)).astype(np.float64)
