"""Lengths, angles and distances of the updates from K, and the updates themselves up to a rotation."""

import numpy as np

from federation.aggregation.interface import Matrix, Vector


def unit_gram(K: Matrix) -> Matrix:
    """The Gram matrix of the rows scaled to norm 1, shape (m, m); zero rows stay zero."""
    inverse = inverse_norms(K)
    unit: Matrix = K * inverse * inverse[:, None]
    np.fill_diagonal(unit, inverse > 0)
    return unit


def inverse_norms(K: Matrix) -> Vector:
    """1/||u_i||, shape (m,); 0 for a zero row, which contributes nothing."""
    return inverse(np.sqrt(np.diag(K)))


def inverse(norms: Vector) -> Vector:
    """1/||u_i|| of these norms, shape (m,); 0 for a zero row, which contributes nothing."""
    return np.divide(1.0, norms, out=np.zeros(len(norms)), where=norms > 0)


def squared_distances(K: Matrix) -> Matrix:
    """||u_i - u_j||^2, shape (m, m)."""
    squares = np.diag(K)
    distances: Matrix = np.maximum(squares + squares[:, None] - 2 * K, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def coordinates(K: Matrix) -> Matrix:
    """Vectors of m numbers, one for each row, whose Gram matrix is K: the updates up to a rotation, shape (m, m).

    Rules that only move rows towards each other can compute on them as if they were the updates. The angles are
    factored, not K, so that each row is accurate relative to its own norm; factors of the size of rounding are cut off.
    """
    values, vectors = np.linalg.eigh(unit_gram(K))
    values[values <= 8 * np.finfo(np.float64).eps * len(K)] = 0.0
    points: Matrix = vectors * np.sqrt(values) * np.sqrt(np.diag(K))[:, None]
    return points


def clipping(norms: Vector, radius: float) -> Vector:
    """min(1, radius / ||u_i||), shape (m,); with radius 0, the median of the norms takes its place.

    The median lies between norms of honest clients as long as they are more than half, so attackers cannot set it.
    """
    bound = radius or float(np.median(norms))
    return np.divide(bound, norms, out=np.ones(len(norms)), where=norms > bound)
