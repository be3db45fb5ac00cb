"""No honest private round is lost: each rule that has private rounds, in each mode, with members lost on the way."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from federation.aggregation.registry import ALGORITHMS
from federation.secure.thresholds import SMALLEST_MGDA, Mode, Thresholds
from federation.work.secure.terms import SessionStage
from tests.federation.work.scene import Cast, cast, names, round_of

OBJECTIVES = ("scalarised", "fsmgda", "fedcmoo", "fedcmoo-pref")
DISCLOSED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("afl", "fedcmoo-pref", "adafed"), ("loss",)),
    "fedfa": ("accuracy",),
    "q-fedavg": ("loss", "norm"),
    "fedfv": ("loss", "norm"),
}
VALUES: Mapping[str, Mapping[str, Any]] = {
    "fsmgda": {"bound": "none"},
    **{
        name: {"bound": "none", "sketch": "exact", "budget": 1.0, "scope": "all"}
        for name in ("fedcmoo", "fedcmoo-pref")
    },
}
RULES = [*sorted(name for name, kind in ALGORITHMS.items() if kind.private is not None), "torchjd:upgrad"]
COMMON = ("fedavg", "fedmgda+", "adafed", "fedcmoo")


def modes(name: str) -> list[Mode]:
    """The modes in which a rule can work."""
    if name in OBJECTIVES:
        return [Mode.SUM]
    return [Mode.PRIVATE, Mode.VERIFIED] if kind(name) == "gram" else list(Mode)


def kind(name: str) -> str | None:
    return "gram" if name.startswith("torchjd:") else ALGORITHMS[name].private


def members(name: str, m: int, lost: bool) -> Cast:
    """Members whose updates agree in part, and who may be lost at DEAL and at MASK."""
    scene = cast(m, d=300, assumed=0, seed=m)
    rng = np.random.default_rng(m)
    for member in scene.members.values():
        member.losses = {"loss": float(rng.uniform(0.5, 2))}
        member.metrics = {"train/accuracy": float(rng.uniform(0.2, 0.9))}
        if name in OBJECTIVES:
            member.gradients = {"a": member.vector, "b": rng.standard_normal(300).astype(np.float32)}
            member.losses = {"a": 1.0, "b": 0.5, "loss": 0.75}
    if lost:
        scene.lost = {(SessionStage.DEAL.value, 0): names([0]), (SessionStage.MASK.value, 0): names([1])}
    return scene


def cases() -> list[Any]:
    found = []
    for name in RULES:
        least = SMALLEST_MGDA if kind(name) == "gram" else 5
        for mode in modes(name):
            for m in sorted({least, 10, 20, 50}):
                for lost in (False, True):
                    if lost and m - 2 < max(Thresholds(m, mode).n_min, least):
                        continue
                    quick = name in COMMON and mode in (modes(name)[0], Mode.VERIFIED) and m == 10
                    marks = [] if quick and lost else [pytest.mark.full]
                    found.append(pytest.param(name, mode, m, lost, marks=marks))
    return found


@pytest.mark.parametrize(("name", "mode", "m", "lost"), cases())
def test_no_honest_round_is_lost_or_declined(name: str, mode: Mode, m: int, *, lost: bool) -> None:
    scene = members(name, m, lost)
    clip = {"clip": 10.0} if name in (*OBJECTIVES, "fedavg") else {}
    step = round_of(scene, mode, name, values=VALUES.get(name, {}), disclose=DISCLOSED.get(name, ()), **clip)
    assert not scene.declined
    assert step.combined is not None
    assert np.isfinite(step.combined).all()
    assert step.combined.any()
    survivors = m - 2 if lost else m
    assert [len(session.survivors) for session in step.sessions] == [survivors] * len(step.sessions)
    assert not step.named
    assert not any(session.alarms for session in step.sessions)
