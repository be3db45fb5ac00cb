"""What a coordinator chooses, and small changes of it."""

from dataclasses import dataclass, replace

import numpy as np

from cover_search.members import Mask, SearchMembers
from leakage.federation import Reals

_HALVINGS = 8


@dataclass(frozen=True)
class Plan:
    """One attack. Slot 0 is the member that is attacked, slots 1 to t collude.

    Attributes:
        places: which member is in which slot, (m,).
        weights: of each sum, (sums, m), of any scale.
        survivors: the slots in V of each sum, (sums, m).
    """

    places: np.ndarray[tuple[int], np.dtype[np.int64]]
    weights: Reals
    survivors: Mask

    def accepted(self, members: SearchMembers) -> bool:
        """Whether members accept all sums, and the attacked member is in the first one."""
        return bool(self.survivors[0, 0]) and all(map(members.accept, self.weights, self.survivors))


def extremal(members: SearchMembers, sums: int, random: np.random.Generator) -> list[Plan]:
    """Plans at the corners of what members accept: equal weights, one heavy member, two levels, zeros, many lost."""
    m, t, n_min = members.cohort.m, members.cohort.t, members.cohort.n_min
    plans = []
    for kept in {n_min, (n_min + m) // 2, m}:
        for others in {1, 2, (n_min - t) // 2, kept - t - 1}:
            survivors = np.tile(np.arange(m) < kept, (sums, 1))
            weights = np.zeros((sums, m))
            weights[:, t + 1 : t + 1 + max(1, others)] = 1.0
            weights[:, : t + 1] = np.sqrt(max(float(members.least) - 1, 1e-9) * max(1, min(others, kept - t - 1)))
            weights[1:, 0] = 0.0  # a second sum without the attacked member
            if members.fixed:  # another one is there instead, if one is left
                survivors[1:, 0], survivors[1:, kept : kept + 1] = False, True
            plans.append(Plan(random.permutation(m), weights, survivors))
    plans.append(replace(plans[0], weights=np.ones((sums, m))))
    return [plan for plan in (within(plan, members) for plan in plans) if plan is not None]


def crafted(members: SearchMembers, sums: int, random: np.random.Generator) -> list[Plan]:
    """Plans against members that blur: coefficients that are tags in one sum, or two sums that differ in one member."""
    m, t, n_min = members.cohort.m, members.cohort.t, members.cohort.n_min
    plans = []
    for kept in (n_min, min(n_min + 1, m)):
        survivors = np.tile(np.arange(m) < kept, (sums, 1))
        for others in range(1, kept - t):
            for tag in (0.7, 1.0, 2.0):
                weights = np.zeros((sums, m))
                weights[:, : t + 1 + others] = tag
                weights[:, 0] = 1.0
                plans.append(Plan(random.permutation(m), weights, survivors))
        if sums > 1:
            survivors = survivors.copy()
            survivors[1:, 0] = False
            plans.append(Plan(random.permutation(m), np.ones((sums, m)), survivors))
    if sums > 1:
        changes = [0.0, -1.0] if members.rule.signed else [0.0]
        plans = [*plans, *(_with_other(plan, change) for plan in plans for change in changes)]
    return [plan for plan in (within(plan, members) for plan in plans) if plan is not None]


def _with_other(plan: Plan, factor: float) -> Plan:
    """The plan with another weight of the attacked member in the second sum, and the same survivors."""
    weights, survivors = plan.weights.copy(), np.tile(plan.survivors[0], (len(plan.weights), 1))
    weights[1:, 0] *= factor
    return replace(plan, weights=weights, survivors=survivors)


def within(plan: Plan, members: SearchMembers) -> Plan | None:
    """The plan, moved towards equal weights as little as members require; None if they refuse those, too."""
    if plan.accepted(members):
        return plan
    size = np.abs(plan.weights).sum(1, keepdims=True)
    own, level = plan.weights / np.where(size > 0, size, 1.0), 1 / plan.weights.shape[1]

    def moved(share: float) -> Plan:
        return replace(plan, weights=level + share * (own - level))

    low, high = 0.0, 1.0
    if not moved(low).accepted(members):
        return None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if moved(middle).accepted(members) else (low, middle)
    return moved(low)


def changed(plan: Plan, members: SearchMembers, random: np.random.Generator) -> Plan:
    """A small change: some weights, one made equal to another, zero or negative, members lost, or members exchanged."""
    sums, m = plan.weights.shape
    t = members.cohort.t
    places, weights, survivors = plan.places.copy(), plan.weights.copy(), plan.survivors.copy()
    which, kind = random.integers(sums), random.integers(6)
    if members.fixed:
        kind = random.integers(4, 6)
    slots = random.choice(m, size=1 + random.integers(max(1, m // 4)), replace=False)
    if kind <= 1:
        weights[which, slots] *= np.exp(random.normal(0.0, 10.0 ** random.uniform(-3, 0), len(slots)))
    elif kind == 2:
        weights[which, slots] = random.choice([0.0, weights[which, random.integers(m)], np.abs(weights[which]).max()])
    elif kind == 3 and members.rule.signed:
        weights[which, slots[0]] *= -1
    elif kind == 4:
        slot = random.integers(t + 1, m)
        survivors[which, slot] = not survivors[which, slot]
        if random.random() < 0.5:  # lose another one instead
            other = random.integers(t + 1, m)
            survivors[which, other] = not survivors[which, slot]
        if which and random.random() < 0.1:
            survivors[which, 0] = not survivors[which, 0]
    else:
        pair = random.choice(m, 2, replace=False)
        places[pair] = places[pair[::-1]]
    return Plan(places, weights, survivors)
