"""Private rounds: the sum is exact and the Gram matrix is close in every mode, whichever members are lost."""

from dataclasses import replace

import numpy as np
import pytest

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import Voided
from federation.aggregation.registry import ALGORITHMS, algorithm
from federation.secure import hashing
from federation.secure.thresholds import Mode, Thresholds
from federation.work.base import Result, Work
from federation.work.secure.terms import SessionStage
from tests.federation.work.scene import STAGES, Member, cast, context, document, exact, held, names, play, round_of
from tests.few import few, few_of

MODES = list(Mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", few_of([5, 9], 5))
def test_the_sum_is_the_integer_sum_bit_for_bit(mode: Mode, m: int) -> None:
    scene = cast(m)
    total = play(scene, mode)
    assert np.array_equal(total.words, exact(scene, total))
    assert len(total.record.survivors) == m
    assert not scene.declined
    assert not total.record.alarms


@pytest.mark.parametrize("mode", few_of([Mode.PRIVATE, Mode.VERIFIED], Mode.PRIVATE))
def test_the_gram_matrix_is_close_to_that_of_the_unit_updates(mode: Mode) -> None:
    scene = cast(13, d=400)
    G = play(scene, mode).cohort.gram
    assert G is not None
    true = scene.units @ scene.units.T
    assert np.abs(G - true).max() <= 8 / np.sqrt(Thresholds(13, mode).k)
    assert float((G * true).sum() / np.linalg.norm(G) / np.linalg.norm(true)) >= 0.98


@pytest.mark.parametrize("mode", few_of(MODES, Mode.VERIFIED))
@few(SessionStage.READY, SessionStage.MASK, SessionStage.UNMASK)
@pytest.mark.parametrize(("stage", "opening"), STAGES)
def test_a_member_that_is_lost_at_a_stage_costs_nothing_but_its_update(
    mode: Mode, stage: SessionStage, opening: int
) -> None:
    gone = names([2])
    scene = cast(8, assumed=1, lost={(stage.value, opening): gone})
    if (mode, stage) == (Mode.VERIFIED, SessionStage.CONFIRM):
        with pytest.raises(Voided, match="lost before the second sketch was shared: silo-02"):
            play(scene, mode)
        return
    total = play(scene, mode)
    assert np.array_equal(total.words, exact(scene, total))
    unused = (mode is Mode.SUM and opening > 0) or (stage, opening) == (SessionStage.OPEN, 2)
    counts = unused or stage in (SessionStage.CONFIRM, SessionStage.UNMASK)
    assert (gone[0] in total.record.survivors) == counts


@few(SessionStage.MASK, SessionStage.UNMASK)
@pytest.mark.parametrize(("stage", "opening"), [asked for asked in STAGES if asked[0] is not SessionStage.READY])
def test_the_sum_names_every_accepted_reply_also_one_with_another_view(stage: SessionStage, opening: int) -> None:
    """A step that left an accepted reply out would not verify."""

    def lie(asked: str, member: Member, work: Work, result: Result) -> Result:
        if (asked, getattr(work, "opening", 0), member.name) != (stage.value, opening, names([2])[0]):
            return result
        assert result.statement is not None
        return replace(result, statement=replace(result.statement, view=bytes(hashing.DIGEST)))

    scene = cast(8, assumed=1)
    scene.lie = lie
    total = play(scene, Mode.PRIVATE)
    accepted = {reply.envelope for replies in scene.sent.values() for reply in replies}
    assert {reply.envelope for reply in (*total.consulted, *total.survivors)} == accepted
    assert len(total.record.alarms) == (opening < 2)  # nobody was lost before, so there was no second opening


@pytest.mark.parametrize("mode", few_of(MODES, Mode.SUM))
def test_a_sum_needs_the_least_number_of_members_and_no_more(mode: Mode) -> None:
    least = Thresholds(8, mode).n_min
    scene = cast(8, lost={(SessionStage.MASK.value, 0): names(range(8 - least))})
    total = play(scene, mode)
    assert len(total.record.survivors) == least
    assert np.array_equal(total.words, exact(scene, total))
    with pytest.raises(TooFewUpdatesError, match="have sent their masked vectors"):
        play(cast(8, lost={(SessionStage.MASK.value, 0): names(range(9 - least))}), mode)


def test_members_lost_in_both_openings_void_the_session() -> None:
    scene = cast(8, lost={(SessionStage.OPEN.value, 1): names([0]), (SessionStage.OPEN.value, 2): names([1])})
    with pytest.raises(Voided, match="lost in both openings"):
        play(scene, Mode.PRIVATE)


@pytest.mark.parametrize("mode", few_of(MODES, Mode.PRIVATE))
def test_a_large_coefficient_is_moved_towards_plain_averaging_until_all_members_accept_it(mode: Mode) -> None:
    scene = cast(8)
    total = play(scene, mode, lambda cohort: np.array([7.0, *[1.0] * 7]))
    assert not scene.declined
    assert np.array_equal(total.words, exact(scene, total))
    first, *others = total.record.coefficients
    assert 2**29 < first < 2**31
    assert len(set(others)) == 1
    assert 0 < total.share < 1
    assert play(cast(8), mode).share == 1


@few("fedavg", "fsmgda")
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedavg", {}),
        ("scalarised", {}),
        ("fsmgda", {"bound": "none"}),
        ("fedcmoo", {"bound": "none", "sketch": "exact", "budget": 1.0, "scope": "all"}),
    ],
)
def test_a_sum_is_the_mean_of_the_updates_within_rounding(name: str, values: dict[str, object]) -> None:
    scene = cast(8, assumed=1)
    step = round_of(scene, Mode.SUM, name, values=values, clip=100.0, blur=0.0)
    mean = np.mean([member.vector for member in scene.members.values()], axis=0)
    assert step.combined is not None
    assert np.abs(step.combined - mean).max() < 1e-5
    assert len(step.replies) == 8


def test_fedavg_shortens_what_is_longer_than_its_clip() -> None:
    scene = cast(8, assumed=1)
    step = round_of(scene, Mode.SUM, "fedavg", clip=14.0, blur=0.0)
    vectors = [member.vector for member in scene.members.values()]
    assert min(map(np.linalg.norm, vectors)) < 14 < max(map(np.linalg.norm, vectors))
    mean = np.mean([vector * min(1.0, 14.0 / float(np.linalg.norm(vector))) for vector in vectors], axis=0)
    assert step.combined is not None
    assert np.abs(step.combined - mean).max() < 1e-5


@pytest.mark.parametrize("name", sorted(name for name, kind in ALGORITHMS.items() if kind.private is not None))
def test_no_algorithm_asks_for_updates_in_the_clear_in_a_private_round(name: str) -> None:
    mode = Mode.SUM if ALGORITHMS[name].private == "sum" else Mode.PRIVATE
    values = {"scope": "all"} if name.startswith("fedcmoo") else {}
    assert next(algorithm(name, values).round(context(cast(8), mode))).kind.name == SessionStage.READY.value


def test_afl_gives_the_share_of_a_revoked_member_to_the_others() -> None:
    scene = cast(8)
    for member in scene.members.values():
        member.losses = {"loss": 1.0}
    shares = {**dict.fromkeys(scene.members, 0.1), "gone": 0.2}
    scene.specification = document(Mode.SUM, "afl", blur=0.0, disclose=("loss",))
    before = context(scene, Mode.SUM)
    before = replace(before, state={"lambda": shares}, revoked=lambda: frozenset({"gone"}))
    step = held(scene, algorithm("afl").round(before))
    assert step.forgotten == ("gone",)
    assert step.combination.state["lambda"] == pytest.approx(dict.fromkeys(scene.members, 1 / 8))
    assert step.combined is not None
    assert np.abs(step.combined - scene.units.mean(axis=0)).max() < 1e-5
