"""What the honest members of a private round accept, by the functions that they use themselves."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from federation.secure import bounds
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.cover import covers
from federation.secure.thresholds import Thresholds, truncated
from leakage.federation import Reals

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class SearchMembers:
    """The members of a session, of which the slots 1 to t collude.

    Attributes:
        rule: what their algorithm allows of coefficients.
        cohort: its numbers. All members have finished READY and are in W.
    """

    rule: Bounds
    cohort: Thresholds

    @property
    def least(self) -> Fraction:
        """E*, of which no owner has chosen another."""
        return self.cohort.effective_members

    @property
    def bound(self) -> float:
        """The largest cosine with uncorrelated updates of length 1: 1 / sqrt(E*)."""
        return math.sqrt(1 / self.least)

    @property
    def fixed(self) -> bool:
        """Whether the algorithm leaves no choice of coefficients."""
        return self.rule.kind in (BoundKind.EQUAL, BoundKind.FIXED)

    def accept(self, weights: Reals, survivors: Mask) -> bool:
        """Whether the honest members of V answer MASK over W, and CONFIRM over V.

        Args:
            weights: of W, of any scale, (m,).
            survivors: the members of V, (m,).
        """
        if survivors.sum() < self.cohort.n_min or not np.abs(weights).sum() > 0:
            return False
        names, t = [f"{slot:03}" for slot in range(self.cohort.m)], self.cohort.t
        given = dict(zip(names, truncated(self.normed(weights).tolist()), strict=True))
        if bounds.problem(self.rule, given, dict.fromkeys(names, 100), self.cohort):
            return False
        left = {name: given[name] for name, kept in zip(names, survivors, strict=True) if kept}
        honest = [name for name in left if name not in names[1 : 1 + t]]
        largest = max(honest, key=lambda name: abs(given[name]))  # the others have at least its cover
        return covers(given, largest, t, self.least) and not bounds.uncovered(left, t, self.least)

    def normed(self, weights: Reals) -> Reals:
        """The coefficients a of these weights; equal ones for a private evaluation, whatever the weights are."""
        own = np.ones(len(weights)) if self.fixed else weights
        return np.asarray(own / np.abs(own).sum())
