"""The search: from extremal plans a random ascent, an ascent along the gradient, and another random ascent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cover_search.plan import Plan, changed, extremal, within
from cover_search.target import CosineTarget
from federation.secure.bounds import BoundKind
from leakage.federation import Reals

_STARTS = 6
_MOVED = 0.2  # the share of changes that are moved towards equal weights until members accept them
_STEPS = 200  # along the gradient
_MARGIN = 1 - 1e-9  # inside what members accept, after truncation


@dataclass(frozen=True)
class PlanSearch:
    """A search for the plan with the largest cosine of those that members accept.

    Attributes:
        target: what is to be large.
        sums: of a plan.
        trials: changes of plans that are tried.
        random: the generator.
        starts: plans to begin with, besides extremal ones.
    """

    target: CosineTarget
    sums: int
    trials: int
    random: np.random.Generator
    starts: Sequence[Plan] = ()

    def best(self) -> Plan:
        """The best plan."""
        score = self.target.cosine
        starts = [*extremal(self.target.members, self.sums, self.random), *self.starts]
        starts = sorted(starts, key=score)[-_STARTS:]
        return max((self._from(start, self.trials // len(starts)) for start in starts), key=score)

    def _from(self, start: Plan, trials: int) -> Plan:
        return self._along_gradient(self._ascent(self._along_gradient(self._ascent(start, trials // 2)), trials // 2))

    def _ascent(self, start: Plan, trials: int) -> Plan:
        best, value = start, self.target.cosine(start)
        for _ in range(trials):
            other = changed(best, self.target.members, self.random)
            if self.random.random() < _MOVED:
                other = within(other, self.target.members) or best
            if (new := self.target.cosine(other)) > value and other.accepted(self.target.members):
                best, value = other, new
        return best

    def _along_gradient(self, plan: Plan) -> Plan:
        """The plan with better weights of V for its members, if only the cover bounds them; otherwise the plan.

        With b the weights of the honest members of V, colluders whose weights are as large as the largest of these, and
        no other members, E* b_i^2 <= |b|^2 is required.
        """
        if self.sums > 1 or self.target.members.rule.kind is not BoundKind.NONE:
            return plan
        t = self.target.members.cohort.t
        slots = np.flatnonzero(plan.survivors[0])
        honest = slots[(slots == 0) | (slots > t)]
        own = plan.places[honest]
        b = self._climbed(self.target.gram[np.ix_(own, own)], plan.weights[0, honest])
        weights = np.zeros_like(plan.weights)
        weights[0, honest] = b
        weights[0, 1 : 1 + t] = np.abs(b).max()
        better = within(replace(plan, weights=weights), self.target.members) or plan
        return max(plan, better, key=self.target.cosine)

    def _climbed(self, G: Reals, start: Reals) -> Reals:
        """Weights with a larger cosine with the first vector; G has the inner products, (n, n)."""
        least, step = float(self.target.members.least), 1.0
        b = covered(start, least)
        value = _cosine(G, b)
        for _ in range(_STEPS):
            Gb = G @ b
            gradient = G[0] / max(Gb[0], 1e-12) - Gb / max(float(b @ Gb), 1e-12)
            other = b + step * gradient / max(float(np.linalg.norm(gradient)), 1e-12)
            other = covered(other if self.target.members.rule.signed else np.maximum(other, 0.0), least)
            new = _cosine(G, other)
            b, value, step = (other, new, 2 * step) if new > value else (b, value, step / 2)
        return b


def covered(b: Reals, least: float) -> Reals:
    """Weights of length 1 near b of which none is above 1 / sqrt(E*); where b has too few, others get some."""
    cap, free = float(_MARGIN * least**-0.5), np.ones(len(b), bool)
    own = b + 1e-9 * np.linalg.norm(b)
    for _ in range(len(b)):
        rest = 1 - cap**2 * (~free).sum()
        own[free] *= np.sqrt(max(rest, 0.0) / max(float(np.square(own[free]).sum()), 1e-30))
        over = free & (np.abs(own) > cap)
        if not over.any():
            break
        own[over] = np.sign(own[over]) * cap
        free &= ~over
    return own


def _cosine(G: Reals, b: Reals) -> float:
    return float(G[0] @ b) / float(np.sqrt(max(b @ G @ b, 1e-30) * G[0, 0]))
