"""A coordinator that loses members on purpose: the others do not unmask a sum that shows one member.

The victim accepts the coefficients at MASK, since two members cover it. Both are then lost. Eight are left, of whom
seven can unmask the sum without the victim.
"""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.aggregation.interface import TooFewUpdatesError
from coordinator.aggregation.secure import session
from coordinator.aggregation.secure.covered import Covered
from coordinator.aggregation.secure.settled import Cohort
from federation.secure import bounds
from federation.secure.thresholds import ONE, Mode
from federation.work.secure.terms import SessionStage
from simulation.simulated_members import SimulatedMembers
from tests.federation.work.scene import ORIGIN, cast, names, play

VICTIM, HONEST, COLLUDERS, LOST = names([0]), names([1, 2, 3, 4]), names([5, 6, 7]), names([8, 9])


class _Blind:
    """What the coordinator uses of `bounds`, without a check of V."""

    problem = staticmethod(bounds.problem)

    @staticmethod
    def uncovered(*_: object) -> str:
        return ""


def lone(cohort: Cohort) -> NDArray[np.float64]:
    """The victim, the colluders and the members that will be lost; the others have 0."""
    parts = [0.999 * sqrt(2) if name in VICTIM else float(name in COLLUDERS + LOST) for name in cohort.members]
    return np.array(parts)


def as_given(_rule: object, _least: object, _cohort: object, wanted: NDArray[np.float64]) -> Covered:
    """The coefficients of a coordinator that moves none."""
    return Covered(tuple(int(a) for a in wanted / wanted.sum() * ONE), 1.0)


@pytest.mark.parametrize("mode", [Mode.SUM, Mode.PRIVATE])
def test_members_refuse_to_unmask_a_sum_in_which_another_member_is_no_longer_covered(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setattr(session, "covered", as_given)
    monkeypatch.setattr(session, "bounds", _Blind)
    scene = cast(10, lost={(SessionStage.MASK, 0): LOST})
    lax = SimulatedMembers(0, scene.members, ORIGIN.task, effective_members=0.0)  # they confirm everything
    scene.members |= {name: replace(scene.members[name], members=lax) for name in COLLUDERS}
    with pytest.raises(TooFewUpdatesError, match="3 members have confirmed"):
        play(scene, mode, lone)
    assert (SessionStage.MASK, VICTIM[0]) not in scene.declined
    refusals = {name: scene.declined.get((SessionStage.CONFIRM, name)) for name in VICTIM + HONEST}
    assert refusals == dict.fromkeys(VICTIM + HONEST, "cover")
