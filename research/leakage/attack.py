"""What the attacks have in common: the sessions of the federation, and the difference of two sums."""

import numpy as np

from federation.secure import hashing
from leakage import views
from leakage.federation import AttackedFederation, Reals
from leakage.specification import LeakageSpecification


class LeakageAttack:
    """The attack of one specification on a federation.

    Attributes:
        number: the rounds after which the model is attacked.
        numbers: the same for each of the consecutive sessions.
        random: a generator of the coordinator.
    """

    def __init__(self, federation: AttackedFederation, specification: LeakageSpecification) -> None:
        self.federation = federation
        self.specification = specification
        self.number = specification.rounds if specification.trained else 0
        self.numbers = range(self.number, self.number + specification.sessions)
        self.random = np.random.default_rng([specification.seed, 2])

    def session(self, number: int) -> tuple[Reals, bytes, list[bytes]]:
        """The map S of the session at a model, (k, d), its digest, and the secrets of its members."""
        random = np.random.default_rng([self.specification.seed, 3, number])
        digest = hashing.session(f"{self.specification.seed} {number}".encode())
        S = views.sketch_matrix(digest, len(self.federation.network.start), self.specification.rows)
        return S, digest, [random.bytes(32) for _ in range(len(self.federation.members))]

    def difference(self, first: Reals, second: Reals, target: int) -> tuple[Reals, Reals, Reals]:
        """R minus a multiple of the R of a second session without the target, divided by the target's coefficient.

        The colluders' own parts of both sums are known, and subtracted.

        Returns:
            The coefficients of the other honest members in the two sums, and the difference,
            u_target + sum_j a_j u_j - sum_j b_j u'_j, (d,).
        """
        a = self._coefficients(first)
        b = np.insert(self._coefficients(np.delete(second, target, 0)), target, 0.0)
        honest = len(a) - self.specification.colluders
        a[honest:] = b[honest:] = 0.0
        b *= (a.sum() - a[target]) / b.sum()
        difference = (views.weighted_sum(first, a) - views.weighted_sum(second, b)) / a[target]
        others = [member for member in np.flatnonzero(a) if member != target]
        return a[others] / a[target], b[others] / a[target], difference

    def _coefficients(self, units: Reals) -> Reals:
        if self.specification.equal_weights:
            return np.full(len(units), 1 / len(units))
        return views.coefficients(units @ units.T, len(units))
