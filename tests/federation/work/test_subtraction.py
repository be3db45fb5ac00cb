"""Sums that differ by one member: what a coordinator that loses or leaves out members reads from real members.

Members train with a full batch, so their updates are the same in every session, and the coordinator asks for as many
models as it likes. Without blur, the difference is the member's update. The bounds are those of section 5 of the
protocol, for the least number of honest members in a sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.secure import session
from federation.aggregation.secure.covered import Covered
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Sum, invitation
from federation.digests import digest
from federation.secure.thresholds import ONE, Mode, truncated
from federation.work.secure.journal import Journal
from federation.work.secure.terms import SessionStage
from federation.work.site import SecurePolicy
from tests.federation.work.scene import Cast, cast, names, setting

D = 4000
COLLUDE = names([7, 8, 9])
VICTIM, OTHERS = "silo-00", names([1, 2, 3])
Reals = NDArray[np.float64]


def ten(blur: float, count: int = 10, **policy: Any) -> Cast:
    """Members with the limits of real owners, of which three collude in a cohort of ten."""
    scene = cast(count, d=D, assumed=3)
    for member in scene.members.values():
        member.vector = np.random.default_rng(int(member.name[-2:])).standard_normal(D).astype(np.float32)
        member.allow(SecurePolicy(assumed=3, blur=blur, **policy))
    return scene


def summed(
    scene: Cast,
    blur: float,
    nonce: int,
    *,
    model: str,
    asked: Sequence[str],
    V: Sequence[str],
    quorum: Sequence[str] = (),
    weights: Mapping[str, float] | None = None,
) -> Callable[[], Sum]:
    """Holds a session of these members up to UNMASK, which only those of a quorum are asked; gives the sum over V."""
    scene.lost = {
        (SessionStage.MASK.value, 0): [name for name in asked if name not in V],
        (SessionStage.CONFIRM.value, 0): [name for name in V if quorum and name not in quorum],
    }
    scene.base_model = model
    ids = next(iter(scene.members.values())).members.key_ids()
    chosen = setting(
        scene,
        Mode.SUM,
        "fedavg-n" if weights is None else "afl",
        blur=blur,
        nonce=nonce.to_bytes(16, "big"),
        invited=invitation({name: ids[name] for name in asked}),
    )
    given = np.array([1.0 if weights is None else weights.get(name, 0.0) for name in sorted(asked)])
    conversation = secure_sum(chosen, lambda _: given / given.sum())
    phase = next(conversation)
    while phase.kind.name != SessionStage.UNMASK:
        phase = conversation.send(scene.ask(phase))

    def ended() -> Sum:
        with pytest.raises(StopIteration) as end:
            conversation.send(scene.ask(phase))
        total: Sum = end.value.value
        return total

    return ended


WEIGHTS = dict.fromkeys([VICTIM, *OTHERS, *COLLUDE], 1.0)
"""Those of a sum: four honest members, n_min - t, and three that collude. Others have the weight 0, and may vote."""


@pytest.mark.parametrize(
    ("blur", "pairs"), [(0.0, 1), (1.0, 1), (1.0, 4), pytest.param(1.0, 16, marks=pytest.mark.full)]
)
def test_pairs_of_sums_whose_models_differ_in_one_bit_and_one_lacks_a_member(blur: float, pairs: int) -> None:
    scene = ten(blur)
    everybody, found = names(range(10)), np.zeros(D)
    V, without = [VICTIM, *OTHERS, *COLLUDE], [*OTHERS, "silo-04", *COLLUDE]
    for number in range(pairs):
        whole, less = (
            summed(scene, blur, place, model=digest(b"%d" % place), asked=everybody, V=kept, weights=WEIGHTS)()
            for place, kept in ((2 * number, V), (2 * number + 1, without))
        )
        found += left(whole, scene) - left(less, scene)
    assert not scene.declined
    assert shown(found, scene) == pytest.approx(1 / math.sqrt(1 + 2 * blur**2 / pairs), abs=0.03)


@pytest.mark.parametrize("blur", [0.0, 1.0])
def test_two_quorums_that_share_no_member_unmask_two_sums_of_one_model(
    blur: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each member unmasks one sum. Members with the weight 0 are covered by anything, and confirm every list."""
    scene = ten(blur, 14)
    summed_both, weightless, others = names(range(1, 6)), names(range(6, 10)), names(range(10, 14))
    weights = dict.fromkeys([VICTIM, *summed_both], 1.0)
    monkeypatch.setattr(session, "covered", greedy)
    lists = {
        1: ([VICTIM, *summed_both, *weightless], [VICTIM, *summed_both[:2], *weightless]),
        2: ([*summed_both, *weightless[3:], *others], [*summed_both[2:], *others]),
    }
    model = digest(b"one model")
    begun = [
        summed(scene, blur, place, model=model, asked=V, V=V, quorum=quorum, weights=weights)
        for place, (V, quorum) in lists.items()
    ]
    whole, less = (end() for end in begun)
    assert not scene.declined
    found = left(whole, scene, ()) - left(less, scene, ())
    size = blur**2 / 4  # n_min - t; the five others are blurred in both sums, without colluders to subtract
    assert shown(found, scene) == pytest.approx(1 / math.sqrt(1 + 11 * size), abs=0.03)
    assert shown(found, scene) < 1 / math.sqrt(1 + 2 * blur**2) + 0.03, "as with the fewest honest members"


def greedy(rule: object, least: object, cohort: object, coefficients: Reals) -> Covered:
    """The coordinator reserves no cover for members that may be lost."""
    return Covered(tuple(truncated(coefficients.tolist())), 1.0)


def shown(found: Reals, scene: Cast) -> float:
    """The cosine with the attacked member's update."""
    u = scene.members[VICTIM].vector.astype(float)
    return float(found @ u / np.linalg.norm(found) / np.linalg.norm(u))


def left(total: Sum, scene: Cast, known: Sequence[str] = COLLUDE) -> Reals:
    """What is left of a sum without the colluders' vectors, where every other member has the weight 1."""
    weights = dict(zip(total.record.members, total.record.coefficients, strict=True))
    rest = total.vector(1.0).astype(float)
    for name in set(known) & set(total.record.survivors):
        v = np.concatenate(list(Journal(scene.members[name].memory, total.record.session).vector()))
        rest -= v * weights[name] / ONE
    scaled: Reals = rest * (ONE / max(weights.values()))
    return scaled
