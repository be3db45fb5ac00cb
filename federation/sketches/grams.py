"""Each client's own Gram matrix, and nothing between clients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import ClientSketch, Jacobian, Matrix, Sketch, symmetric

_BLOCK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class GramSum(Sketch):
    """The sum of the clients' Gram matrices in place of the Gram matrix of their sum.

    The estimate is  G_kl ~ sqrt(P_k P_l) sum_i sqrt(p_ik p_il) <a_ik, a_il>,  P_k = sum_i p_ik.  With p = 1 it is
    "n times the sum", with p = 1/n the sum divided by n. It is right where all clients have one Jacobian, and
    otherwise an upper bound (by convexity, where each client has one weight for all its objectives) that may be far
    off: clients' gradients do not cancel in it. M_i (M_i + 1) / 2 floats (see `factor`), whatever the budget.
    """

    name: ClassVar[str] = "gram"

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        return (("factor", served * (served + 1) // 2),)

    def gram(self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int) -> Matrix:
        G = np.zeros((len(objectives), len(objectives)))
        mass = np.zeros(len(objectives))
        for sketch in self._checked(sketches):
            place, weights = placed(sketch, objectives), sketch.weights
            mass += place @ weights
            scaled = place * np.sqrt(weights)
            G += scaled @ from_factor(sketch.rows["factor"], len(weights)) @ scaled.T
        return symmetric(G * np.sqrt(np.outer(mass, mass)))

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        return {"factor": factor(A)}


def factor(A: Jacobian) -> Matrix:
    """The upper triangle of R with R^T R = A A^T, row by row, M (M + 1) / 2 values.

    In float32 it keeps small norms beside large ones, and definiteness, which the Gram matrix itself would lose.
    """
    m = len(A)
    R = np.zeros((m, m))
    for start in range(0, A.shape[1], _BLOCK):
        block = A[:, start : start + _BLOCK].astype(np.float64)
        R = np.linalg.qr(np.vstack([R, block.T])).R
    return R[np.triu_indices(m)]


def from_factor(values: NDArray[np.float32], m: int) -> Matrix:
    """R^T R, (m, m), of what `factor` returned."""
    R = np.zeros((m, m))
    R[np.triu_indices(m)] = values
    return symmetric(R.T @ R)


def placed(sketch: ClientSketch, objectives: tuple[str, ...]) -> Matrix:
    """The places of a sketch's objectives among these, as a matrix (M, M_i) of 0 and 1."""
    place = np.array([[float(name == own) for own in sketch.objectives] for name in objectives])
    return place.reshape(len(objectives), len(sketch.objectives))
