"""FedMGDA+ (Hu et al., 2022, Algorithm 1) in the smallest box that still descends; the choice of the box is ours."""

from dataclasses import dataclass, field
from typing import ClassVar

from coordinator.aggregation.base import Rule
from coordinator.aggregation.fedmgda import DROP_ZERO_HELP, combination, solve, standstill
from coordinator.aggregation.geometry import inverse_norms, unit_gram
from coordinator.aggregation.rules import Combination, Rows

_NO_HARM = -1e-9  # a cosine: what rounding makes of zero
_WIDTH = 2.0**-20


@dataclass(frozen=True, kw_only=True)
class FedMGDAAuto(Rule):
    """FedMGDA+ with the smallest epsilon for which <d, g_i> >= 0 for every client: epsilon is found, not given.

    Where plain normalised averaging helps everybody already it is FedAvg-n (epsilon = 0); it moves towards FedMGDA+
    without a box only as far as conflicts force it. epsilon is found by bisection on one K. The inner products need not
    be monotone in epsilon, but the box whose answer is returned was checked itself, and epsilon = 1 always descends.
    """

    name: ClassVar[str] = "fedmgda+auto"

    drop_zero: bool = field(default=False, metadata={"help": DROP_ZERO_HELP})

    def cautions(self) -> tuple[str, ...]:
        """See the base; and the box grows until it bounds nothing, if one client opposes all others."""
        return (*super().cautions(), standstill(self.name))

    def combine(self, rows: Rows) -> Combination:
        """See the class; `epsilon` and the number of `programs` solved are among the diagnostics."""
        unit, scale = unit_gram(rows.gram), inverse_norms(rows.gram)

        def answer(epsilon: float) -> Combination:
            solution = solve(unit, rows.prior, epsilon=epsilon, drop_zero=self.drop_zero)
            return combination(rows.gram, solution, scale)

        low, high, best, programs = 0.0, 0.0, answer(0.0), 1
        if best.diagnostics["descent_min"] < _NO_HARM:
            high, best, programs = 1.0, answer(1.0), 2
            while high - low > _WIDTH:
                middle = (low + high) / 2
                tried = answer(middle)
                programs += 1
                if tried.diagnostics["descent_min"] < _NO_HARM:
                    low = middle
                else:
                    high, best = middle, tried
        diagnostics = best.diagnostics | {"epsilon": high, "programs": float(programs)}
        return Combination(best.coefficients, best.weights, {}, diagnostics)
