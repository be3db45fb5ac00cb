"""Whether one sum, or the Gram matrix, tells that a member's computation has failed.

The coordinator has seen sums of sessions in which nobody failed. Members have equal weights. Probabilities are those
that a session in which the attacked member fails looks more like a failure than one in which it does not: 0.5 says
nothing, 1 everything.
"""

import numpy as np

from cover_search.reading import answer, blurred_vector
from cover_search.specification import SearchSpecification
from cover_search.updates import trained_federation
from federation.secure.blur import deviation
from federation.secure.thresholds import Thresholds
from fedpareto.experiments.result_store import Measures
from leakage.federation import Reals, unit_rows

_KNOWN, _SESSIONS = 4, 24  # sessions whose sums the coordinator knows, and those that it judges


def told(specification: SearchSpecification, random: np.random.Generator) -> Measures:
    """The probabilities of members that train on digits.

    Returns:
        `told/zeros`, by the length of the sum in coordinates that were zero in all known sums; `told/length`, by the
        length of the whole sum; `told/gram`, by the cosines of the member's vector with those of the others.
    """
    cohort, federation = Thresholds(specification.members, specification.mode), trained_federation(specification)
    size = deviation(specification.blur, cohort)
    visits = [unit_rows(federation.updates(specification.rounds, visit)) for visit in range(_KNOWN + _SESSIONS)]
    unused = ~np.any([visit.any(0) for visit in visits[:_KNOWN]], axis=0)
    sessions: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for visit in visits[_KNOWN:]:
        chosen = visit[random.permutation(cohort.m)[: cohort.n_min]]
        for fails, seen in sessions.items():
            first = answer(chosen[0], specification.fails if fails else "never", random)
            seen.append(_suspicion(np.stack([first, *chosen[1:]]), unused, size, random))
    working, failing = np.array(sessions[False]), np.array(sessions[True])
    found = [_probability(*columns) for columns in zip(working.T, failing.T, strict=True)]
    return dict(zip(("told/zeros", "told/length", "told/gram"), found, strict=True))


def _suspicion(
    vectors: Reals, unused: np.ndarray[tuple[int], np.dtype[np.bool_]], size: float, random: np.random.Generator
) -> tuple[float, float, float]:
    """Numbers that are large if the first member has failed."""
    noisy = np.stack([blurred_vector(vector, size, random) if vector.any() else vector for vector in vectors])
    total = noisy.mean(0)
    return float(np.linalg.norm(total[unused])), -float(np.linalg.norm(total)), -float((noisy[1:] @ noisy[0]).mean())


def _probability(working: Reals, failing: Reals) -> float:
    above, below = failing[:, None] > working, failing[:, None] < working
    return float(0.5 + (above.mean() - below.mean()) / 2)
