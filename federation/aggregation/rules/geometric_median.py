"""The geometric median (Pillutla et al., 2022, "Robust Aggregation for Federated Learning", Algorithm 2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule, conclude
from federation.aggregation.geometry import coordinates, squared_distances
from federation.aggregation.interface import Combination, Matrix, Rows, Vector
from federation.spec.options import option

_BALANCED = 1e-7
_ITERATIONS = 200
_TOGETHER = 1e-7  # of their norms: K does not distinguish shorter distances from 0
_TIE = 1e-9  # relative: sums of the prior and costs that differ by less are equal


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Rule):
    """The v of least sum lambda0_i ||v - u_i||: every client pulls with its weight, however far away it is.

    Smoothed Weiszfeld: v <- sum c_i u_i with c_i in proportion to lambda0_i / max(nu, ||v - u_i||), or a step of
    Newton's where that gains more. The pulls lambda0_i (v - u_i) / max(nu, ||v - u_i||) balance exactly at the minimum
    of the smoothed (Huber) distances; `residual`, the norm of their sum, in [0, 1], certifies the answer.
    """

    name = "geometric-median"
    private = "gram"

    smoothing: float = option(
        1e-4, "nu, relative to the radius of the smallest ball that holds half of the prior", "[1e-9, 1]"
    )

    def combine(self, rows: Rows) -> Combination:
        points, prior = coordinates(rows.gram), rows.prior
        distances = _distances(rows.gram)
        ball, scale = _smallest_ball(distances, prior)
        if scale == 0:
            weights = prior * ball / (prior @ ball)
            return conclude(rows.gram, weights, weights, residual=0.0, iterations=0.0)
        costs = distances @ prior
        centre = points[costs <= costs.min() * (1 + _TIE)].mean(axis=0)  # among equally good updates none is preferred
        nu = self.smoothing * scale
        iteration = 0
        while True:
            away = centre - points
            far = np.maximum(nu, np.linalg.norm(away, axis=1))
            pulls = prior / far
            weights = pulls / pulls.sum()
            gradient = pulls @ away
            residual = float(np.linalg.norm(gradient))
            if residual <= _BALANCED or iteration == _ITERATIONS:
                break
            iteration += 1
            steep = away * np.sqrt(np.where(far > nu, pulls, 0.0))[:, None] / far[:, None]
            curvature = pulls.sum() * np.eye(len(points)) - steep.T @ steep
            newton = _solution(curvature, gradient)
            steps = [gradient / pulls.sum(), *(newton * 0.5**halved for halved in range(8))]
            centre = min((centre - step for step in steps), key=lambda v: _objective(v, points, prior, nu))
        return conclude(rows.gram, weights, weights, residual=residual, iterations=float(iteration))


def _objective(centre: Vector, points: Matrix, prior: Vector, nu: float) -> float:
    away = np.linalg.norm(centre - points, axis=1)
    return float(prior @ np.where(away > nu, away - nu / 2, away**2 / (2 * nu)))


def _solution(matrix: Matrix, right: Vector) -> Vector:
    """Solves `matrix` x = `right`; for a singular matrix, gives the least-squares solution of least norm."""
    try:
        return np.asarray(np.linalg.solve(matrix, right), dtype=np.float64)
    except np.linalg.LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, right, rcond=None)[0], dtype=np.float64)


def _distances(K: Matrix) -> Matrix:
    """||u_i - u_j||, shape (m, m); 0 where K cannot tell the two apart."""
    distances: Matrix = np.sqrt(squared_distances(K))
    norms = np.sqrt(np.diag(K))
    distances[distances <= _TOGETHER * (norms + norms[:, None])] = 0.0
    return distances


def _smallest_ball(distances: Matrix, prior: Vector) -> tuple[NDArray[np.bool_], float]:
    """The smallest ball around an update that holds more than half of the prior: its members, shape (m,), and radius.

    While honest clients hold more than half, a ball around one of them that reaches the others does, so attackers
    cannot stretch the radius. A radius of 0 means that more than half of the prior lies in one place: the median.
    """
    order = np.argsort(distances, axis=1, kind="stable")
    prior_within = np.cumsum(prior[order], axis=1)
    last = np.argmax(prior_within > 0.5 * (1 + _TIE), axis=1)
    radii = distances[np.arange(len(prior)), order[np.arange(len(prior)), last]]
    centre = int(np.argmin(radii))
    return distances[centre] <= radii[centre], float(radii[centre])
