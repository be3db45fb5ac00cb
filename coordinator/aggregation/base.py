"""What every algorithm is: a frozen set of hyper-parameters, a pure rule over K, and a conversation around it."""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from coordinator.aggregation.phases import RoundContext, RoundGenerator, Step, Train
from coordinator.aggregation.rules import Combination, Matrix, Rows, Vector


class HyperparameterError(ValueError):
    """An algorithm, or a hyper-parameter of one, that does not exist or cannot have this value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """An aggregation rule. Its fields are its hyper-parameters; each says in `metadata["help"]` what it does.

    Attributes:
        name: what run specifications and the command line call it.
        reads_losses: whether the rule needs the losses that clients report.
    """

    name: ClassVar[str]
    reads_losses: ClassVar[bool] = False

    def cautions(self) -> tuple[str, ...]:
        """What an operator should know before clients take part: how one of them could abuse the rule."""
        if not self.reads_losses:
            return ()
        return (
            f"{self.name} weighs clients by the losses that they report: a client that inflates its loss gains "
            "influence (bias attack); fedmgda+ reads no losses",
        )

    @abstractmethod
    def combine(self, rows: Rows) -> Combination:
        """Turns K and the scalars of the rows into coefficients. Pure: the same rows give the same answer."""

    def round(self, context: RoundContext) -> RoundGenerator:
        """One round: everybody trains, then `combine` decides. Algorithms with more phases override this."""
        replies = yield Train()
        return Step(replies, self.combine(replies.rows(context)))


def describe(K: Matrix, coefficients: Vector, weights: Vector) -> dict[str, float]:
    """Diagnostics that every algorithm shares, all from K.

    Returns:
        direction_norm: ||c U||.
        conflicts: pairs of rows with a negative inner product.
        entropy: of the weights, in nats; log m when all weigh the same.
        descent_min: the least cosine between the direction and a row that is not zero: negative means that some
            client is made worse, to first order.
        descent_share: the share of those rows that the step does not make worse, in [0, 1].
    """
    projections = K @ coefficients
    norm = math.sqrt(max(0.0, float(coefficients @ projections)))
    norms: Vector = np.sqrt(np.diag(K))
    cosines = np.zeros(len(K))
    if norm > 0:
        np.divide(projections / norm, norms, out=cosines, where=norms > 0)
    cosines = cosines[norms > 0]
    positive: Vector = weights[weights > 0]
    return {
        "direction_norm": norm,
        "conflicts": float((K[np.triu_indices(len(K), 1)] < 0).sum()),
        "entropy": float(-(positive * np.log(positive)).sum()) + 0.0,
        "descent_min": float(cosines.min(initial=1.0)),
        # A cosine of zero but for the rounding of K is no harm.
        "descent_share": float((cosines >= -1e-9).mean()) if len(cosines) else 1.0,
    }


def unit_gram(K: Matrix) -> Matrix:
    """The Gram matrix of the rows scaled to norm 1, shape (m, m); zero rows stay zero."""
    inverse = inverse_norms(K)
    unit: Matrix = K * inverse * inverse[:, None]
    np.fill_diagonal(unit, inverse > 0)
    return unit


def inverse_norms(K: Matrix) -> Vector:
    """1/||u_i||, shape (m,); 0 for a zero row, which contributes nothing."""
    norms: Vector = np.sqrt(np.diag(K))
    return np.divide(1.0, norms, out=np.zeros(len(K)), where=norms > 0)
