"""What a coordinator with t members learns of a session: what follows from the sum and the Gram matrix, no more."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.secure import hashing, masks, openings, sketch
from federation.secure.blocks import blocks
from federation.secure.dealing import DealShares, deal_shares
from federation.secure.fields import F_P, F_Q, Elements
from federation.secure.masks import MaskStream
from federation.secure.member_keys import SIGMA, member_keys
from federation.secure.openings import noise, noise_bound
from federation.secure.payloads import CheckAnswers
from federation.secure.shamir import inconsistent, weights
from federation.secure.streams import Stream
from federation.secure.thresholds import T_ROWS, Mode, Thresholds
from federation.secure.verified_mode import CheckShares, challenge, check_answers, check_shares
from federation.secure.wire import pack, unpack
from federation.work.base import Result, Work
from federation.work.registry import encode_statement
from federation.work.secure.journal import Journal
from federation.work.secure.terms import SessionStage
from tests.federation.secure.scene import Session, session
from tests.federation.work.scene import STAGES, Member, cast, play
from tests.few import few

SPY = 0  # the place of the member that works with the coordinator; t = 1 of 5
D = 20_000


def independent(table: NDArray[np.int64]) -> float:
    """The probability of so unequal counts if the rows are drawn alike."""
    from scipy.stats import chi2_contingency

    return float(chi2_contingency(table).pvalue)


def same_distribution(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """The probability of so unequal counts if both are drawn alike."""
    size = int(max(one.max(), other.max())) + 1
    table = np.array([np.bincount(one, minlength=size), np.bincount(other, minlength=size)])
    return independent(table[:, table.sum(axis=0) > 0])


def pairs(values: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """The values of each two members as one number: (members, n) in [0, bins) to (pairs * n,)."""
    m = len(values)
    return np.concatenate(
        [bins * bins * (i * m + j) + bins * values[i] + values[j] for i in range(m) for j in range(i + 1, m)]
    )


def stripped(played: Session, a: dict[str, int]) -> NDArray[np.uint32]:
    """The masked vectors of the honest members without all masks that the coordinator and the spy know, (m - 1, d)."""
    view, names = played.view_mask(a), played.ids
    spy = names[SPY]
    found = []
    for name in names[:SPY] + names[SPY + 1 :]:
        keys = played.keys[name]
        publics = {other: played.keys[other].public.s for other in (name, spy)}
        known: tuple[MaskStream, ...] = masks.member_masks(name, keys.s, publics, keys.sigma_b, view)
        words = played.masked(name, a)
        for mask in known:
            stream = Stream(mask.key).words(len(words))
            words = words - stream if mask.sign > 0 else words + stream
        found.append(words)
    return np.stack(found)


@pytest.mark.parametrize("alike", [True, False], ids=["equal updates", "random updates"])
def test_masked_vectors_have_the_distribution_of_any_vectors_with_the_same_sum(alike: bool) -> None:
    """The simulated record: uniform words of all honest members but one, whose words make up the sum."""
    played = session(5, Mode.PRIVATE, D, rows=4)
    if alike:
        one = np.sign(next(iter(played.updates.values()))) / math.sqrt(D)
        played = replace(played, updates=dict.fromkeys(played.ids, one))
    a = dict.fromkeys(played.ids, 2**32 // 5)
    real = stripped(played, a)
    total = real.sum(axis=0, dtype=np.uint32)
    rng = np.random.default_rng(0)
    simulated = rng.integers(0, 2**32, real.shape, dtype=np.uint32)
    simulated[-1] = total - simulated[:-1].sum(axis=0, dtype=np.uint32)
    exact = sum(
        (np.rint(played.updates[name] * np.ldexp(a[name], -4)).astype(np.int64) for name in played.ids[1:]),
        start=np.zeros(D, np.int64),
    )
    assert (total.view(np.int32) == exact).all(), "the sum of the honest members is what is learned"
    high = [(words >> np.uint32(29)).astype(np.int64) for words in (real, simulated)]
    assert same_distribution(*(pairs(bins, 8) for bins in high)) > 1e-3
    for row, name in zip(high[0], played.ids[1:], strict=True):
        positive = (played.updates[name] > 0).astype(np.int64)
        table = np.array([np.bincount(row[positive == sign], minlength=8) for sign in (0, 1)])
        assert independent(table) > 1e-4, "a member's words do not depend on its update"
    naked = [np.rint(played.updates[name] * np.ldexp(a[name], -4)).astype(np.int64) for name in played.ids[1:]]
    bare = (np.stack(naked).astype(np.uint32) >> np.uint32(29)).astype(np.int64)
    assert same_distribution(pairs(bare, 8), pairs(high[1], 8)) < 1e-9, "without masks it would show"


def known_elements(played: Session, name: str, opening: int) -> Elements:
    """A member's elements of an opening without the masks that the spy knows."""
    view, spy = hashing.view_open(played.view1, opening, played.ids), played.ids[SPY]
    elements = played.opening(name, played.ids, opening)
    for mask in openings.open_masks(name, played.keys[name].c, {spy: played.keys[spy].public.c}, view):
        words = Stream(mask.key).elements(F_P, len(elements))
        elements = F_P.sub(elements, words) if mask.sign > 0 else F_P.add(elements, words)
    return elements


@pytest.mark.full
def test_openings_have_the_distribution_of_any_elements_with_the_same_sum() -> None:
    real: list[Elements] = []
    for number in range(40):
        played = session(5, Mode.PRIVATE, 50, rows=4)
        secrets = {name: bytes([number]) + secret[1:] for name, secret in played.secrets.items()}
        played = replace(played, secrets=secrets)
        real.append(np.stack([known_elements(played, name, 1) for name in played.ids[1:]]))
    joined = np.hstack(real)
    rng = np.random.default_rng(1)
    simulated = rng.integers(0, F_P.modulus, joined.shape, dtype=np.uint64)
    rest = joined.sum(axis=0) + (len(joined) * F_P.modulus) - simulated[:-1].sum(axis=0)
    simulated[-1] = rest % F_P.modulus
    high = [(elements >> np.uint64(F_P.bits - 2)).astype(np.int64) for elements in (joined, simulated)]
    assert same_distribution(*(pairs(bins, 4) for bins in high)) > 1e-3


def test_a_malformed_dealer_learns_one_number_of_each_member_in_an_opening_with_fresh_noise() -> None:
    """Its shares lie on no polynomial. The answers add up to a linear functional of each honest sketch, and noise."""
    played = session(5, Mode.PRIVATE, 300)
    names = played.ids
    honest = {opening: played.gram(W, opening) for opening, W in ((1, names), (2, names[:4]))}
    rng = np.random.default_rng(2)
    spy = names[SPY]
    forged = {name: rng.integers(0, F_P.modulus, played.k, dtype=np.uint64) for name in names}
    for name in names:
        held = played.held[name][spy]
        played.held[name][spy] = DealShares(held.sigma_b, held.sigma_s, forged[name])
    left: dict[int, list[int]] = {}
    for opening, W in ((1, names), (2, names[:4])):
        view, m = hashing.view_open(played.view1, opening, W), len(W)
        total = sum((played.opening(name, W, opening) for name in W), start=np.zeros(m * (m + 1) // 2, np.uint64))
        opened = np.zeros((m, m), np.uint64)
        opened[np.triu_indices(m)] = total % np.uint64(F_P.modulus)
        L = weights(F_P, [played.points[name] for name in W])
        added = np.zeros((m, m), np.int64)
        added[np.triu_indices(m)] = sum(noise(played.secrets[name], view, played.k, m) for name in W)
        for j, other in enumerate(W[1:], 1):
            functional = 0
            for i, name in enumerate(W):
                shares = played.held[name][other].sketch
                product = sum(int(x) * int(y) for x, y in zip(forged[name], shares, strict=True))
                functional += int(L[i]) * product
            assert (int(opened[0, j]) - functional - int(added[0, j])) % F_P.modulus == 0
        left[opening] = added[0, 1:4].tolist()
        rest = np.ldexp(F_P.decode(opened[np.triu_indices(m)]).astype(np.float64), -28)
        mine = np.zeros((m, m))
        mine[np.triu_indices(m)] = rest
        upper = np.triu_indices(m - 1)
        assert (mine[1:, 1:][upper] == honest[opening][1:, 1:][upper]).all(), "nothing more of the others"
    assert not set(left[1]) & set(left[2])


@few(Mode.PRIVATE)
@pytest.mark.parametrize("mode", list(Mode))
def test_of_no_member_do_the_replies_hold_enough_shares_of_both_mask_secrets(mode: Mode) -> None:
    """At each stage one member's reply comes too late for the round; here it is on record with the others."""
    replies: list[bytes] = []

    def keep(stage: str, member: Member, work: Work, result: Result) -> Result:
        rows = b"".join(row.tobytes() for row in result.rows.values())
        replies.append(encode_statement(stage, result.statement) + rows)
        return result

    # both losses would void the session
    fatal = {(SessionStage.OPEN, 2), *([(SessionStage.CONFIRM, 0)] if mode is Mode.VERIFIED else [])}
    stages = [place for place in STAGES if place not in fatal]
    late = {(stage.value, opening): [f"silo-{i:02}"] for i, (stage, opening) in enumerate(stages)}
    scene = cast(20, lost=late, lie=keep)
    told = play(scene, mode).record
    on_record = b"".join(replies)

    def shown(name: str) -> tuple[int, int]:
        """How many members' shares of its own mask's secret are on record, and of its pair key's."""
        journal = Journal(scene.members[name].memory, told.session)
        no_sketch = np.empty(0, np.uint64)
        dealt = deal_shares(journal.keys, no_sketch, journal.thresholds, journal.secret, journal.view1)
        own = sum(pack(F_Q, shares.sigma_b) in on_record for shares in dealt)
        return own, sum(pack(F_Q, shares.sigma_s) in on_record for shares in dealt)

    found = {name: shown(name) for name in told.ready}
    needed = Thresholds(len(told.ready), mode).t_mask
    assert len(told.ready) == 19
    assert len(told.survivors) == len(told.members) - 1
    for name, (own, pair) in found.items():
        assert (own >= needed) == (name in told.survivors)
        assert (pair >= needed) == (name in told.members and name not in told.survivors)
        assert min(own, pair) == 0


@pytest.mark.parametrize("mode", [Mode.PRIVATE, Mode.VERIFIED])
def test_a_number_that_an_opening_shows_has_eight_or_nine_bits(mode: Mode) -> None:
    """An element of F_p less the entropy of the honest members' noise, whose sum is nearly normal."""
    for m in range(5, 101):
        cohort = Thresholds(m, mode)
        for W in (m, cohort.n_min):
            variance = (W - cohort.t) * noise_bound(cohort.k, W) * (noise_bound(cohort.k, W) + 1) / 3
            bits = math.log2(F_P.modulus) - math.log2(2 * math.pi * math.e * variance) / 2
            assert 7 < bits < 9.5


SAMPLES = 240  # dealers
POINTS = range(1, 6)  # of the smallest cohort; the spy has the first


def quarter(values: Elements) -> NDArray[np.int64]:
    """Where elements of F_q lie, 0 to 3."""
    return (values >> np.uint64(F_Q.bits - 2)).astype(np.int64)


def beyond_a_line(values: Elements, at_zero: Elements, x: int) -> Elements:
    """f(x) less the line through f(0) and f(1), which the coordinator and the spy know; `values` are f(1), f(2), ..."""
    slope = F_Q.sub(values[0], at_zero)
    line = at_zero
    for _ in range(x):
        line = F_Q.add(line, slope)
    return F_Q.sub(values[x - 1], line)


def test_shares_of_the_mask_secrets_of_the_smallest_cohort_show_nothing_but_the_secrets() -> None:
    """The simulated record: a polynomial of degree 3 through the secret and the spy's share, and two uniform values."""
    played = session(5, Mode.VERIFIED)
    shown = []
    for number in range(SAMPLES // 5):
        secret = number.to_bytes(32, "big")
        keys = member_keys(secret, played.digest)
        dealt = deal_shares(keys, np.empty(0, np.uint64), played.thresholds, secret, played.view1)
        for sigma, shares in (
            (keys.sigma_b, [held.sigma_b for held in dealt]),
            (keys.sigma_s, [held.sigma_s for held in dealt]),
        ):
            at_zero, values = unpack(F_Q, sigma, SIGMA), np.stack(shares)
            assert not inconsistent(F_Q, POINTS, values, played.thresholds.t_mask - 1).any()
            shown.append(np.stack([beyond_a_line(values, at_zero, x) for x in (2, 3)]))
    real = np.hstack(shown)
    simulated = np.random.default_rng(3).integers(0, F_Q.modulus, real.shape, dtype=np.uint64)
    assert same_distribution(pairs(quarter(real), 4), pairs(quarter(simulated), 4)) > 1e-3


@pytest.mark.full
def test_answers_of_the_smallest_cohort_show_norms_and_the_sum_and_are_uniform_otherwise() -> None:
    """What an answer shows beyond the value at 0 and the spy's own answer does not depend on the updates."""
    played = session(5, Mode.VERIFIED, 200)
    t = played.thresholds.t
    sketches = [sketch.second_elements(bytes(32), blocks(played.updates[name])) for name in played.ids[1:]]
    dealers = [sketches[number % len(sketches)] for number in range(SAMPLES)]
    shares = [check_shares(x, POINTS, t, number.to_bytes(32, "big"), bytes(32)) for number, x in enumerate(dealers)]
    held = list(zip(*shares, strict=True))  # by the member that holds them

    def answers(kept: int) -> list[CheckAnswers]:
        """What the members answer with the first values of each share; the rest is 0."""
        mine = [[CheckShares(np.where(np.arange(len(s.values)) < kept, s.values, 0)) for s in m] for m in held]
        return [check_answers(one, [1] * SAMPLES, challenge(bytes(32))) for one in mine]

    def of(found: list[CheckAnswers], name: str) -> Elements:
        """The first value about each dealer, (5, n)."""
        return np.stack([getattr(one, name) for one in found]).reshape(len(held), SAMPLES, -1)[:, :, 0]

    full, naked, with_zero = (answers(kept) for kept in (len(shares[0][0].values), T_ROWS, T_ROWS + 1))
    norms = np.concatenate([F_Q.matmul(x[None, :], x[:, None])[0] for x in dealers])
    zero = np.zeros(SAMPLES, np.uint64)
    rng = np.random.default_rng(4)

    for name, unblinded, degree, at_zero in [
        ("norms", naked, 2 * t, norms),
        ("degrees", naked, t, None),  # the value at 0 is random
        ("zeros", with_zero, 2 * t, zero),  # the zero itself blinds the norm
        ("projections", naked, t, None),
    ]:
        real, bare = of(full, name), of(unblinded, name)
        assert not inconsistent(F_Q, POINTS, real, degree).any()
        beyond = [F_Q.sub(v[1], v[0]) if at_zero is None else beyond_a_line(v, at_zero, 2) for v in (real, bare)]
        shown, would = (quarter(values) for values in beyond)
        assert same_distribution(shown, rng.integers(0, 4, SAMPLES)) > 1e-3, name
        table = np.bincount(4 * shown + would, minlength=16).reshape(4, 4)
        assert independent(table) > 1e-3, f"{name} are not blinded"
