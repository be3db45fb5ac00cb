"""The blur of updates: its size, its source, what it leaves of a sum, and members that do not blur."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.aggregation.interface import TooFewUpdatesError
from federation.secure.blur import blurred, deviation
from federation.secure.streams import Stream
from federation.secure.thresholds import BLUR, Mode, Thresholds
from federation.work.base import Result, Work
from federation.work.secure.journal import Journal
from federation.work.secure.terms import SessionStage
from federation.work.site import SecurePolicy
from tests.federation.work.scene import FREE, VICTIM, Cast, Member, cast, play, setting

Reals = NDArray[np.float64]


def noise(count: int) -> Reals:
    return Stream(bytes(32)).normal(count)


def test_the_noise_has_mean_0_and_variance_1_and_four_words_for_each_number() -> None:
    z = noise(200_000)
    assert abs(z.mean()) < 0.01
    assert z.var() == pytest.approx(1, abs=0.01)
    assert np.abs(z).max() <= 2 * math.sqrt(3)
    assert (np.abs(z) < 1.96).mean() == pytest.approx(0.95, abs=0.01)
    words = np.frombuffer(Stream(bytes(32)).read(16 * 5), "<u4").reshape(5, 4).astype(int).sum(axis=1)
    assert (z[:5] == (words - 2 * (2**32 - 1)) * (math.sqrt(3) / 2**32)).all()


def test_a_coordinate_is_blurred_in_proportion_to_itself_and_the_same_in_blocks_of_any_size() -> None:
    u = np.array([0.0, 1.0, -2.0, 1e-9] * 1000)
    (b,) = blurred([u], bytes(32), bytes(32), 0.5)
    assert not b[::4].any()
    assert (b[1::4] / u[1::4]).std() == pytest.approx(0.5, rel=0.1)
    parts = blurred([u[:1], u[1:700], u[700:]], bytes(32), bytes(32), 0.5)
    assert np.array_equal(np.concatenate(list(parts)), b)
    (other,) = blurred([u], b"1" * 32, bytes(32), 0.5)
    (third,) = blurred([u], bytes(32), b"1" * 32, 0.5)
    assert not np.isclose(other[1::4], b[1::4], rtol=1e-6).any()
    assert not np.isclose(third[1::4], b[1::4], rtol=1e-6).any()


def kept(scene: Cast, session: bytes, name: str = VICTIM) -> tuple[Reals, Reals]:
    """u and v of a member after a session."""
    journal = Journal(scene.members[name].memory, session)
    return np.concatenate(list(journal.own_vector())), np.concatenate(list(journal.vector()))


@pytest.mark.parametrize("mode", list(Mode))
def test_the_blurred_vector_is_as_long_as_the_update_and_the_direction_has_length_1(mode: Mode) -> None:
    scene = cast(10, d=2000)
    for place, member in enumerate(scene.members.values()):
        member.vector *= np.float32(10.0 ** (place - 5))
    total = play(scene, mode, setting_=setting(scene, mode, clip=0.5))
    assert not total.record.alarms
    for name in scene.members:
        u, v = kept(scene, total.record.session, name)
        assert np.linalg.norm(v) == pytest.approx(np.linalg.norm(u), rel=1e-12)
        direction = np.concatenate(list(Journal(scene.members[name].memory, total.record.session).direction()))
        assert np.linalg.norm(direction) == pytest.approx(1)
        assert direction @ v == pytest.approx(np.linalg.norm(u))
        size = deviation(BLUR, Thresholds(10, mode))
        assert u @ v / (u @ u) == pytest.approx(1 / math.hypot(1, size), abs=0.02)


def test_a_restarted_member_blurs_in_the_same_way() -> None:
    scene = cast(6, assumed=1)
    sent = []

    def twice(stage: str, member: Member, work: Work, inputs: Any) -> None:
        if stage == SessionStage.MASK:
            sent.append(member.do(work, inputs).rows["masked"].tobytes())
            del member.memory.values[next(name for name in member.memory.values if name.endswith("/lengths"))]
            sent.append(member.do(work, inputs).rows["masked"].tobytes())

    scene.change = twice
    play(scene, Mode.SUM)
    assert len(sent) == 12
    assert sent[::2] == sent[1::2]


def test_without_blur_the_vector_is_the_update_itself() -> None:
    scene = cast(6, assumed=1)
    total = play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, blur=0.0))
    u, v = kept(scene, total.record.session)
    assert np.array_equal(u, v)


@pytest.mark.parametrize(("m", "length", "cosine"), [(5, 0.26, 0.97), (10, 0.16, 0.99), (20, 0.08, 0.997)])
def test_all_noise_in_a_sum_with_equal_weights_has_the_stated_length(m: int, length: float, cosine: float) -> None:
    """For updates of one direction the sum is as long as one update; the noise of all is c / sqrt(m (n_min - t))."""
    scene = cast(m, d=4000, assumed=1)
    for member in scene.members.values():
        member.vector = np.full(4000, 0.1, np.float32)
    total = play(scene, Mode.SUM)
    left = total.vector(1.0) - 1 / math.sqrt(4000)
    cohort = Thresholds(m, Mode.SUM)
    assert BLUR / math.sqrt(m * (cohort.n_min - cohort.t)) == pytest.approx(length, abs=0.005)
    v = total.vector(1.0)
    assert float(v.sum() / np.linalg.norm(v) / math.sqrt(4000)) == pytest.approx(cosine, abs=0.005)
    assert np.linalg.norm(left) < 1.3 * length


# --- who blurs, and how much


def test_a_member_whose_owner_asks_for_more_blur_declines() -> None:
    scene = cast(9, assumed=1)
    scene.members[VICTIM].allow(SecurePolicy(assumed=1))
    total = play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, blur=0.9))
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "policy:blur"}
    assert VICTIM not in total.record.members
    scene.members[VICTIM].allow(SecurePolicy(assumed=1, blur=0.9))
    scene.declined.clear()
    play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, blur=0.9, nonce=b"2" * 16))
    assert not scene.declined


def silent(stage: str, member: Member, work: Work, result: Result) -> Result:
    """A member of a version that does not blur."""
    if stage != SessionStage.READY or member.name != VICTIM:
        return result
    return replace(result, statement=replace(result.statement, blur=0.0))


def test_the_coordinator_refuses_a_member_that_does_not_sign_that_it_blurs() -> None:
    scene = cast(9, assumed=1, lie=silent)
    total = play(scene, Mode.SUM)
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "statement"}
    assert VICTIM not in total.record.members


def test_members_decline_to_deal_with_a_member_that_does_not_sign_that_it_blurs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.federation.work.scene.statement_problem", lambda *_: "")
    scene = cast(9, assumed=1, lie=silent)
    with pytest.raises(TooFewUpdatesError):
        play(scene, Mode.SUM)
    assert {reason for (stage, _), reason in scene.declined.items() if stage == SessionStage.DEAL} == {"blur"}


# --- negative coefficients


def signing(scene: Cast, names: list[str]) -> Any:
    """Owners who name the plug-in of the run."""
    for name in names:
        scene.members[name].allow(SecurePolicy(assumed=1), FREE)
    total = play(scene, Mode.SUM, lambda _: np.array([-1.0, *[1.0] * 7]), setting(scene, Mode.SUM))
    assert not scene.declined
    return total.record


def test_a_plug_in_has_negative_coefficients_only_if_every_owner_names_it() -> None:
    scene = cast(8, assumed=1)
    assert min(signing(scene, list(scene.members)).coefficients) < 0
    scene = cast(8, assumed=1)
    assert min(signing(scene, list(scene.members)[1:]).coefficients) >= 0
