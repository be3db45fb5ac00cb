"""FedMGDA+ (Hu et al., 2022, Algorithm 1): normalised updates, and weights in a box around those of FedAvg."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from coordinator.aggregation.base import Rule
from coordinator.aggregation.fedmgda import DROP_ZERO_HELP, combination, must_be_a_box, solve, standstill
from coordinator.aggregation.geometry import inverse_norms, unit_gram
from coordinator.aggregation.rules import Combination, Rows


@dataclass(frozen=True, kw_only=True)
class FedMGDAPlus(Rule):
    """The shortest weighted mean of the g_i = u_i / ||u_i|| with |lambda_i - lambda0_i| <= epsilon (eq. 25).

    c_i = lambda_i / ||u_i||. Scaling an update changes nothing, so none can be made to count for more. With epsilon = 1
    the direction is a descent direction for everybody; a smaller epsilon moves towards FedAvg-n (epsilon = 0), bounds
    every client's weight by lambda0_i + epsilon, and may cost that guarantee: see `descent_min`. The default, "auto",
    is epsilon = 1/m for the m rows of the round; the paper leaves the choice open.
    """

    name: ClassVar[str] = "fedmgda+"

    epsilon: float | Literal["auto"] = field(
        default="auto",
        metadata={
            "help": "how far a weight may be from lambda0, in [0, 1]; 0 is FedAvg-n, 1 no bound, auto 1/m for m updates"
        },
    )
    drop_zero: bool = field(default=False, metadata={"help": DROP_ZERO_HELP})

    def __post_init__(self) -> None:
        if self.epsilon != "auto":
            must_be_a_box(self.epsilon, 'be "auto" or ')

    def cautions(self) -> tuple[str, ...]:
        """See the base; a box that binds is the answer to a client that stands still."""
        return (*super().cautions(), standstill(self.name)) if self.epsilon == 1 else super().cautions()

    def combine(self, rows: Rows) -> Combination:
        """See the class."""
        epsilon = 1.0 / rows.current if self.epsilon == "auto" else self.epsilon
        solution = solve(unit_gram(rows.gram), rows.prior, epsilon=epsilon, drop_zero=self.drop_zero)
        return combination(rows.gram, solution, inverse_norms(rows.gram))
