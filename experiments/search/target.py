"""How much of the attacked member's update is in what a coordinator is left with, from inner products alone."""

from dataclasses import dataclass

import numpy as np

from experiments.leakage.federation import Reals
from experiments.search.members import SearchMembers
from experiments.search.plan import Plan


@dataclass(frozen=True)
class CosineTarget:
    """Cosines with the update of the member in slot 0.

    Attributes:
        members: of the sums.
        gram: inner products of the members' updates in the first sum, then of those in the second one,
            (sums m, sums m).
    """

    members: SearchMembers
    gram: Reals

    def cosine(self, plan: Plan) -> float:
        """The largest cosine of a linear combination of what is left of the sums."""
        size = self.gram[plan.places[0], plan.places[0]]
        if not size > 0:
            return 0.0
        rows = self._left(plan)
        products = rows @ self.gram
        own, inner = products[:, plan.places[0]], products @ rows.T
        if len(rows) == 1:
            length = float(inner[0, 0])
            return abs(float(own[0])) / float(np.sqrt(length * size)) if length > 0 else 0.0
        fitted = float(own @ np.linalg.pinv(inner, hermitian=True) @ own)
        return float(np.sqrt(max(fitted, 0.0) / size))

    def _left(self, plan: Plan) -> Reals:
        """The coefficient of every update in each sum, after the colluders' own are subtracted, (sums, sums m)."""
        sums, m = plan.weights.shape
        rows = np.zeros((sums, sums * m))
        for number in range(sums):
            a = self.members.normed(plan.weights[number]) * plan.survivors[number]
            a[1 : 1 + self.members.cohort.t] = 0.0
            rows[number, number * m + plan.places] = a
        return rows


def individual_parts(updates: Reals) -> Reals:
    """Updates from each of which the mean of the other members' updates is projected out, (m, d)."""
    others = (updates.sum(0) - updates) / (len(updates) - 1)
    along = (updates * others).sum(1) / np.square(others).sum(1)
    return np.asarray(updates - along[:, None] * others)
