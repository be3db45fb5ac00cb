"""Which sets of members a malicious coordinator gets sums of: a search over what it may ask, of real members.

In each step it chooses the run, the columns, the bins, whom it invites, who is called lost at MASK or at UNMASK, and
whether it tells some members other lists than others.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from federation.secure.thresholds import assumed
from federation.statistics.data_columns import Column
from federation.work.base import Work
from federation.work.secure.masking import Confirm, Mask
from federation.work.secure.terms import SessionStage
from statistics_search.room import MemberTable, Room, SumQuestion
from statistics_search.specification import StatisticsSearchSpecification

_EPISODE = 10  # questions to one set of members, before the search begins anew
COLUMNS = (Column(name="age", low=0.0, high=100.0), Column(name="ill", classes=2))
_CHOICES = (
    (COLUMNS, 4),
    (COLUMNS, 4),
    (COLUMNS, 5),
    (COLUMNS[:1], 4),
    ((replace(COLUMNS[0], high=90.0), COLUMNS[1]), 4),
)


def people(members: int, seed: int) -> dict[str, MemberTable]:
    """Members with ages and a disease."""
    drawn = np.random.default_rng(seed)
    return {
        f"m{at:02}": MemberTable(
            drawn.integers(20, 90, (120 + at, 1)).astype(float), drawn.integers(0, 2, 120 + at).astype(float), COLUMNS
        )
        for at in range(members)
    }


def searched(room: Room, steps: int, seed: int) -> None:
    """Asks at random what a coordinator may ask."""
    chance, names = random.Random(seed), sorted(room.tables)  # noqa: S311 - no secret
    for step in range(steps):
        columns, bins = chance.choice(_CHOICES)
        invited = names if chance.random() < 0.5 else sorted(set(names) - set(_some(chance, names)))
        lost, late = (_some(chance, names) if chance.random() < 0.5 else () for _ in range(2))
        room.change = (
            None if chance.random() < 0.85 else _Split(chance.sample(names, len(names) // 2), _some(chance, names))
        )
        run = f"run-{chance.randint(0, step)}"
        room.ask(SumQuestion(columns, bins, run, tuple(invited), lost, late))


def _some(chance: random.Random, names: Sequence[str]) -> tuple[str, ...]:
    """At most two of the members."""
    return tuple(chance.sample(names, chance.randint(0, 2)))


class _Split:
    """Tells some members shorter lists at MASK or at CONFIRM."""

    def __init__(self, told: Sequence[str], without: Sequence[str]) -> None:
        self._told, self._without = set(told), set(without)

    def __call__(self, stage: str, name: str, work: Work) -> Work:
        if name not in self._told or name in self._without:
            return work
        if stage == SessionStage.MASK and isinstance(work, Mask):
            left = tuple(one for one in work.members if one not in self._without)
            return replace(work, members=left, coefficients=(1,) * len(left))
        if stage == SessionStage.CONFIRM and isinstance(work, Confirm):
            kept = [at for at, one in enumerate(work.members) if one not in self._without]
            return replace(
                work, members=tuple(work.members[at] for at in kept), masked=tuple(work.masked[at] for at in kept)
            )
        return work


def reached(specification: StatisticsSearchSpecification) -> dict[str, float]:
    """The measures of a search.

    Returns:
        `sums`: how many it got; `overlaps`: pairs of them that share a member and are not of the same members;
        `questions`: the largest number of questions that one member's data answered; `fewest`: the fewest honest
        members whose total it has, by a sum or the difference of two, when t members collude.
    """
    m, t = specification.members, assumed(specification.members)
    sums, overlaps, questions, fewest = 0, 0, 0, []
    for episode in range(max(1, specification.trials // _EPISODE)):
        room = Room(people(m, specification.seed), assumed=t)
        searched(room, _EPISODE, 1000 * specification.seed + episode)
        sets = [frozenset(V) for _, V, _, _ in room.sums]
        sums += len(sets)
        unequal = [(one, other) for one, other in combinations(sets, 2) if one != other and one & other]
        overlaps += len(unequal)
        for name in room.tables:
            questions = max(questions, len({(asked.columns, asked.bins) for asked, V, _, _ in room.sums if name in V}))
        # Colluders subtract their own numbers; sets that overlap show their difference.
        shown = [*sets, *(one ^ other for one, other in unequal)]
        fewest += [max(0, len(one) - t) for one in shown]
    return {
        "sums": float(sums),
        "overlaps": float(overlaps),
        "questions": float(questions),
        "fewest": float(min(fewest, default=np.nan)),
    }
