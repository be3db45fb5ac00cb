"""Numbers that describe a direction and the rows that it is made of, from K and from products with the direction."""

import math

import numpy as np

from federation.aggregation.interface import Matrix, Vector
from federation.digests import derived_seed

MOST_COMPARED = 200  # rows that are compared with each other for metrics alone


def drawn_rows(seed: int, number: int, count: int) -> tuple[int, ...]:
    """The rows of a round that are compared with each other for metrics, where no rule compares all of them.

    Those with the `MOST_COMPARED` least of the numbers `derived_seed("gram-rows SEED NUMBER ROW")`: anyone who knows
    the specification can repeat the draw, and nobody can choose it.

    Args:
        seed: of the run.
        number: of the round.
        count: m, the rows of the round.

    Returns:
        Their places, ascending; none where there are no more than `MOST_COMPARED`: all are compared.
    """
    if count <= MOST_COMPARED:
        return ()
    places = sorted(range(count), key=lambda row: (derived_seed(f"gram-rows {seed} {number} {row}"), row))
    return tuple(sorted(places[:MOST_COMPARED]))


def describe(K: Matrix, coefficients: Vector, weights: Vector) -> dict[str, float]:
    """Diagnostics that every algorithm shares, all from K; see `measure`."""
    products = K @ coefficients
    return measure(K, products, math.sqrt(max(0.0, float(coefficients @ products))), weights)


def measure(
    K: Matrix, products: Vector, norm: float, weights: Vector, squares: Vector | None = None
) -> dict[str, float]:
    """Diagnostics of any direction.

    Args:
        K: Gram matrix of all m rows, or of those that are compared.
        products: of each row with the direction, shape (m,).
        norm: ||direction||.
        weights: lambda of the rows of this round, which come first; only these rows are measured.
        squares: ||u_i||^2 of all rows, shape (m,); None: the diagonal of K, which is of all of them.

    Returns:
        direction_norm: ||direction||.
        conflicts, conflict_depth, conflict_mean: see `conflicts`.
        entropy: of the weights, in nats; log m when all weigh the same.
        descent_min: the least cosine between the direction and a row that is not zero; negative where the step makes
            a client worse, to first order.
        descent_share: the share of these rows that the step does not make worse, in [0, 1].
    """
    K, products = K[: len(weights), : len(weights)], products[: len(weights)]
    norms: Vector = np.sqrt(np.diag(K) if squares is None else squares[: len(weights)])
    cosines = np.zeros(len(products))
    if norm > 0:
        np.divide(products / norm, norms, out=cosines, where=norms > 0)
    cosines = cosines[norms > 0]
    return {
        "direction_norm": norm,
        **conflicts(K),
        "entropy": entropy(weights),
        "descent_min": float(cosines.min(initial=1.0)),
        # A cosine of about -1e-9 may be a rounded zero.
        "descent_share": float((cosines >= -1e-9).mean()) if len(cosines) else 1.0,
    }


def entropy(weights: Vector) -> float:
    """The entropy of weights, in nats; 0 does not count."""
    positive: Vector = weights[weights > 0]
    return float(-(positive * np.log(positive)).sum()) + 0.0


def conflicts(K: Matrix) -> dict[str, float]:
    """Counts and measures the pairs of rows in conflict.

    Returns:
        conflicts: pairs with a negative inner product.
        conflict_depth: the least cosine of such a pair, in [-1, 0]; 0 where there is none.
        conflict_mean: the mean cosine of such pairs, in [-1, 0]; 0 where there is none.
    """
    i, j = np.nonzero(np.triu(K < 0, 1))
    norms: Vector = np.sqrt(np.diag(K))
    cosines = np.clip(K[i, j] / norms[i] / norms[j], -1.0, 0.0)
    return {
        "conflicts": float(len(cosines)),
        "conflict_depth": float(cosines.min(initial=0.0)),
        "conflict_mean": float(cosines.mean()) if len(cosines) else 0.0,
    }
