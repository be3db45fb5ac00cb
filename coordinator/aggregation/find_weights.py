"""FindWeights (Askin et al., 2025, Algorithm 2): the weights of the objectives follow the min-norm point, slowly."""

from math import isfinite

import numpy as np

from coordinator.aggregation.afl import onto_simplex
from coordinator.aggregation.rules import Matrix, Vector
from federation.sketches import clip_to_psd
from federation.sketches.base import symmetric

__all__ = ["AUTHORS_FLOOR", "clip_to_psd", "find_weights"]

AUTHORS_FLOOR = 1e-4  # under the square root, in the authors' code
_RELATIVE_FLOOR = 1e-12


def find_weights(
    G: Matrix,
    before: Vector,
    *,
    beta: float = 1e-3,
    steps: int = 1000,
    normalise: bool = True,
    psd: bool = True,
    floor: float | None = None,
) -> Vector:
    """Projected gradient steps on the simplex, lambda <- Proj(lambda - beta G lambda), from the last round's lambda.

    With beta * steps about 1 it does not reach the min-norm point (`qp.min_norm` does): it remembers earlier rounds.
    beta = 0 keeps the weights. The version that the paper analyses (Theorem 1) makes one step with the matrix as it was
    estimated: not normalised, and not made positive semi-definite.

    Args:
        G: Gram matrix of the objectives, (M, M); of one that is not symmetric, the symmetric part.
        before: lambda of the last round, (M,), in the simplex.
        beta: step size, not negative.
        steps: how many.
        normalise: divide G by (mean_k sqrt(G_kk + floor))^2 first.
        psd: first replace G by the nearest positive semi-definite matrix.
        floor: None makes it 1e-12 of the largest G_kk, so that the weights do not depend on the gradients' scale; with
            the authors' 1e-4 they do where norms are below about 0.01.

    Returns:
        Lambda, (M,), sum 1.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a lambda that is no distribution, a negative
            step, a matrix to be normalised as it is.
    """
    M = len(before)
    if G.shape != (M, M) or M == 0:
        raise ValueError(f"G has shape {G.shape} for {M} objectives")
    if not np.isfinite(G).all():
        raise ValueError("G must be finite")
    if not (np.isfinite(before) & (before >= 0)).all() or abs(before.sum() - 1) > 1e-6:
        raise ValueError(f"the weights before must be a distribution; got {before.tolist()}")
    if not (isfinite(beta) and beta >= 0 and steps >= 0):
        raise ValueError(f"beta and steps must not be negative; got {beta!r} and {steps!r}")
    if normalise and not psd:
        raise ValueError("only a positive semi-definite matrix can be normalised")
    G = clip_to_psd(G) if psd else symmetric(G)
    if not G.any():
        return before.copy()
    if normalise:
        largest = float(np.diag(G).max())
        under = floor / largest if floor is not None else _RELATIVE_FLOOR
        G = G / largest
        G = G / np.sqrt(np.diag(G) + under).mean() ** 2
    weights = before
    for _ in range(steps):
        moved = onto_simplex(weights - beta * (G @ weights))
        if np.array_equal(moved, weights):
            break
        weights = moved
    found: Vector = weights / weights.sum()
    return found
