"""FedFV (Wang et al., 2021, "Federated Learning with Fair Averaging", Algorithms 1 to 3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import conclude
from federation.aggregation.interface import Combination, Matrix, Rows, Vector
from federation.aggregation.rules.earlier_updates import Remembering
from federation.spec.options import option

_ROUNDING = 1e-5  # of the lengths that are added up, in updates of float32


@dataclass(frozen=True, kw_only=True)
class FedFV(Remembering):
    """Takes conflicts out of the average by projections, one after the other, in the order of the clients' losses.

    Of the m participants, ordered by ascending loss, the last m - ceil((m - 1)(1 - alpha)) keep their update; with
    alpha = 0 no client does. Each of the others projects its own update along the order: wherever it is against u_j, j
    unlike i, p_i <- p_i - <p_i, u_j> / ||u_j||^2 u_j. The clients of high losses come last in the order, so the others'
    updates oppose them least in the end (Algorithm 2). Then g = sum lambda0_i p_i is projected against the absent, from
    those who took part `tau` rounds ago to those of the last round: of each such group, s is the sum of the updates
    that g is against, and if <g, s> < 0, g <- g - <g, s> / ||s||^2 s (Algorithm 3; not in the first `tau` rounds).
    Last, g is given the length of the average. With alpha = 1 and tau = 0 it is FedAvg. All in terms of K: p = C U, and
    g = c U. The diagnostics count the clients that keep their update (`kept`) and the `projections` of the others.
    """

    name = "fedfv"
    private = "gram"

    alpha: float = option(
        0.1, "the share of clients, of the highest losses, whose updates are kept as they are", "[0, 1]"
    )
    order: Literal["loss", "reversed", "random"] = option(
        "loss", 'the order of the projections: "loss" (ascending), "reversed" or "random"'
    )
    order_seed: int = option(0, 'with the round, decides the order "random"', "[0, inf)")

    @property
    def reads_losses(self) -> bool:  # type: ignore[override]  # a class variable of all other rules
        return self.order != "random"

    def cautions(self) -> tuple[str, ...]:
        if self.order == "random":
            return ()
        return (
            "fedfv orders clients by the losses that they report: one that inflates its loss is projected onto last "
            "and keeps its own update (bias attack); dual-cone reads no losses",
        )

    def window(self, number: int) -> int:
        return self.tau if number >= self.tau else 0  # Algorithm 3 begins with round `tau`

    def combine(self, rows: Rows) -> Combination:
        m, K = rows.current, rows.gram
        order = self._ordered(rows)
        keepers = order[math.ceil((m - 1) * (1 - self.alpha) - 1e-9) :] if self.alpha > 0 else []
        C, projections = project(K[:m, :m], order, keepers)
        c = np.zeros(len(K))
        c[:m] = rows.prior[:m] @ C
        if rows.ages is not None:
            for age in range(self.tau, 0, -1):
                projections += _against_group(K, c, np.flatnonzero(rows.ages == age))
        length, length_of_average = (math.sqrt(max(0.0, float(x @ K @ x))) for x in (c, rows.prior))
        weights = c[:m] / c[:m].sum()
        # Updates that cancel each other leave rounding errors, which must not be lengthened to a whole step.
        c = c * (length_of_average / length) if length > _ROUNDING * float(np.abs(c) @ rows.norms) else np.zeros(len(c))
        return conclude(K, c, weights, kept=float(len(keepers)), projections=float(projections))

    def _ordered(self, rows: Rows) -> list[int]:
        m = rows.current
        if self.order == "random":
            return [int(i) for i in np.random.default_rng([self.order_seed, rows.round]).permutation(m)]
        ascending: list[int] = np.argsort(rows.reported("losses", self.name)[:m], kind="stable").tolist()
        return ascending if self.order == "loss" else ascending[::-1]


def project(K: Matrix, order: Sequence[int], kept: Sequence[int]) -> tuple[Matrix, int]:
    """C, shape (m, m), such that the projected updates are C U, and the number of projections (Algorithm 2).

    `order` is a permutation of the rows; those in `kept` are not projected.
    """
    C, count = np.eye(len(K)), 0
    for i in range(len(K)):
        for j in order if i not in kept else ():
            product = float(C[i] @ K[j])
            if j != i and product < 0 < K[j, j]:
                C[i, j] -= product / K[j, j]
                count += 1
    return C, count


def _against_group(K: Matrix, c: Vector, group: NDArray[np.int64]) -> int:
    """Projects the direction c U if it conflicts with a group of past updates (Algorithm 3, one turn of the loop).

    s is the sum of the updates of the group whose inner product with c U is negative. If <s, c U> is negative, too, c
    loses the component along s.
    """
    against = [h for h in group if K[h] @ c < 0]
    s = np.zeros(len(c))
    s[against] = 1.0
    product = float(c @ K @ s)
    if product < 0:
        c -= product / float(s @ K @ s) * s
        return 1
    return 0
