"""An adversary: a search over whole rounds of updates for those on which a rule does worst."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.interface import Combination
from federation.aggregation.phases import Replies, RoundContext, Selected
from federation.aggregation.registry import algorithm
from tests.federation.aggregation.scene import Matrix, Vector, last, reply, rows_of

_RESOLUTION = 1e-6  # of the longest honest update: what a Gram matrix in float64 cannot tell from nothing


def decided(name: str, **hyperparameters: Any) -> Callable[[Matrix], Combination]:
    """What a rule answers to updates (m, d) with a uniform prior and equal losses and accuracies."""
    chosen = algorithm(name, hyperparameters)
    assert isinstance(chosen, Rule)

    def answer(U: Matrix) -> Combination:
        told = np.ones(len(U))
        names = tuple(map(str, range(len(U))))
        return chosen.decide(rows_of(U, losses=told, accuracies=told / 2, clients=names))

    return answer


def coefficients(name: str, **hyperparameters: Any) -> Callable[[Matrix], Vector]:
    """The coefficients (m,) of a rule that has them."""
    answer = decided(name, **hyperparameters)
    return lambda U: answer(U).coefficients


def rule(name: str, **hyperparameters: Any) -> Callable[[Matrix], Vector]:
    """The direction (d,) of a rule."""
    answer = decided(name, **hyperparameters)

    def direction(U: Matrix) -> Vector:
        combination = answer(U)
        wise = combination.coordinates
        if wise is None:
            return combination.coefficients @ U
        columns = np.sort(wise.matrix @ U, axis=0)
        found: Vector = columns[wise.trim : len(columns) - wise.trim].mean(axis=0)
        return found

    return direction


def rule_over_objectives(name: str, **hyperparameters: Any) -> Callable[[NDArray[np.float64]], Vector]:
    """The direction (d,) of a rule that asks each client for a row for each of its M objectives, (clients, M, d)."""
    chosen = algorithm(name, hyperparameters)

    def direction(rows: NDArray[np.float64]) -> Vector:
        _, M, d = rows.shape
        objectives = tuple(f"objective {k}" for k in range(M))
        facts = {"losses": dict.fromkeys(objectives, 1.0), "names": objectives, "objectives": objectives}
        replies = [reply(f"client {i}", *own, **facts) for i, own in enumerate(rows.astype(np.float32))]
        selected = {reply.client_id: Selected(1, objectives) for reply in replies}
        context = RoundContext(number=0, total=1, objectives=objectives, parameters=d, selected=selected)
        conversation = chosen.round(context)
        next(conversation)
        found: Vector = last(conversation, Replies(replies)).combination.coefficients @ rows.reshape(-1, d)
        return found

    return direction


def search(starts: Iterator[Matrix], harm: Callable[[Matrix], float], *, steps: int, seed: int) -> tuple[float, Matrix]:
    """The largest harm that was found, and the updates (m, d) that do it.

    From each start, random changes of one row or of all rows are tried, and kept where they do not reduce the harm.
    The rows that change may be attackers' or honest ones: a bound holds for all of them.
    """
    rng = np.random.default_rng(seed)
    worst, found = -np.inf, np.zeros((0, 0))
    for U in starts:
        here = harm(U)
        for _ in range(steps):
            V = changed(U, rng)
            there = harm(V)
            if there >= here:
                U, here = V, there  # noqa: PLW2901 - the place where the search goes on
        if here > worst:
            worst, found = here, U
    return worst, found


def changed(U: Matrix, rng: np.random.Generator) -> Matrix:
    """The updates with one random change."""
    V = U.copy()
    m, d = V.shape
    i, j = rng.choice(m, 2, replace=False)
    spread = np.median(np.linalg.norm(V - np.median(V, axis=0), axis=1)) + 1e-9
    match rng.integers(7):
        case 0:  # a little noise on one row
            V[i] += spread * 10.0 ** rng.uniform(-4, 1) * rng.standard_normal(d)
        case 1:  # one row longer or shorter
            V[i] *= 10.0 ** rng.uniform(-2, 2)
        case 2:  # onto the line through another row
            V[i] += rng.uniform(-2, 2) * (V[j] - V[i])
        case 3:  # a copy of another row, nearly or exactly
            V[i] = V[j] + spread * rng.choice([0.0, 1e-6, 1e-2]) * rng.standard_normal(d)
        case 4:  # the rest of the rows together
            V[i] += rng.uniform(-1, 1) * (V.mean(axis=0) - V[i])
        case 5:  # noise on all rows
            V += spread * 10.0 ** rng.uniform(-4, -1) * rng.standard_normal(V.shape)
        case 6:  # a group of rows moves as one
            V[rng.random(m) < 0.4] += spread * 10.0 ** rng.uniform(-2, 1) * rng.standard_normal(d)
    return V


def known_attacks(n: int, f: int, d: int, seed: int) -> Iterator[Matrix]:
    """Rounds (n, d) with which a search begins: n - f honest updates, then f attackers of a known kind.

    In the first, all honest updates are the same: a robust rule returns them. It cannot know that the f others are not
    the honest ones; if they are, its squared error is f / (n - 2 f) of the variance. No rule has a smaller kappa
    (Allouah et al., 2023, proposition 6).
    """
    rng = np.random.default_rng([seed, n, f, d])
    common = rng.standard_normal(d)
    yield np.vstack([np.tile(common, (n - f, 1)), np.zeros((f, d))])
    kinds = ("loose", "tight", "one apart", "two groups")
    for kind, attack in itertools.product(kinds, ("far", "sign flip", "alie", "mimic", "edge", "beyond")):
        honest = rng.standard_normal((n - f, d)) * {"tight": 1e-3}.get(kind, 1.0)
        if kind == "one apart":
            honest[0] += 5 * common
        if kind == "two groups":
            honest = 0.1 * honest + np.where(np.arange(n - f)[:, None] < f, 1.0, 0.0) * common
        honest += common
        mean, deviation = honest.mean(axis=0), honest.std(axis=0)
        away = np.argmax(np.linalg.norm(honest - mean, axis=1))
        rows = {
            "far": 10.0 ** rng.uniform(2, 9) * rng.standard_normal((f, d)),
            "sign flip": np.tile(-rng.uniform(0.5, 10) * mean, (f, 1)),
            "alie": np.tile(mean - rng.uniform(0.3, 2) * deviation, (f, 1)),
            "mimic": np.tile(honest[away], (f, 1)),
            "edge": np.tile(mean + rng.uniform(0.5, 3) * (honest[away] - mean), (f, 1)),
            "beyond": honest[:1] + rng.uniform(1, 3) * np.linalg.norm(deviation) * rng.standard_normal((f, d)),
        }
        yield np.vstack([honest, rows[attack]])


def conflict(U: Matrix, direction: Vector, size: float) -> float:
    """By how much the direction is against the update that it hurts most: -min <direction, u_i> / (size ||u_i||)."""
    norms = np.linalg.norm(U, axis=1)
    there = norms > 0
    if size == 0 or not there.any():
        return -np.inf
    return float(-((U[there] @ direction) / norms[there]).min() / size)


def excess(U: Matrix, direction: Vector, f: int) -> float:
    """The kappa of Allouah et al. (2023), definition 2, that this direction needs at least.

    The largest ||direction - mean of S||^2 over the mean of ||u_i - mean of S||^2 for i in S, over all sets S of m - f
    rows: whichever f rows are the attackers'. An error that K cannot resolve counts as none.
    """
    members = _subsets(len(U), len(U) - f)
    size = len(U) - f
    with np.errstate(over="ignore"):
        means = members @ U / size
        offsets = U[None] - means[:, None]
        squares = (offsets**2).sum(axis=2)
        variances = (members * squares).sum(axis=1) / size
        errors = np.linalg.norm(direction - means, axis=1)
    resolved = _RESOLUTION * (members * np.linalg.norm(U, axis=1)).max(axis=1) + 1e-300
    return float((np.maximum(errors - resolved, 0.0) ** 2 / np.maximum(variances, resolved**2)).max())


@cache
def _subsets(m: int, size: int) -> Matrix:
    """Every set of `size` of m rows, as rows of zeros and ones."""
    chosen = np.array(list(itertools.combinations(range(m), size)))
    members = np.zeros((len(chosen), m))
    np.put_along_axis(members, chosen, 1.0, axis=1)
    return members
