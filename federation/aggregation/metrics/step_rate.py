"""The server's rate of a round: its schedule and, with "auto", a bound on the length of the step.

The bound compares the direction with the members' updates. It is computed from signed numbers alone, by products,
quotients, square roots and correctly rounded sums, so that every processor finds the same bits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median_low

import numpy as np

from federation.aggregation.interface import Matrix, Vector
from federation.aggregation.phases import PhaseReply, Step
from federation.spec.run_sections import AUTO
from federation.spec.run_spec import RunSpec

NORM = "norm"  # the number of a private round by which a member shows the length of its update


def server_rate(learning_rate: float, decay: float, t: int, T: int, every: int = 100) -> float:
    """eta_t = eta_0 beta^floor(t / P), beta = decay^(P / T) (FedMGDA+, section 6.1.5, where P = 100).

    `decay` is the share of eta_0 that is left after all T rounds, 0 for no decay; `every` is P, in rounds.
    """
    if decay == 0:
        return learning_rate
    return float(learning_rate * (decay ** (every / T)) ** (t // every))


def inverse_rate(learning_rate: float, t: int) -> float:
    """eta_t = eta_0 2 / (t + 2): with eta_0 = 1/c the 2 / (c (t + 2)) of FedMGDA+, theorem 2 (c: strong convexity)."""
    return learning_rate * 2.0 / (t + 2.0)


def scheduled_rate(spec: RunSpec, number: int) -> float:
    """The rate of the round with this number by the schedule alone; "auto" begins at 1, the most that it can be."""
    server = spec.server
    first = 1.0 if isinstance(server.learning_rate, str) else server.learning_rate
    if server.schedule == "inverse":
        return inverse_rate(first, number)
    return server_rate(first, server.decay, number, spec.rounds, server.decay_every)


def step_rate(spec: RunSpec, number: int, step: Step, K: Matrix, coefficients: Vector) -> float:
    """The rate of a step: that of the schedule, times the size that a line search chose, times the bound of "auto".

    Args:
        spec: of the run.
        number: of the round.
        step: as the rule decides it.
        K: over the rows of the step, as signed, shape (m, m).
        coefficients: of these rows, as signed, shape (m,).

    Raises:
        ValueError: with "auto", the direction is made coordinate by coordinate, or the shapes differ.
    """
    rate = step.size * scheduled_rate(spec, number)
    if spec.server.learning_rate != AUTO:
        return rate
    if step.combination.coordinates is not None:
        raise ValueError(
            f'server.learning_rate = "{AUTO}": {spec.algorithm.name} makes its direction coordinate by coordinate, so '
            "its length does not follow from the Gram matrix: give a number, such as 1"
        )
    return rate * bound(step_lengths(step, K) or (), direction_length(K, coefficients))


def bound(lengths: Sequence[float], direction: float) -> float:
    """The factor, at most 1, that makes a direction of this length no longer than the lower median of some lengths.

    Of an even number of lengths, the lower median is the smaller one of the two in the middle. So it lies within the
    lengths of the honest members as long as these are more than half; half of the members can make it 0.

    Raises:
        ValueError: there are no lengths.
    """
    if not lengths:
        raise ValueError("there are no updates whose lengths could bound the step")
    median = median_low(lengths)
    return 1.0 if direction <= median else median / direction


def step_lengths(step: Step, K: Matrix | None) -> list[float] | None:
    """The lengths of the members' updates that a step combines, as of `update_lengths`."""
    told = (*step.consulted, *step.replies)
    return update_lengths(K, step.replies, told, private=step.combined is not None)


def update_lengths(
    K: Matrix | None, combined: Sequence[PhaseReply], told: Iterable[PhaseReply], *, private: bool
) -> list[float] | None:
    """The lengths of the members' updates: from K, or in a private round as the members have shown them.

    Args:
        K: over the rows of the step; None where it is not known.
        combined: the replies that the step combines.
        told: all replies that the step depends on.
        private: True if K does not have the members' rows.

    Returns:
        One length for each reply; None where they are not known.
    """
    if private:
        return shown_lengths([reply.client_id for reply in combined], told)
    return None if K is None else member_lengths(K, [len(reply.rows) for reply in combined])


def member_lengths(K: Matrix, rows: Sequence[int]) -> list[float]:
    """The length of each member's update: one number each, so that nobody counts more by sending more rows.

    Args:
        K: over the rows, those of each member side by side; rows of earlier rounds come last, and do not count.
        rows: the number of rows of each member; of several, the lower median counts.

    Raises:
        ValueError: K has fewer rows.
    """
    if sum(rows) > len(K):
        raise ValueError(f"the members sent {sum(rows)} rows; K has {len(K)}")
    norms = np.sqrt(np.maximum(np.diagonal(K), 0.0)).tolist()
    ends = np.cumsum(rows, dtype=int).tolist()
    return [median_low(norms[end - count : end]) for end, count in zip(ends, rows, strict=True) if count]


def shown_lengths(members: Iterable[str], replies: Iterable[PhaseReply]) -> list[float]:
    """The lengths that these members have shown in the replies of a private round; 0 for one that showed none."""
    shown: Mapping[str, float] = {reply.client_id: reply.metrics[NORM] for reply in replies if NORM in reply.metrics}
    return [max(0.0, shown.get(name, 0.0)) for name in members]


def direction_length(K: Matrix, coefficients: Vector) -> float:
    """||c U|| from K, (m, m), and c, (m,), each product and the sum rounded as IEEE 754 says, in any order of the rows.

    Infinite where float64 cannot hold a product.

    Raises:
        ValueError: the shapes differ.
    """
    if coefficients.shape != (len(K),):
        raise ValueError(f"there are {len(coefficients)} coefficients for {len(K)} rows")
    used = np.flatnonzero(coefficients)
    c = coefficients[used]
    with np.errstate(over="ignore", invalid="ignore"):
        products = (factor * K[row, used] * c for row, factor in zip(used, c, strict=True))
        try:
            square = math.fsum(chain.from_iterable(part.tolist() for part in products))
        except (OverflowError, ValueError):  # the sum exceeds float64; or infinities of both signs
            return math.inf
    return math.inf if math.isnan(square) else math.sqrt(max(square, 0.0))
