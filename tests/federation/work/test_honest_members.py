"""Honest members raise no alarm: whole sessions, and the values that the checks see in thousands of sessions.

An alarm in an honest session can only come from the sketches, the noise and the rounding. So the second test computes
these with the functions of the package, and leaves out what hides them: keys, shares and masks. All is in the mode
`verified`, whose checks are those of the other modes and more.
"""

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from federation.secure import sketch, thresholds
from federation.secure.blocks import blocks, norm, unit
from federation.secure.checks import Failure, failures_of_gram, failures_of_identity, failures_of_sum
from federation.secure.derivation import dense_key
from federation.secure.fields import F_Q, fixed
from federation.secure.masks import masked, reals
from federation.secure.openings import noise
from federation.secure.streams import Stream
from federation.secure.verified_mode import NORM_LIMIT, challenge, failures_of_second_sketch
from tests.federation.work.scene import cast, exact, play, round_of

D = 1000
_PARTS = 4
_MANTISSA = 24


@pytest.mark.parametrize(
    ("m", "sessions"),
    [(5, 3), (9, 1), pytest.param(5, 200, marks=pytest.mark.full), pytest.param(13, 60, marks=pytest.mark.full)],
)
def test_honest_sessions_pass_every_check(m: int, sessions: int) -> None:
    for number in range(sessions):
        seed = 1_000_000 * m + number
        scene = cast(m, d=D, seed=seed)
        total = play(scene, thresholds.Mode.VERIFIED)
        assert not scene.declined, f"seed {seed}"
        assert not total.record.alarms, f"seed {seed}"
        assert (total.words == exact(scene, total)).all(), f"seed {seed}"


@pytest.mark.parametrize("mode", [thresholds.Mode.PRIVATE, thresholds.Mode.VERIFIED])
def test_updates_shorter_than_the_clip_pass_every_check(mode: thresholds.Mode) -> None:
    scene = cast(8, d=400, seed=5)
    for place, member in enumerate(scene.members.values()):
        member.vector *= np.float32([1e-12, 1e-3, 0.1, 0.4, 0.7, 1.0, 1.5, 20.0][place] / np.linalg.norm(member.vector))
    step = round_of(scene, mode, "fedavg", clip=1.0, blur=0.0)
    rows = np.stack([member.vector for member in scene.members.values()])
    shortened = rows / np.maximum(np.linalg.norm(rows, axis=1), 1.0)[:, None]
    assert not scene.declined
    assert step.combined == pytest.approx(shortened.mean(axis=0), abs=1e-6)


@pytest.mark.parametrize("mode", thresholds.Mode)
def test_an_update_of_zero_is_summed_with_a_clip(mode: thresholds.Mode) -> None:
    scene = cast(10)
    scene.members["silo-03"].vector *= np.float32(0)
    step = round_of(scene, mode, "fedavg", clip=1.0)
    assert not scene.declined
    assert "silo-03" in step.sessions[0].survivors


def sketches(seed: bytes, units: list[NDArray[np.float64]], rows: int) -> NDArray[np.float64]:
    """The integer sketches of all members at once, (m, rows): the signs are read once, where a table is not zero."""
    tables = np.stack([sketch._table(seed, blocks(u)) for u in units])
    used = np.flatnonzero(tables.any(axis=0))
    bits = np.frombuffer(Stream(dense_key(seed)).read(rows * tables.shape[1] // 8), np.uint8)
    minus = np.unpackbits(bits.reshape(rows, -1), axis=1)[:, used].astype(np.float64)
    found: NDArray[np.float64] = tables.sum(axis=1)[:, None] - 2 * tables[:, used] @ minus.T
    return found


def alarms(seed: int, m: int) -> list[Failure | str]:
    """What the checks of section 4 find in one session of m honest members."""
    rng, cohort = np.random.default_rng(seed), thresholds.Thresholds(m, thresholds.Mode.VERIFIED)
    session, tau1, tau2, view = (rng.bytes(32) for _ in range(4))
    common = rng.standard_normal(D) * rng.uniform(0, 3)
    vectors = [(common + rng.standard_normal(D)).astype(np.float32) for _ in range(m)]
    units = [np.concatenate(list(unit(blocks(v), norm(blocks(v))))) for v in vectors]
    weights = np.minimum(rng.dirichlet(np.full(m, 1.0)), cohort.cap) if rng.random() < 0.5 else np.full(m, 1 / m)
    coefficients = thresholds.truncated(weights.tolist())
    a = np.array(coefficients) / thresholds.ONE

    S = sketches(session, units, cohort.k)
    q = np.stack([fixed(row / np.sqrt(np.square(row).sum()), thresholds.S_BITS) for row in S])
    upper = np.triu_indices(m)
    added = sum(noise(rng.bytes(32), view, cohort.k, m) for _ in range(m))
    G = np.zeros((m, m))
    G[upper] = np.ldexp(((q @ q.T)[upper] + added).astype(np.float64), -2 * thresholds.S_BITS)
    G += np.triu(G, 1).T

    parts = (masked(blocks(u), A, []) for u, A in zip(units, coefficients, strict=True))
    words = sum((np.concatenate(list(part)) for part in parts), start=np.zeros(D, np.uint32))
    names = [f"{i:02}" for i in range(m)]
    found: list[Failure | str] = list(failures_of_gram(G, names, cohort.k))
    failures, square = failures_of_sum([reals(words)], a.tolist())
    found += [*failures, *failures_of_identity(square, G, a, cohort.k)]

    T = sketches(tau1, [*units, reals(words)], thresholds.T_ROWS) / (
        2.0**_MANTISSA * np.sqrt(_PARTS * thresholds.T_ROWS)
    )
    t = fixed(T[:-1].ravel(), thresholds.T_BITS).reshape(m, thresholds.T_ROWS)
    E = F_Q.decode(challenge(tau2).E.ravel()).reshape(-1, thresholds.T_ROWS)
    projections = t @ E.T + rng.integers(-thresholds.RANGE_NOISE, thresholds.RANGE_NOISE, (m, len(E)), endpoint=True)
    if np.abs(projections).max() > thresholds.RANGE_LIMIT:
        found.append("range")
    if np.ldexp(np.square(t).sum(axis=1).max(), -2 * thresholds.T_BITS) > NORM_LIMIT:
        found.append("norm")
    sums = np.ldexp(
        (np.array(coefficients, object) @ t.astype(object)).astype(np.float64),
        -thresholds.T_BITS - thresholds.COEFFICIENT_BITS,
    )
    found += failures_of_second_sketch(T[-1], sums, D, m)
    shortened = rng.uniform(0, 1, m) * a @ np.stack(units)
    return [*found, *failures_of_identity(float(shortened @ shortened), G, a, cohort.k, shorter=True)]


def test_the_sketches_of_all_members_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    units = [v / np.linalg.norm(v) for v in rng.standard_normal((3, D))]
    for row, u in zip(sketches(b"s" * 32, units, 40), units, strict=True):
        assert row.astype(np.int64).tolist() == sketch.integer_sketch(b"s" * 32, blocks(u), 40).tolist()


@pytest.mark.parametrize("sessions", [25, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
@pytest.mark.full
def test_the_checks_find_nothing_in_what_honest_members_send(sessions: int) -> None:
    with threadpool_limits(1):  # the matrices are small, and threads that wait for each other cost more
        for number in range(sessions):
            m = (5, 6, 8, 10, 13, 20)[number % 6]
            assert alarms(number, m) == [], f"session {number} of {m} members"
