"""Makes runs: the largest cosines that a search finds."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cover_search.failures import told
from cover_search.members import SearchMembers
from cover_search.optimizer import PlanSearch
from cover_search.plan import Plan, crafted
from cover_search.reading import SumReader, blurred_vector
from cover_search.specification import SearchSpecification
from cover_search.target import CosineTarget, SignsTarget, individual_parts
from cover_search.updates import Updates, updates
from federation.secure.blur import deviation
from federation.secure.bounds import EVALUATION, BoundKind, Bounds, bounds, is_plugged_in
from federation.secure.thresholds import Thresholds
from fedpareto.experiments.result_store import Measures
from leakage.federation import Reals

_DRAWS = 200
_READINGS = 8  # assignments of members that train, of whose sums signs are decoded
_WORK = 2**27  # combinations of signs that are weighed in all of them


def measure(specification: SearchSpecification) -> Measures:
    """The measures of a run.

    Returns:
        `bound`, 1 / sqrt(E*); `cosine`, the largest found of what is left of the sum with the attacked member's update;
        `individual`, the largest found of individual parts: from each update the mean of the other members' is
        projected out; `equal` and `equal/individual`, the same with equal weights, where the coordinator chooses
        members and losses only. A coordinator that knows nothing chooses for uncorrelated updates, and cosines are
        means over random members. `decoded` and `decoded/equal` are those of decoded signs, where the coordinator
        chooses for them. There are no individual parts then, and with blur. With blur, `noise` is the length of the
        noise in the sum of all members with equal weights, and `kept` the cosine of this sum with the one without
        noise; where members fail, there are the measures of `failures.told`. `effective` is E*, `correlation` the mean
        cosine of two members' updates, `repeated` that of a member's updates in two sums; `seconds` of processor time
        that all this took.
    """
    m = specification.members
    random = np.random.default_rng([specification.seed, m])
    cohort = Thresholds(m, specification.mode)
    members, level = SearchMembers(_rule(specification), cohort), SearchMembers(EVALUATION, cohort)
    given = updates(specification)
    began = time.process_time()
    alike: Reals = np.kron(np.ones((specification.sums, specification.sums)), np.eye(m)).astype(np.float64)
    gram = alike if specification.updates == "ideal" else _inner(given.visits)
    pairs = {"cosine": (members, gram), "equal": (level, gram)}
    if not specification.blur and specification.reader == "linear":
        parts = _inner([individual_parts(visit) for visit in given.visits])
        pairs = {"cosine": (members, gram), "individual": (members, parts)}
        pairs |= {"equal": (level, gram), "equal/individual": (level, parts)}
    found = {
        name: _largest(specification, _target(specification, *pair, given.copies), random)
        for name, pair in pairs.items()
    }
    if specification.reader == "signs":
        for name, rule in {"decoded": members, "decoded/equal": level}.items():
            target = _target(
                specification, rule, alike, given.copies, SignsTarget
            )  # signs of different members are independent
            found[name] = _decoded(specification, given, target, random)
    if specification.fails != "never" and specification.updates == "digits":
        found |= told(specification, random)
    cosines = _cosines(gram)
    return {
        "effective": float(members.least),
        "bound": members.bound,
        **found,
        **(_honest(given, deviation(specification.blur, cohort), random) if specification.blur else {}),
        "correlation": float((cosines[:m, :m].sum() - m) / (m * (m - 1))),
        **({"repeated": float(np.diag(cosines[:m, m:]).mean())} if specification.sums > 1 else {}),
        "seconds": time.process_time() - began,
    }


def _target(
    specification: SearchSpecification,
    members: SearchMembers,
    gram: Reals,
    copies: int,
    kind: type[CosineTarget] = CosineTarget,
) -> CosineTarget:
    return kind(
        members,
        gram,
        deviation(specification.blur, members.cohort),
        [copies * times for times in specification.asked],
        specification.knows == "others",
        specification.fails,
    )


def _search(specification: SearchSpecification, target: CosineTarget, random: np.random.Generator) -> Plan:
    trials, starts = specification.trials, list[Plan]()
    if target.members.fixed:  # nothing but members and losses: cheap to try
        trials *= 2
    if specification.blur or specification.reader == "signs":
        starts = crafted(target.members, specification.sums, random)
    return PlanSearch(target, specification.sums, trials, random, starts).best()


def _largest(specification: SearchSpecification, target: CosineTarget, random: np.random.Generator) -> float:
    if specification.knows != "nothing":
        return target.cosine(_search(specification, target, random))
    plan = _search(specification, replace(target, gram=_uncorrelated(target.gram, specification.sums)), random)
    draws = (replace(plan, places=random.permutation(len(plan.places))) for _ in range(_DRAWS))
    return float(np.mean([target.cosine(draw) for draw in draws]))


def _decoded(
    specification: SearchSpecification, given: Updates, target: CosineTarget, random: np.random.Generator
) -> float:
    """The cosine of decoded signs with the attacked member's update."""
    plan, readings = _search(specification, target, random), 1 if specification.updates == "ideal" else _READINGS
    reader = SumReader(target, given, specification.asked, random, _WORK // readings)
    draws = (replace(plan, places=random.permutation(len(plan.places))) for _ in range(readings))
    return float(np.mean([reader.read(draw).decoded for draw in draws]))


def _honest(given: Updates, size: float, random: np.random.Generator) -> Measures:
    """What the blur does to the sum of all members with equal weights."""
    vectors = given.visits[0]
    total = vectors.mean(0)
    noisy = np.mean([blurred_vector(vector, size, random) for vector in vectors], axis=0) * np.sqrt(1 + size**2)
    cosine = total @ noisy / (np.linalg.norm(total) * np.linalg.norm(noisy))
    return {"noise": float(np.linalg.norm(noisy - total)), "kept": float(cosine)}


def _rule(specification: SearchSpecification) -> Bounds:
    """The bounds that members enforce. Owners allow a plug-in by its name."""
    if is_plugged_in(specification.algorithm):
        return Bounds(kind=BoundKind.NONE, signed=True)
    if specification.algorithm == "evaluation":
        return EVALUATION
    rule = bounds(specification.algorithm, "uniform", specification.epsilon, ())
    if rule is None:
        raise ValueError(f"algorithm: {specification.algorithm} is not known")
    return rule


def _inner(visits: Sequence[Reals]) -> Reals:
    rows = np.vstack(visits)
    return np.asarray(rows @ rows.T)


def _uncorrelated(gram: Reals, sums: int) -> Reals:
    """Inner products of updates of length 1 that only resemble those of the same member in another sum."""
    m = len(gram) // sums
    between = np.full((sums, sums), np.diag(_cosines(gram)[:m, -m:]).mean())
    np.fill_diagonal(between, 1.0)
    return np.kron(between, np.eye(m)).astype(np.float64)


def _cosines(gram: Reals) -> Reals:
    lengths = np.sqrt(np.diag(gram))
    return np.asarray(gram / np.outer(lengths, lengths))
