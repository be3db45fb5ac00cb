"""The direction nearest to the average that opposes no update; in place of FedFV's projections (Wang et al., 2021)."""

from dataclasses import dataclass

import numpy as np

from federation.aggregation.base import conclude
from federation.aggregation.geometry import coordinates, inverse_norms, unit_gram
from federation.aggregation.interface import Combination, Matrix, Rows, Vector
from federation.aggregation.qp import UnsolvedError, not_negative
from federation.aggregation.rules.earlier_updates import Remembering
from federation.aggregation.rules.fedmgda import standstill

# Rows that would cancel leave a remainder of float32 rounding. To correct that remainder would take weights of
# millions, and two clients that send u and -3u could stop every round. The term (_RESOLUTION ||x||)^2 keeps the weights
# small; it moves other corrections by about 1e-12.
_RESOLUTION = _RESIDUAL_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class DualCone(Remembering):
    """The direction nearest to the average that no client opposes: min ||d - g0||^2 with <d, u_i> >= 0 for every i.

    g0 = sum lambda0_i u_i. The dual is min ||g0 + sum mu_i u_i||^2 over mu >= 0, and c = lambda0 + mu. Without
    conflicts this is FedAvg. With conflicts, the clients that FedAvg would hurt get more weight. The result opposes no
    update, and depends on no order and no reported loss; a sequence of projections promises neither. It is zero only at
    a Pareto stationary point. Long updates dominate g0; `pre = ["normalize"]` makes all equal. (As a projection:
    Lopez-Paz and Ranzato, 2017, eq. 11.)

    With `tau`, the step must not oppose the last updates of absent clients either; these have no weight in g0. FedFV's
    Algorithm 3 has the same aim, and depends on an order. The step is then zero only if no direction suits the clients
    of all these rounds.
    """

    name = "dual-cone"
    private = "gram"

    def cautions(self) -> tuple[str, ...]:
        return (*super().cautions(), standstill(self.name))

    def combine(self, rows: Rows) -> Combination:
        """The coefficients lambda0 + mu.

        Raises:
            UnsolvedError: no solution, or the optimality conditions are violated by more than 1e-6 of sum c_i ||u_i||.
        """
        inverse, shares = inverse_norms(rows.gram), rows.prior * rows.norms
        total = float(shares.sum())
        if total == 0:
            return conclude(rows.gram, rows.prior, rows.prior[: rows.current], residual=0.0)
        unit, shares = unit_gram(rows.gram), shares / total
        points = coordinates(unit)
        extra = not_negative(points.T, -shares @ points, np.zeros(len(points)), _RESOLUTION)
        residual = _residual(unit, shares, extra)
        if residual > _RESIDUAL_TOLERANCE:
            raise UnsolvedError(f"dual-cone: the residual is {residual:.1e}; {_RESIDUAL_TOLERANCE:.0e} is allowed")
        coefficients = rows.prior + extra * total * inverse
        measured = {"residual": residual, "corrected": float((extra > 0).sum())}
        shares = coefficients[: rows.current]
        return conclude(rows.gram, coefficients, shares / shares.sum(), **measured)


def _residual(unit: Matrix, start: Vector, extra: Vector) -> float:
    """By how much a row is opposed, or one that was corrected is not met exactly, relative to sum c_i ||u_i||."""
    shares = start + extra
    slope = unit @ (shares / shares.sum())
    return max(0.0, float(-slope.min()), float(np.abs(slope[extra > 0]).max(initial=0.0)))
