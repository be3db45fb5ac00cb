"""Which coefficients a member accepts: real members, and a coordinator that chooses what it likes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.secure import session
from federation.aggregation.secure.covered import Covered
from federation.digests import digest
from federation.secure import bounds
from federation.secure.evaluation import clip
from federation.secure.thresholds import EVALUATION_NOISE, ONE, Mode, Thresholds
from federation.spec.sharing import Unshared
from federation.spec.train_section import LocalSgd
from federation.vectors import payload_bytes
from federation.work.base import Origin, Work, payload_layout
from federation.work.evaluate.work import Evaluate
from federation.work.jacobian.work import Jacobian
from federation.work.secure.masking import Confirm, Mask
from federation.work.secure.ready import SPECIFICATION, Ready
from federation.work.secure.terms import SessionStage
from federation.work.secure.wire import terms_bytes
from federation.work.site import SecurePolicy
from fedpareto.simulation.simulated_members import SimulatedMembers
from tests.federation.secure.scene import by_definition
from tests.federation.work.scene import (
    FREE,
    ORIGIN,
    TRAIN,
    VICTIM,
    Cast,
    Inputs,
    Member,
    cast,
    document,
    names,
    play,
    setting,
    tried,
)
from tests.few import few

# --- a coordinator that wants one member's vector


@few(Mode.PRIVATE)
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("a", "reason"), [(2**11, "coefficients"), (ONE, "cover")])
def test_a_sum_of_one_member_alone_is_refused_by_this_member(
    mode: Mode, a: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = cast(10, assumed=1)
    alone = tuple(a if name == VICTIM else 0 for name in scene.members)
    monkeypatch.setattr(session, "covered", lambda *_: Covered(alone, 1.0))
    if reason == "coefficients":  # all see that they do not add up to 1
        with pytest.raises(TooFewUpdatesError, match="0 of 10 members have sent their masked vectors"):
            play(scene, mode)
        assert scene.declined == {(SessionStage.MASK.value, name): reason for name in scene.members}
    else:
        total = play(scene, mode)
        assert scene.declined == {(SessionStage.MASK.value, VICTIM): reason}
        assert VICTIM not in total.record.survivors
        assert not total.words.any()


# --- the cover, at MASK over W and at CONFIRM over V


EIGHT = names(range(8))
LEAST, T, N_MIN = Fraction(2), Thresholds(8, Mode.SUM).t, Thresholds(8, Mode.SUM).n_min


@cache
def at_mask() -> tuple[Member, Mask]:
    """A member that has answered OPEN, and MASK, which it is asked next."""
    kept: list[tuple[Mask, dict[str, bytes], dict[Any, Any]]] = []

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if isinstance(work, Mask) and member.name == VICTIM:
            kept.append((work, dict(member.memory.values), dict(member.asked)))

    scene = cast(8, assumed=1, change=change)
    scene.members[VICTIM].allow(SecurePolicy(assumed=1), FREE)
    play(scene, Mode.SUM)
    victim, (work, values, asked) = scene.members[VICTIM], kept[0]
    victim.memory.values, victim.asked = values, asked
    return victim, work


def scaled(weights: Sequence[int]) -> tuple[int, ...]:
    """Coefficients with these proportions, truncated."""
    total = max(1, sum(map(abs, weights)))
    return tuple(math.copysign(1, one) * (abs(one) * ONE // total) for one in weights)


WEIGHT = st.one_of(st.integers(-9, 9), st.integers(0, 5), st.sampled_from([1, 100]))


@settings(max_examples=80, derandomize=True)
@given(st.lists(WEIGHT, min_size=8, max_size=8).filter(any))
def test_a_member_answers_mask_only_where_the_others_cover_it(weights: list[int]) -> None:
    member, mask = at_mask()
    a = tuple(map(int, scaled(weights)))
    covered = by_definition(dict(zip(EIGHT, a, strict=True)), VICTIM, T) >= LEAST
    assert tried(member, (replace(mask, coefficients=a), {})) == ("answers" if covered else "cover")


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.integers(4, 12), min_size=8, max_size=8), st.sets(st.sampled_from(EIGHT), max_size=2))
def test_a_member_answers_confirm_only_where_all_that_are_left_cover_each_other(
    weights: list[int], lost: set[str]
) -> None:
    member, mask = at_mask()
    a = dict(zip(EIGHT, map(int, scaled(weights)), strict=True))
    V = tuple(name for name in EIGHT if name == VICTIM or name not in lost)
    if by_definition(a, VICTIM, T) < LEAST:
        return
    covered = all(by_definition({name: a[name] for name in V}, name, T) >= LEAST for name in V)
    assert len(V) >= N_MIN
    assert confirmed(member, replace(mask, coefficients=tuple(a.values())), V) == ("answers" if covered else "cover")


def confirmed(member: Member, mask: Mask, V: tuple[str, ...]) -> str:
    """What a member says to CONFIRM after MASK, which leaves no trace."""
    kept = dict(member.memory.values), dict(member.asked)
    try:
        result = member.do(mask, {})
        own = b"".join(payload_bytes(payload_layout(mask.rows(member.shape)), result.rows))
        digests = {name: bytes(32) for name in V} | {VICTIM: bytes.fromhex(digest(own).rpartition(":")[2])}
        confirm = Confirm(session=mask.session, members=V, masked=tuple(digests[name] for name in V))
        return tried(member, (confirm, {}))
    finally:
        member.memory.values, member.asked = kept


def test_an_owner_may_require_more_cover() -> None:
    member, mask = at_mask()
    equal = replace(mask, coefficients=(ONE // 8,) * 8)
    site = member.site
    try:
        for least, answer in ((None, "answers"), (8 - T, "answers"), (8 - T + 0.1, "cover"), (1, "answers")):
            member.allow(SecurePolicy(assumed=1, effective_members=least), FREE)
            assert tried(member, (equal, {})) == answer
        heavy = replace(mask, coefficients=(0, 0, ONE, *[0] * 5))
        assert tried(member, (heavy, {})) == "answers", "its owner has chosen 1: no cover"
    finally:
        member.members._sites[VICTIM] = site


@pytest.mark.parametrize("mode", [Mode.SUM, Mode.PRIVATE])
def test_members_refuse_to_unmask_a_sum_in_which_another_member_is_no_longer_covered(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """A coordinator loses members on purpose.

    The victim accepts the coefficients at MASK, since two members cover it. Both are then lost. Eight are left, of whom
    seven can unmask the sum without the victim.
    """
    victim, honest, colluders, lost = names([0]), names([1, 2, 3, 4]), names([5, 6, 7]), names([8, 9])
    wanted = np.array([0.999 * math.sqrt(2), *[0.0] * 4, *[1.0] * 5])
    given = Covered(tuple(int(a) for a in wanted / wanted.sum() * ONE), 1.0)
    monkeypatch.setattr(session, "covered", lambda *_: given)
    # The coordinator does not check V.
    monkeypatch.setattr(session, "bounds", SimpleNamespace(problem=bounds.problem, uncovered=lambda *_: ""))
    scene = cast(10, lost={(SessionStage.MASK, 0): lost})
    lax = SimulatedMembers(0, scene.members, ORIGIN.task, effective_members=1.0)  # they confirm everything
    scene.members |= {name: replace(scene.members[name], members=lax) for name in colluders}
    with pytest.raises(TooFewUpdatesError, match="3 members have confirmed"):
        play(scene, mode)
    refusals = {name: scene.declined.get((SessionStage.CONFIRM, name)) for name in victim + honest}
    assert refusals == dict.fromkeys(victim + honest, "cover")
    assert (SessionStage.MASK, victim[0]) not in scene.declined


# --- what the run's algorithm allows


E8 = ONE // 8


def asked_with(
    algorithm: str, values: Mapping[str, Any], *tries: Sequence[int], samples: Sequence[int] = (100,) * 8
) -> list[str]:
    """What a member of a run of this algorithm says to MASK with other coefficients."""
    answers: list[Any] = []

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if isinstance(work, Mask) and member.name == VICTIM:
            answers.extend(tried(member, (replace(work, coefficients=tuple(a)), inputs)) for a in tries)

    scene = cast(8, assumed=1, change=change)
    for member, count in zip(scene.members.values(), samples, strict=True):
        member.samples = count
    play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, algorithm, values))
    assert not scene.declined
    return answers


def two(by: int, of: Sequence[int] = (E8,) * 8) -> list[int]:
    """Coefficients of which the first is larger, and the second is smaller."""
    return [of[0] + by, of[1] - by, *of[2:]]


def test_fixed_weights_are_accepted_within_one_unit_of_the_members_own_samples() -> None:
    assert asked_with("fedavg-n", {}, two(0), two(1), two(-2), two(2)) == ["answers", "answers", *["coefficients"] * 2]
    samples = [100 + 7 * place for place in range(8)]
    own = [ONE * count // sum(samples) for count in samples]
    values = {"prior": "samples"}
    expected = ["answers", "answers", "coefficients", "coefficients"]
    assert asked_with("fedavg-n", values, own, two(1, own), two(2, own), two(0), samples=samples) == expected


def test_weights_of_multi_gradient_descent_are_accepted_in_their_box_and_below_the_cap() -> None:
    cap = int(Thresholds(8, Mode.SUM).cap * ONE)
    box = E8 // 2  # epsilon is 0.5 / |W|
    in_box = [E8 - box, E8 + box // 7, *[E8 + box // 7] * 6]
    below = [E8 - box - 100, *[E8 + (box + 100) // 7] * 7]
    above = [cap + 100, *[(ONE - cap - 100) // 7] * 7]
    at_cap = [cap, *[(ONE - cap) // 7] * 7]
    tries = (in_box, at_cap, below, above)
    assert asked_with("fedmgda+", {}, *tries) == ["answers", *["coefficients"] * 3], "its box is below the cap"
    assert asked_with("fedmgda+", {"epsilon": 0.9}, *tries) == ["answers"] * 3 + ["coefficients"]
    assert asked_with("fedmgda", {}, *tries) == ["answers"] * 3 + ["coefficients"]
    assert asked_with("fedmgda", {"pre": ["nnm"]}, *tries) == ["answers"] * 4


@few("a:Rule", "adafed")
@pytest.mark.parametrize(
    ("algorithm", "answer"),
    [*((name, "coefficients") for name in ("q-fedavg", "fedfv", "a:Rule")), ("adafed", "answers")],
)
def test_negative_coefficients_are_accepted_of_signed_algorithms_alone(algorithm: str, answer: str) -> None:
    assert asked_with(algorithm, {}, [-E8, *[E8] * 7], [E8 // 2] * 8) == [answer, "coefficients"]


def test_all_coefficients_of_an_evaluation_are_the_same_or_it_is_declined() -> None:
    scene, answers = cast(7, assumed=1), []
    for member in scene.members.values():
        member.metrics = {"test/loss": 1.0, "test/accuracy": 0.5}

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if isinstance(work, Mask) and member.name == VICTIM:
            for by in (1, -1, 0):
                other = replace(work, coefficients=tuple(two(by, work.coefficients)))
                answers.append(tried(member, (other, inputs)))

    play(scene, Mode.SUM)
    scene.change = change
    bound, test = clip(2, EVALUATION_NOISE), Evaluate(splits=("test",))
    session_of = setting(scene, Mode.SUM, work=test, length=2, clip=bound, nonce=b"e" * 16)
    play(scene, Mode.SUM, setting_=session_of)
    assert answers == ["coefficients", "coefficients", "answers"]


# --- the specification


GRADIENT = Jacobian(sketch="exact", budget=1.0, batch_size=0, objectives=("loss",))
"""Gradients, which are another kind of work than training."""


def ready_with(scene: Cast, specification: bytes, name: str = "", **changed: Any) -> str:
    """What a member says to READY with this specification; `changed` are fields of the terms."""
    made, member = setting(scene, Mode.SUM), scene.members[VICTIM]
    agreed = replace(made.agreed, **{"spec": name or digest(specification), **changed})
    member.origin = Origin(**{item.name: getattr(agreed, item.name) for item in fields(Origin)})
    return tried(member, (Ready(agreed=agreed, terms_bytes=terms_bytes(agreed)), {SPECIFICATION: specification}))


def test_terms_that_differ_from_the_specification_are_declined() -> None:
    scene, plain = cast(8, assumed=1), document(Mode.SUM)
    assert ready_with(scene, plain) == "answers"
    measured = {"length": 2, "clip": clip(2, EVALUATION_NOISE), "blur": 0.0}
    same: dict[str, Any] = {"work": Evaluate(splits=("test",)), **measured}
    assert ready_with(scene, plain, **same) == "answers"
    other: list[dict[str, Any]] = [
        {"mode": Mode.PRIVATE},
        {"clip": 1.0},
        {"disclose": ("loss",)},
        {"seed": 1},
        {"task": "two-digits"},
        {"blur": 0.5},
        {"blur": 2.0},
        {"unshared": Unshared(frozen=("w",))},
        {**same, "work": Evaluate(splits=("train",))},
        {**same, "clip": 1.0},
        {**same, "blur": 1.0},
        {"work": replace(TRAIN, targets={"loss": {"loss": -3.0}})},
        {"work": replace(TRAIN, targets={"other": {"loss": 1.0}})},
        {"work": replace(TRAIN, from_jacobian=True)},
        {"work": GRADIENT},
        {"work": replace(TRAIN, sgd=LocalSgd(steps=1, batch_size=10, learning_rate=0.0, weight_decay=1e6))},
        {"name": digest(b"another specification")},
    ]
    assert {str(changed): ready_with(scene, plain, **changed) for changed in other} == {
        str(changed): "terms" for changed in other
    }
    assert ready_with(scene, plain.replace(b'"sum"', b'"off"').replace(b"privacy.clip", b"# ")) == "terms"
    shown = document(Mode.SUM, disclose=("evaluation", "loss"))
    assert ready_with(scene, shown, disclose=("loss",)) == "answers"
    assert ready_with(scene, document(Mode.SUM, clip=2.5), clip=2.5) == "answers"


def test_a_specification_or_an_algorithm_that_the_worker_does_not_know_is_declined() -> None:
    scene, plain = cast(8, assumed=1), document(Mode.SUM)
    unknown = document(Mode.SUM, "mystery")
    for specification in (plain + b"\nsecret = 1", b"\xff", b"", unknown, document(Mode.SUM, "krum")):
        assert ready_with(scene, specification) == "policy:algorithm"
    wide = document(Mode.SUM, "fedmgda+", {"epsilon": "wide"})
    assert ready_with(scene, wide) == "policy:algorithm"
    scene.members[VICTIM].allow(SecurePolicy(assumed=1), "mystery")
    assert ready_with(scene, unknown) == "answers"
    assert ready_with(scene, document(Mode.SUM, "krum")) == "policy:algorithm"


def test_of_an_algorithm_that_only_its_owner_knows_a_member_requires_the_cover() -> None:
    scene = cast(8, assumed=1)
    for member in scene.members.values():
        member.allow(SecurePolicy(assumed=1), "mystery")
    total = play(scene, Mode.SUM, lambda _: np.array([-3.0, *[1.0] * 7]), setting(scene, Mode.SUM, "mystery"))
    assert not scene.declined
    assert total.record.coefficients[0] < 0
    assert total.share < 1
