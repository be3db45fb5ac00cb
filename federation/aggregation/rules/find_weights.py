"""FindWeights (Askin et al., 2025, Algorithm 2): moves the weights of the objectives towards the min-norm point."""

import numpy as np

from federation.aggregation.interface import Matrix, Vector
from federation.aggregation.rules.afl import onto_simplex
from federation.sketches.base import clip_to_psd, symmetric

_RELATIVE_FLOOR = 1e-12


def find_weights(
    G: Matrix,
    before: Vector,
    *,
    beta: float = 1e-3,
    steps: int = 1000,
    raw: bool = False,
    floor: float | None = None,
) -> Vector:
    """Projected gradient steps on the simplex, lambda <- Proj(lambda - beta G lambda), from the last round's lambda.

    With beta * steps about 1 it does not reach the min-norm point (`qp.min_norm` does): it remembers earlier rounds.
    beta = 0 keeps the weights. G is first replaced by the nearest positive semi-definite matrix, and divided by
    (mean_k sqrt(G_kk + floor))^2.

    Args:
        G: Gram matrix of the objectives, (M, M); of one that is not symmetric, the symmetric part.
        before: lambda of the last round, (M,), in the simplex.
        beta: step size, not negative.
        steps: their number.
        raw: take G as it was estimated, as in the version that the paper analyses (Theorem 1), which makes one step.
        floor: None makes it 1e-12 of the largest G_kk, so that the weights do not depend on the gradients' scale; with
            the 1e-4 of the authors' code they do where norms are below about 0.01.

    Returns:
        Lambda, (M,), sum 1.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or a lambda that is no distribution.
    """
    M = len(before)
    if G.shape != (M, M) or M == 0:
        raise ValueError(f"G has shape {G.shape} for {M} objectives")
    if not np.isfinite(G).all():
        raise ValueError("G must be finite")
    if not (np.isfinite(before) & (before >= 0)).all() or abs(before.sum() - 1) > 1e-6:
        raise ValueError(f"the weights before must be a distribution; got {before.tolist()}")
    G = symmetric(G) if raw else clip_to_psd(G)
    if not G.any():
        return before.copy()
    if not raw:
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
    normalized: Vector = weights / weights.sum()
    return normalized
