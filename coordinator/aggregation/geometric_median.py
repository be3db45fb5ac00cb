"""The geometric median (Pillutla et al., 2022, "Robust Aggregation for Federated Learning", Algorithm 2)."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from coordinator.aggregation.base import Algorithm, HyperparameterError, conclude
from coordinator.aggregation.geometry import coordinates
from coordinator.aggregation.rules import Combination, Matrix, Rows, Vector

_BALANCED = 1e-7
_ITERATIONS = 200
_TOGETHER = 1e-7  # of their norms: what K cannot tell from no distance


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Algorithm):
    """The v of least sum lambda0_i ||v - u_i||: every client pulls with its weight, however far away it is.

    Smoothed Weiszfeld: v <- sum c_i u_i with c_i in proportion to lambda0_i / max(nu, ||v - u_i||), or a step of
    Newton's where that gains more. The pulls lambda0_i (v - u_i) / max(nu, ||v - u_i||) balance exactly at the minimum
    of the smoothed (Huber) distances; `residual`, the norm of their sum, in [0, 1], certifies the answer.
    """

    name: ClassVar[str] = "geometric-median"

    smoothing: float = field(default=1e-4, metadata={"help": "nu, relative to the distances among the closest half"})

    def __post_init__(self) -> None:
        if not (math.isfinite(self.smoothing) and 1e-9 <= self.smoothing <= 1):
            raise HyperparameterError(f"smoothing must lie in [1e-9, 1]; got {self.smoothing!r}")

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        points, prior = coordinates(rows.gram), rows.prior
        centre, scale = _start(points, prior)
        nu = self.smoothing * scale
        weights, residual, iteration = prior, 0.0, 0
        while nu > 0:
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
            newton = np.linalg.lstsq(curvature, gradient, rcond=None)[0]
            steps = [gradient / pulls.sum(), *(newton * 0.5**halved for halved in range(8))]
            centre = min((centre - step for step in steps), key=lambda v: _objective(v, points, prior, nu))
        return conclude(rows.gram, weights, weights, residual=residual, iterations=float(iteration))


def _objective(centre: Vector, points: Matrix, prior: Vector, nu: float) -> float:
    away = np.linalg.norm(centre - points, axis=1)
    return float(prior @ np.where(away > nu, away - nu / 2, away**2 / (2 * nu)))


def _start(points: Matrix, prior: Vector) -> tuple[Vector, float]:
    """The mean of the updates nearest to all, and the least median of an update's distances: the scale of nu.

    The median is often an update; among several equally good ones none is preferred. Attackers in the minority cannot
    stretch the scale. If half of the rows are in one place, the least distance counts; it is 0 if all of them are.
    """
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    norms = np.linalg.norm(points, axis=1)
    distances[distances <= _TOGETHER * (norms + norms[:, None])] = 0.0
    costs = distances @ prior
    apart = distances[distances > 0]
    scale = float(np.median(distances, axis=1).min()) or (float(apart.min()) if len(apart) else 0.0)
    return points[costs <= costs.min() * (1 + 1e-9)].mean(axis=0), scale
