"""FedCMOO's own compression (Askin et al., 2025, Appendix B): the Jacobian as a nearly square matrix of low rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.sketches.base import (
    ClientSketch,
    Embedding,
    Jacobian,
    Matrix,
    Message,
    SketchError,
    clip_to_psd,
    fits,
    narrow,
)
from federation.sketches.draws import uniform, words
from federation.sketches.grams import factor, from_factor, placed

_POWER_ITERATIONS = 2
_BLOCK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Svd(Embedding):
    """One-way: a truncated randomised SVD of the reshaped Jacobian; the Gram matrix of the sum of the truncations.

    With q = floor(sqrt(d M_i)), entry (k, a) of A goes to row a mod q, column (a div q) M_i + k of a matrix of q rows.
    U S, (q, r), and V^T, (r, columns), are sent row by row, r (q + columns) floats; r is the largest that the budget
    allows, at least 1. (The paper's r = floor(budget/2 sqrt(d/M)) takes both sides to be sqrt(dM) long and so may spend
    a little more.)
    """

    name: ClassVar[str] = "svd"

    def rank(self, served: int) -> int:
        """The rank r of a client that serves this many objectives."""
        rows, columns = square_shape(self.d, served)
        return min(rows, columns, max(1, int(self.budget * self.d) // (rows + columns)))

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        rows, columns = square_shape(self.d, served)
        rank = self.rank(served)
        return (("left", rows * rank), ("right", rank * columns))

    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        rank = self.rank(served)
        left = message["left"].reshape(-1, rank).astype(np.float64)
        return unsquare(left @ message["right"].reshape(rank, -1), served, self.d)

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        left, right = randomised_svd(square(A), self.rank(len(A)), own_seed)
        return {"left": left, "right": right}


@dataclass(frozen=True, kw_only=True)
class TwoWaySvd(Svd):
    """Two-way: clients also compare what the truncation left out with the sum of all truncations.

    With A_i = C_i + D_i, C_i the truncation, and S = sum p_i C_i,

        G = S^T S + sum_i p_i D_i^T D_i p_i + sum_i p_i D_i^T S + transpose + [products of different clients' D_i].

    The last term is dropped. A client sends a factor of D_i^T D_i with its truncation. The server sends a truncation of
    S, `reference`, and the client answers with D_i^T S, `residual`. For exact S this is the paper's formula with its
    terms put together; the public code departs from it. The estimate is made positive semi-definite. The budget is
    that of the truncation: M_i (M_i + 1) / 2 floats and, on the second leg, M_i M come on top.

    A sketch without "residual", of a client that did not answer the second leg, counts without its cross term.
    """

    name: ClassVar[str] = "svd-two-way"

    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        return (*super().layout(served), ("factor", served * (served + 1) // 2))

    def residual_layout(self, served: int, total: int) -> tuple[tuple[str, int], ...]:
        """Name and length of the row of the second leg, of a client that serves `served` objectives of `total`."""
        return (("residual", served * total),)

    def reference_layout(self, total: int) -> tuple[tuple[str, int], ...]:
        """Name and length of every row of the reference, of this many objectives."""
        return super().layout(total)

    def reference(
        self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int, own_seed: int
    ) -> dict[str, NDArray[np.float32]]:
        """S, truncated like a Jacobian, which the server sends to every client after the first leg.

        Raises:
            SketchError: no sketches, a message that does not fit, or a sum that float32 cannot hold.
        """
        S = self.total(sketches, objectives, shared_seed=shared_seed)
        if not S.size:
            raise SketchError("there is no reference without a client's message")
        left, right = randomised_svd(square(S), self.rank(len(S)), own_seed)
        return {"left": narrow("left", left), "right": narrow("right", right)}

    def residual(
        self, A: Jacobian, own: Message, reference: Message, objectives: tuple[str, ...]
    ) -> dict[str, NDArray[np.float32]]:
        """The client's second message, D_i^T S, (M_i, M) row by row, after `own`, its first one about the Jacobian A.

        Raises:
            SketchError: a shape that does not fit, or a product that float32 cannot hold.
        """
        self._check(A)
        fits(own, self.layout(len(A)), self.name)
        fits(reference, self.reference_layout(len(objectives)), f"{self.name}, reference")
        S = self.vectors(reference, len(objectives), shared_seed=0)
        return {"residual": narrow("residual", _product(A - self.vectors(own, len(A), shared_seed=0), S))}

    def gram(self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int) -> Matrix:
        M = len(objectives)
        rest = np.zeros((M, M))

        def heard() -> Iterable[ClientSketch]:
            nonlocal rest
            for sketch in self._checked(sketches):
                scaled, served = placed(sketch, objectives) * sketch.weights, len(sketch.weights)
                rest += scaled @ from_factor(sketch.rows["factor"], served) @ scaled.T
                if "residual" in sketch.rows:
                    fits(sketch.rows, self.residual_layout(served, M), self.name)
                    cross = scaled @ sketch.rows["residual"].reshape(-1, M).astype(np.float64)
                    rest += cross + cross.T
                yield sketch

        S = self.total(heard(), objectives, shared_seed=shared_seed)
        return clip_to_psd(S @ S.T + rest)

    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        rows = super().message(A, shared_seed, own_seed)
        sent = {name: narrow(name, values) for name, values in rows.items()}
        return {**sent, "factor": factor(A - self.vectors(sent, len(A), shared_seed=shared_seed))}


def square_shape(d: int, m: int) -> tuple[int, int]:
    """Rows q and columns of the reshaped matrix of a Jacobian (m, d)."""
    rows = isqrt(d * m)
    return rows, -(-d // rows) * m


def square(A: Jacobian) -> NDArray[Any]:
    """A, (m, d), reshaped to (q, columns), with zeros at the end."""
    m, d = A.shape
    rows, columns = square_shape(d, m)
    padded = np.zeros((m, rows * columns // m), dtype=A.dtype)
    padded[:, :d] = A
    return padded.reshape(m, columns // m, rows).transpose(2, 1, 0).reshape(rows, columns)


def unsquare(X: NDArray[Any], m: int, d: int) -> NDArray[Any]:
    """The inverse of `square`."""
    return X.reshape(len(X), -1, m).transpose(2, 1, 0).reshape(m, -1)[:, :d]


def randomised_svd(X: NDArray[Any], rank: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """U S, (rows, rank), and V^T, (rank, columns), of a truncated SVD (Halko et al., 2011, Algorithms 4.4 and 5.1).

    The range is that of X times `rank` and a tenth more random vectors, after two power iterations with
    orthonormalisation after each product.
    """
    rows, columns = X.shape
    scale = np.abs(X).max() or 1.0
    X = X / scale
    width = min(rank + rank // 10, rows, columns)
    start = uniform(words(seed, columns * width)).reshape(columns, width).astype(X.dtype)
    Q = np.linalg.qr(X @ start)[0]
    for _ in range(_POWER_ITERATIONS):
        Q = np.linalg.qr(X @ np.linalg.qr(X.T @ Q)[0])[0]
    U, S, V = np.linalg.svd(Q.T @ X, full_matrices=False)
    return (Q @ U[:, :rank]) * (S[:rank] * np.float64(scale)), V[:rank]


def _product(A: NDArray[Any], B: NDArray[Any]) -> Matrix:
    """A B^T in float64, block by block."""
    product = np.zeros((len(A), len(B)))
    for start in range(0, A.shape[1], _BLOCK):
        columns = slice(start, start + _BLOCK)
        product += A[:, columns].astype(np.float64) @ B[:, columns].astype(np.float64).T
    return product
