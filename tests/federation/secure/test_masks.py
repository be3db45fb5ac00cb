"""Views, keys, ciphertexts, openings and masked sums of the private round."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from federation.secure import hashing
from federation.secure.blocks import BLOCK, blocks, norm, unit
from federation.secure.derivation import confirm_key, deal_key, open_key, pair_mask_key
from federation.secure.encryption import decrypt, encrypt
from federation.secure.errors import Fault, Malformed
from federation.secure.fields import F_P, F_Q, Elements
from federation.secure.hashing import PublicKeys
from federation.secure.masks import MaskStream, masked, reals, unmask
from federation.secure.member_keys import check_keys, member_keys, shared_secret
from federation.secure.openings import noise, noise_bound
from federation.secure.payloads import Unmasking, join_envelopes, split_ciphertexts, split_envelopes, unpack_open
from federation.secure.shamir import share
from federation.secure.sketch import first_sketch, integer_sketch, second_sketch
from federation.secure.streams import Stream
from federation.secure.thresholds import Mode, truncated
from federation.secure.unmasking import recover
from federation.secure.wire import pack, unpack
from tests.federation.secure.scene import Session, refused, session

# --- views


def test_parts_are_not_joined_and_lists_are_sorted_without_repeats() -> None:
    assert hashing.hash_parts(b"ab") != hashing.hash_parts(b"a", b"b") != hashing.hash_parts(b"", b"ab")
    one = hashing.view_open(b"v", 1, ["a", "b"])
    assert len({one, hashing.view_open(b"v", 2, ["a", "b"]), hashing.view_open(b"v", 1, ["a"])}) == 3
    for ids in (["b", "a"], ["a", "a"], ["a", "c", "b"]):
        with refused(Fault.ORDER):
            hashing.view_open(b"v", 1, ids)
        with refused(Fault.ORDER):
            hashing.view_mask(b"v", ids, range(len(ids)))
    with refused(Fault.LENGTH):
        hashing.view_mask(b"v", ["a", "b"], [1])
    with refused(Fault.LENGTH):
        hashing.final(b"v", ["a"], [b"short"])
    with refused(Fault.RANGE):
        hashing.view_mask(b"v", ["a"], [2**63])


def test_ids_are_in_the_order_of_their_bytes() -> None:
    ids = ["Z", "a", "é", "\uffff", "\U00010000"]
    assert ids == sorted(ids) == sorted(ids, key=str.encode)
    hashing.view_open(b"v", 1, ids)


# --- keys

LOW_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    2**255 - 20,
]


def keys(seed: int) -> PublicKeys:
    return member_keys(bytes([seed]) * 32, b"session").public


@pytest.mark.parametrize("u", LOW_ORDER)
def test_keys_of_low_order_are_refused(u: int) -> None:
    public = u.to_bytes(32, "little")
    with refused(Fault.KEY_ZERO):
        shared_secret(X25519PrivateKey.from_private_bytes(b"\x07" * 32), public)
    for bad in (PublicKeys(public, keys(1).s), PublicKeys(keys(1).c, public)):
        with refused(Fault.KEY_ZERO):
            check_keys([keys(2), bad])


def test_repeated_non_canonical_and_short_keys_are_refused() -> None:
    check_keys([keys(1), keys(2), keys(3)])
    for repeated in (PublicKeys(keys(1).c, keys(2).s), PublicKeys(keys(2).s, keys(1).s), PublicKeys(*[keys(3).c] * 2)):
        with refused(Fault.KEY_REPEATED):
            check_keys([keys(1), repeated])
        with refused(Fault.KEY_REPEATED):
            check_keys([repeated], [keys(1).c, keys(1).s])
    again = int.from_bytes(keys(1).c, "little") | 2**255  # X25519 ignores the highest bit: the same point
    for bad in (again, 2**255 - 19, 2**255 - 18, 2**256 - 1):
        with refused(Fault.KEY_FORM):
            check_keys([keys(1), PublicKeys(bad.to_bytes(32, "little"), keys(2).s)])
    with refused(Fault.LENGTH):
        check_keys([keys(1), PublicKeys(keys(2).c[:31], keys(2).s)])


# --- ciphertexts and payloads


def test_a_ciphertext_opens_for_its_sender_receiver_and_view_alone() -> None:
    shared, view = b"s" * 32, b"v" * 32
    encrypted = encrypt(deal_key(shared, view, "a", "b"), b"shares", view)
    assert decrypt(deal_key(shared, view, "a", "b"), encrypted, view) == b"shares"
    other = [
        (deal_key(shared, view, "b", "a"), encrypted, view),
        (deal_key(shared, b"w" * 32, "a", "b"), encrypted, view),
        (confirm_key(shared, view, "a", "b"), encrypted, view),
        (deal_key(shared, view, "a", "b"), encrypted, b"w" * 32),
        (deal_key(shared, view, "a", "b"), encrypted[:-1], view),
        (deal_key(shared, view, "a", "b"), encrypted[:15], view),
        (deal_key(shared, view, "a", "b"), b"", view),
        (deal_key(shared, view, "a", "b"), bytes([encrypted[0] ^ 1]) + encrypted[1:], view),
    ]
    for key, ciphertext, data in other:
        with refused(Fault.NOT_AUTHENTIC):
            decrypt(key, ciphertext, data)
    assert open_key(shared, view, "a", "b") == open_key(shared, view, "b", "a")
    assert pair_mask_key(shared, view, "a", "b") == pair_mask_key(shared, view, "b", "a")


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.binary(max_size=6), max_size=4), st.binary(max_size=5), st.data())
def test_an_inbox_is_cut_as_it_was_joined_or_refused(envelopes: list[bytes], rest: bytes, data: st.DataObject) -> None:
    inbox = join_envelopes(envelopes) + rest
    assert split_envelopes(inbox, len(rest)) == (envelopes, rest)
    cut = inbox[: data.draw(st.integers(0, len(inbox)))]
    try:
        found, tail = split_envelopes(cut, len(rest))
    except Malformed:
        return
    assert join_envelopes(found) + tail == cut


@pytest.mark.parametrize(("inbox", "rest"), [(b"\0\0\0", 0), (b"\0\0\0\1", 0), (b"\0\0\0\1ab", 2), (b"ab", 3)])
def test_an_inbox_that_ends_within_an_envelope_is_refused(inbox: bytes, rest: int) -> None:
    with refused(Fault.LENGTH):
        split_envelopes(inbox, rest)


def test_payloads_have_exact_lengths() -> None:
    assert split_ciphertexts(b"aabbcc", 3, 2) == [b"aa", b"bb", b"cc"]
    with refused(Fault.LENGTH):
        split_ciphertexts(b"aabbc", 3, 2)
    assert len(unpack_open(bytes(4 * 15), 5)) == 15
    with refused(Fault.LENGTH):
        unpack_open(bytes(4 * 14), 5)
    for verified in (False, True):
        length = 8 * (5 * 6 + verified * (35 * 4 + 256))
        answer = Unmasking.from_bytes(bytes(length), 4, 2, verified=verified)
        assert (answer.sigma_b.shape, answer.sigma_s.shape) == ((4, 5), (2, 5))
        assert answer.to_bytes() == bytes(length)
        with refused(Fault.LENGTH):
            Unmasking.from_bytes(bytes(length + 8), 4, 2, verified=verified)
    with refused(Fault.ELEMENT):
        Unmasking.from_bytes(b"\xff" * 8 * 30, 4, 2, verified=False)


# --- sketches


def test_a_sketch_is_linear_in_integers_and_the_same_in_any_blocks() -> None:
    rng = np.random.default_rng(0)
    v, w = (np.rint(rng.standard_normal(BLOCK + 1000) * 2**10) / 2**20 for _ in range(2))
    sums = [integer_sketch(b"s" * 32, blocks(x), 33).tolist() for x in (v, w, v + w)]
    assert [a + b for a, b in zip(sums[0], sums[1], strict=True)] == sums[2]
    assert integer_sketch(b"s" * 32, [v[:7], v[7:5000], v[5000:]], 33).tolist() == sums[0]
    assert integer_sketch(b"t" * 32, blocks(v), 33).tolist() != sums[0]


def test_a_second_sketch_keeps_lengths() -> None:
    v = np.random.default_rng(0).standard_normal(5000)
    v /= np.linalg.norm(v)
    squares = [float((second_sketch(bytes([i]) * 32, blocks(v)) ** 2).sum()) for i in range(10)]
    assert abs(np.mean(squares) - 1) < 4 * math.sqrt(2 / 256 / 10)
    assert max(squares) < 1.55


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**40])
def test_a_vector_that_is_not_finite_or_too_long_for_exact_sums_is_refused(bad: float) -> None:
    for place in (0, 9):
        v = np.zeros(10)
        v[place] = bad
        with refused(Fault.RANGE):
            integer_sketch(b"s" * 32, blocks(v), 4)
        with refused(Fault.RANGE):
            list(masked(blocks(v), 2**32, []))


def test_the_sums_of_a_sketch_are_exact_up_to_the_largest_vector() -> None:
    assert integer_sketch(b"s" * 32, [np.array([2.0**27])], 16).any()
    with refused(Fault.RANGE):
        integer_sketch(b"s" * 32, [np.array([2.0**27]), np.array([2.0**-24])], 16)


def test_a_vector_without_a_sketch_is_refused() -> None:
    with refused(Fault.ZERO):
        first_sketch(b"s" * 32, blocks(np.full(10, 1e-9)), 4)


def test_a_unit_vector_is_made_block_by_block() -> None:
    v = np.random.default_rng(0).standard_normal(BLOCK + 10).astype(np.float32)
    length = norm(blocks(v))
    assert length == pytest.approx(np.linalg.norm(v.astype(np.float64)), rel=1e-12)
    u = np.concatenate(list(unit(blocks(v), length)))
    assert u.dtype == np.float64
    assert norm(blocks(u)) == pytest.approx(1, rel=1e-12)


# --- OPEN


@pytest.fixture(scope="module")
def private() -> Session:
    return session(5, Mode.PRIVATE, 3000)


def test_openings_add_up_to_the_exact_products_and_the_noise(private: Session) -> None:
    for opening, W in ((1, private.ids), (2, private.ids[1:])):
        view = hashing.view_open(private.view1, opening, W)
        total = np.zeros(len(W) * (len(W) + 1) // 2, np.int64)
        for name in W:
            total += noise(private.secrets[name], view, private.k, len(W))
        q = np.stack([F_P.decode(private.sketches[name]) for name in W])
        total += (q @ q.T)[np.triu_indices(len(W))]
        G = private.gram(W, opening)
        assert np.ldexp(G[np.triu_indices(len(W))], 28).tolist() == total.tolist()
        assert (G == G.T).all()
        U = np.stack([private.updates[name] for name in W])
        error = math.sqrt((1 + 1 / 16) / private.k)  # of the sketch, and a quarter of it
        assert np.abs(G - U @ U.T).max() < 8 * error


def test_members_with_different_views_open_nothing(private: Session) -> None:
    """One of five is told another W, or another opening."""
    W = private.ids
    answers = {name: private.opening(name, W, 1) for name in W}
    honest = sum(answers.values(), start=np.zeros(15, np.uint64)) % np.uint64(F_P.modulus)
    for other in (private.opening(W[0], W, 2), private.opening(W[0], W[:-1], 1)):
        mixed = sum((answers[name] for name in W[1:]), start=np.zeros(15, np.uint64)) % np.uint64(F_P.modulus)
        changed = F_P.add(mixed[: len(other)], other)
        size = np.abs(F_P.decode(F_P.sub(changed, honest[: len(other)])))
        assert np.median(size) > 2**26  # with one view: the noise of one member, below 2^21


def test_noise_is_bounded_and_differs_between_pairs_attempts_and_members() -> None:
    for k in (1024, 1600, 3200):
        for W in (4, 5, 14, 20, 100):
            assert noise_bound(k, W) == math.floor(2**28 * math.sqrt(3 / (k * W)) / 4)
    draws = []
    for secret in (b"a" * 32, b"b" * 32):
        for opening in (1, 2):
            view = hashing.view_open(b"view1", opening, [str(i) for i in range(10, 60)])
            draws.append(noise(secret, view, 1600, 50))
    bound = noise_bound(1600, 50)
    for drawn in draws:
        assert drawn.shape == (1275,)
        assert np.abs(drawn).max() <= bound < 2**20
        assert drawn.max() > 0.99 * bound
        assert drawn.min() < -0.99 * bound
        assert abs(drawn.mean()) < 4 * bound / math.sqrt(3 * len(drawn))
        assert len(set(drawn.tolist())) > 1200  # pairs
    for one, other in combinations(draws, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.15
        assert (one != other).mean() > 0.99


# --- MASK and UNMASK


def even(words: NDArray[np.uint32]) -> float:
    """The probability that uniform words are as uneven as these in their highest four bits."""
    from scipy.stats import chi2

    counts = np.bincount(words >> np.uint32(28), minlength=16)
    expected = len(words) / 16
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), 15))


def exact_sum(played: Session, V: Sequence[str], a: dict[str, int]) -> list[int]:
    return [
        sum(round(float(played.updates[name][i]) * (a[name] / 2**32) * 2**28) for name in V)
        for i in range(len(next(iter(played.updates.values()))))
    ]


@pytest.mark.parametrize("mode", Mode)
def test_the_sum_is_the_exact_integer_sum_for_every_set_of_survivors(mode: Mode) -> None:
    played = session(7, mode, rows=4)
    names, n_min = played.ids, played.thresholds.n_min
    a = dict(zip(names, truncated([0.2, -0.1, 0.15, 0.0, 0.25, 1 / 7, 0.05]), strict=True))
    y = {name: played.masked(name, a) for name in names}
    for size in range(n_min, 8):
        for V in combinations(names, size):
            total = played.sum({name: y[name] for name in V}, a)
            assert total.view(np.int32).tolist() == exact_sum(played, V, a)
            assert (reals(total) == np.array(exact_sum(played, V, a)) / 2**28).all()


def test_a_smaller_list_than_that_of_ready_masks_as_well() -> None:
    played = session(7, Mode.PRIVATE, rows=4)
    W = played.ids[1:]
    a = dict.fromkeys(W, 2**32 // 6)
    total = played.sum({name: played.masked(name, a) for name in W[1:]}, a)
    assert total.view(np.int32).tolist() == exact_sum(played, W[1:], a)


def test_a_session_of_mode_sum_deals_no_sketch() -> None:
    assert {len(payload) for payload in session(5, Mode.SUM).dealt.values()} == {4 * (80 + 16)}


def test_a_masked_update_looks_uniform() -> None:
    played = session(5, Mode.PRIVATE, 20_000, rows=4)
    a = dict.fromkeys(played.ids, 2**32 // 5)
    y = [played.masked(name, a) for name in played.ids]
    assert all(even(words) > 1e-3 for words in y)
    assert even(np.ldexp(played.updates[played.ids[0]] / 5, 28).astype(np.int64).astype(np.uint32)) < 1e-9
    assert all(even(one - other) > 1e-3 for one, other in pairwise(y))


def test_masks_of_different_views_do_not_cancel() -> None:
    """One member is told other coefficients, other members, another session or other keys than the rest."""
    played = session(5, Mode.PRIVATE, 20_000, rows=4)
    names = played.ids
    a = dict.fromkeys(names, 2**32 // 5)
    y = {name: played.masked(name, a) for name in names}
    me = names[2]
    lies = {
        "coefficients": played.masked(me, a | {names[0]: a[names[0]] + 1}),
        "members": played.masked(me, {name: a[name] for name in names[:4]}),
        "session": replace(played, terms=b"another base model").masked(me, a),
        "keys": replace(played, secrets={**played.secrets, names[0]: b"?" * 32}).masked(me, a),
    }
    assert even(played.sum(y, a)) < 1e-9
    for lie in lies.values():
        assert even(played.sum(y | {me: lie}, a)) > 1e-3


def test_masks_are_added_and_subtracted_block_by_block() -> None:
    own = [MaskStream(b"a" * 32, 1), MaskStream(b"b" * 32, -1)]
    u = np.linspace(-1, 1, BLOCK + 100)
    words = np.concatenate(list(masked(blocks(u), 2**31, own)))
    plain = np.rint(u / 2 * 2**28).astype(np.int64)
    streams = Stream(b"a" * 32).words(len(u)).astype(np.int64) - Stream(b"b" * 32).words(len(u)).astype(np.int64)
    assert (words == (plain + streams) % 2**32).all()
    unmask(words, own)
    assert (words.view(np.int32) == plain).all()


# --- wrong shares of mask secrets


def shared_masks(n: int, t_mask: int, secrets: int) -> tuple[list[int], Elements, list[bytes]]:
    points = list(range(1, n + 1))
    sigma = Stream(b"s" * 32).elements(F_Q, 5 * secrets)
    shares = share(F_Q, sigma, t_mask - 1, points, Stream(b"c" * 32)).reshape(n, secrets, 5)
    return points, shares, [pack(F_Q, part) for part in sigma.reshape(secrets, 5)]


def is_one_of(secrets: list[bytes]) -> list[object]:
    return [lambda sigma, secret=secret: sigma == secret for secret in secrets]


@pytest.mark.parametrize(("m", "t", "t_mask", "corrected"), [(10, 3, 7, 1), (20, 6, 14, 3)])
def test_some_wrong_answers_to_unmask_are_corrected(m: int, t: int, t_mask: int, corrected: int) -> None:
    points, shares, secrets = shared_masks(m, t_mask, 8)
    for liars in range(corrected + 2):
        received = shares.copy()
        received[:liars] = F_Q.add(received[:liars], np.full_like(received[:liars], 7))
        received[:liars] = F_Q.mul(received[:liars], received[:liars])
        found = recover(points, received, is_one_of(secrets), t_mask=t_mask, t=t)  # type: ignore[arg-type]
        if liars > corrected:
            assert found is None
        else:
            assert found
            assert list(found.secrets) == secrets
            assert found.named == (frozenset([0]) if liars == 1 else frozenset())


def test_who_is_wrong_for_at_most_t_secrets_is_not_named() -> None:
    """As many bad dealers could have given an honest member such shares."""
    points, shares, secrets = shared_masks(10, 7, 8)
    for count in (3, 4):
        received = shares.copy()
        received[4, :count] = F_Q.add(received[4, :count], np.ones_like(received[4, :count]))
        found = recover(points, received, is_one_of(secrets), t_mask=7, t=3)  # type: ignore[arg-type]
        assert found
        assert list(found.secrets) == secrets
        assert (found.wrong, found.named) == ({4: count}, frozenset([4]) if count > 3 else frozenset())


def test_liars_that_bend_a_polynomial_where_it_is_not_checked_frame_nobody() -> None:
    """Five of twenty add a polynomial that is 0 at 0 and at twelve honest members: three others then look wrong."""
    points, shares, secrets = shared_masks(20, 14, 8)
    honest, liars, framed = points[:12], points[15:], {12, 13, 14}
    received = shares.copy()
    for x in liars:
        bend = x * math.prod(x - z for z in honest) % F_Q.modulus
        received[x - 1] = F_Q.add(received[x - 1], np.full_like(received[x - 1], bend))
    found = recover(points, received, is_one_of(secrets), t_mask=14, t=6)  # type: ignore[arg-type]
    assert found
    assert list(found.secrets) == secrets
    assert not found.named
    naive = recover(points, received, is_one_of(secrets), t_mask=14, t=4)  # type: ignore[arg-type]
    assert naive
    assert naive.named == framed, "with the limit for four liars, five would have named three honest members"


def test_unmask_shares_of_both_kinds_are_checked_against_commitments_and_keys() -> None:
    played = session(7, Mode.PRIVATE, rows=4)
    V, lost = played.ids[:6], played.ids[6:]
    replies = {name: played.unmasking(name, V, lost, None).to_bytes() for name in V}
    found = played.recovered(replies, V, lost)
    assert found
    expected = [played.keys[name].sigma_b for name in V] + [played.keys[name].sigma_s for name in lost]
    assert list(found.secrets) == expected
    wrong = unpack(F_Q, replies[V[0]], 35)
    wrong[30:] = F_Q.add(wrong[30:], np.ones(5, np.uint64))  # six answers, five needed: seen, not corrected
    assert played.recovered(replies | {V[0]: pack(F_Q, wrong)}, V, lost) is None
