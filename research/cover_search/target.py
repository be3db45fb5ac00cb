"""How much of the attacked member's update is in what a coordinator is left with, from inner products alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from cover_search.members import SearchMembers
from cover_search.plan import Plan
from cover_search.specification import Failure
from leakage.federation import Reals

_FINEST = 0.02  # the smallest noise with which densities are computed, as a part of the attacked member's coefficient
_TAILS = 7.0  # standard deviations of noise on either side
_POINTS = 2.5  # of a density in one standard deviation


@dataclass(frozen=True)
class CosineTarget:
    """Cosines with the update of the member in slot 0.

    Attributes:
        members: of the sums.
        gram: inner products of the members' updates in the first sum, then of those in the second one,
            (sums m, sums m).
        deviation: of the noise on a coordinate of an update, relative to the coordinate.
        draws: of noise in each sum: how often it is asked, times the coordinates with the same value; one if empty.
        others_known: the updates of others are subtracted, too, but not the noise on them.
        fails: what the attacked member answers in the second sum in place of its update.
    """

    members: SearchMembers
    gram: Reals
    deviation: float = 0.0
    draws: Sequence[int] = ()
    others_known: bool = False
    fails: Failure = "never"

    def cosine(self, plan: Plan) -> float:
        """The largest cosine of a linear combination of what is left of the sums."""
        size = self.gram[plan.places[0], plan.places[0]]
        if not size > 0:
            return 0.0
        rows, noise = self._seen(plan)
        products = rows @ self.gram
        own, inner = products[:, plan.places[0]], products @ rows.T + np.diag(noise)
        if len(rows) == 1:
            length = float(inner[0, 0])
            return abs(float(own[0])) / float(np.sqrt(length * size)) if length > 0 else 0.0
        fitted = float(own @ np.linalg.pinv(inner, hermitian=True) @ own)
        return float(np.sqrt(max(fitted, 0.0) / size))

    def left(self, plan: Plan) -> Reals:
        """The coefficient of every member in each sum, after the colluders' vectors are subtracted, (sums, m)."""
        rows = np.zeros_like(plan.weights)
        for number, weights in enumerate(plan.weights):
            rows[number, plan.places] = self.members.normed(weights) * plan.survivors[number]
        rows[:, plan.places[1 : 1 + self.members.cohort.t]] = 0.0
        return rows

    def _seen(self, plan: Plan) -> tuple[Reals, Reals]:
        """The coefficient of every update in each sum, (sums, sums m), and the energy of the noise, (sums,)."""
        left, attacked = self.left(plan), plan.places[0]
        (sums, m), own = left.shape, left[:, attacked].copy()
        if self.fails == "zero":
            left[1:, attacked] = 0.0
        energies = np.diag(self.gram).reshape(sums, m)
        noise = self.deviation**2 * (np.square(left) * energies).sum(1)
        if self.fails == "random":
            left[1:, attacked] = 0.0
            noise[1:] += np.square(own[1:]) * energies[1:, attacked]
        if self.others_known:
            left[:, np.arange(m) != attacked] = 0.0
        rows = np.zeros((sums, sums * m))
        for number in range(sums):
            rows[number, number * m : (number + 1) * m] = left[number]
        return rows, noise / (self.draws or 1)


class SignsTarget(CosineTarget):
    """The same for a reader that decodes signs, by Bayes' rule, in updates with one absolute value: of a single sum.

    Signs are independent and equally likely. The cosine of the posterior mean with the update is the square root of its
    mean square.
    """

    def cosine(self, plan: Plan) -> float:
        """The cosine of the posterior mean; of two sums that of the best linear combination."""
        if len(plan.weights) > 1:
            return super().cosine(plan)
        left = self.left(plan)[0]
        own, others = abs(left[plan.places[0]]), np.delete(left, plan.places[0])
        if not own > 0:
            return 0.0
        noise = max(self.deviation * float(np.linalg.norm(left)) / sqrt((self.draws or [1])[0]), _FINEST * own)
        return _of_posterior_mean(own, () if self.others_known else others[others != 0], noise)


def _of_posterior_mean(own: float, others: Sequence[float] | Reals, noise: float) -> float:
    """With x = own s + sum_j others_j s_j + noise z, over independent signs s: the root of E[E[s | x]^2]."""
    length = 2 * (own + float(np.abs(others).sum()) + _TAILS * noise)
    points = 1 << int(np.ceil(np.log2(_POINTS * length / noise)))
    frequencies = 2 * np.pi * np.fft.rfftfreq(points, length / points)
    transform = np.exp(-np.square(frequencies * noise) / 2)
    for other in others:
        transform = transform * np.cos(frequencies * other)
    plus, minus = (np.fft.irfft(transform * np.exp(sign * 1j * frequencies * own), points) for sign in (-1, 1))
    plus, minus = np.maximum(plus, 0.0), np.maximum(minus, 0.0)
    both = plus + minus
    seen = both > 1e-12 * both.max()
    return float(np.sqrt((np.square(plus - minus)[seen] / both[seen]).sum() / 2))


def individual_parts(updates: Reals) -> Reals:
    """Updates from each of which the mean of the other members' updates is projected out, (m, d)."""
    others = (updates.sum(0) - updates) / (len(updates) - 1)
    along = (updates * others).sum(1) / np.square(others).sum(1)
    return np.asarray(updates - along[:, None] * others)
