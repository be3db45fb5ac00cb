"""Cheating members: what each mode notices, and who is named. Each cheat is one of the table of the protocol."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.phases import Voided
from federation.digests import digest, parse
from federation.secure.derivation import dense_key
from federation.secure.encryption import TAG
from federation.secure.fields import F_P, F_Q
from federation.secure.sketch import _table
from federation.secure.streams import Stream
from federation.secure.thresholds import Mode, Thresholds
from federation.secure.wire import pack, unpack
from federation.vectors import Array, payload_bytes
from federation.work.base import Result, RowSchema, Work, payload_layout
from federation.work.secure.masking import Mask
from federation.work.secure.terms import SessionStage
from tests.federation.work.scene import Cast, Inputs, Member, Question, cast, exact, names, play
from tests.few import few, few_of

CHEAT = "silo-03"
M = 9  # t = 2 in mode `verified`, and 4 t + 1 answers: cheaters can be named


def scaled(factor: float, *stages: SessionStage) -> Callable[..., Result]:
    """A member whose vector is longer by a factor, from the end of the first phase to the end of the second."""

    def lie(stage: str, member: Member, work: Work, result: Result) -> Result:
        if member.name == CHEAT and getattr(work, "opening", 0) == 0:
            for place, change in zip(stages, (1 / factor, factor), strict=False):
                if stage == place.value:
                    (name,) = [name for name in member.memory.values if name.endswith("/divisor")]
                    (length,) = np.frombuffer(member.memory.values[name], np.float64)
                    member.memory.values[name] = np.float64(length * change).tobytes()
        return result

    return lie


def rows(stage: SessionStage, change: Callable[[Array], Array], *who: str, opening: int = 0) -> Callable[..., Result]:
    """Members that change the payload of a stage."""

    def lie(at: str, member: Member, work: Work, result: Result) -> Result:
        if at == stage.value and member.name in (who or (CHEAT,)) and getattr(work, "opening", 0) == opening:
            return replace(result, rows={name: change(row.copy()) for name, row in result.rows.items()})
        return result

    return lie


def shifted(amount: float) -> Callable[[Array], Array]:
    """Adds a number to the first entry of the Gram matrix off its diagonal."""

    def change(row: Array) -> Array:
        elements = unpack(F_P, row.tobytes(), len(row) // 4)
        elements[1] = F_P.add(elements[1:2], F_P.encode(np.array([int(amount * 2**28)])))[0]
        return np.frombuffer(pack(F_P, elements), np.uint8)

    return change


def outcome(scene: Cast, mode: Mode) -> tuple[str, Mapping[str, str]]:
    """ "passes", or "void" with the members that are named."""
    try:
        total = play(scene, mode)
    except Voided as voided:
        return ("void" if voided.blind == (not voided.named) else "inconsistent"), voided.named
    return "passes", total.named


@pytest.mark.parametrize(
    ("factor", "mode", "expected"),
    [
        (1.5, Mode.PRIVATE, "passes"),  # a cheater of weight a may enter a little more: the protocol says so
        (30, Mode.PRIVATE, "void"),
        pytest.param(30, Mode.SUM, "void", marks=pytest.mark.full),
        (2, Mode.VERIFIED, "void"),
        pytest.param(5, Mode.VERIFIED, "void", marks=pytest.mark.full),
    ],
)
def test_a_member_that_scales_its_masked_vector_alone(factor: float, mode: Mode, expected: str) -> None:
    scene = cast(M, assumed=2, lie=scaled(factor, SessionStage.OPEN, SessionStage.MASK))
    assert outcome(scene, mode) == (expected, {})


@pytest.mark.parametrize("factor", few_of([1.5, 3, 20], 1.5))
def test_a_member_that_scales_consistently_is_named(factor: float) -> None:
    scene = cast(M, assumed=2, lie=scaled(factor, SessionStage.READY))
    assert outcome(scene, Mode.VERIFIED) == ("void", {CHEAT: "share-norm"})


@pytest.mark.parametrize(
    ("m", "liars"), [(M, [CHEAT]), pytest.param(20, names(range(4)), marks=pytest.mark.full)], ids=["1 of 9", "4 of 20"]
)
def test_answerers_that_lie_about_the_norms_are_corrected_and_named(m: int, liars: list[str]) -> None:
    def lower(row: Array) -> Array:
        elements = unpack(F_Q, row.tobytes(), len(row) // 8)
        lied = slice(5 * m, 6 * m)
        elements[lied] = F_Q.sub(elements[lied], F_Q.encode(np.full(m, 2**31)))
        return np.frombuffer(pack(F_Q, elements), np.uint8)

    scene = cast(m, assumed=2, lie=rows(SessionStage.UNMASK, lower, *liars))
    assert outcome(scene, Mode.VERIFIED) == ("passes", dict.fromkeys(liars, "wrong-answers"))


@few(M)
@pytest.mark.parametrize(("secrets", "named"), [(1, {}), (M, {CHEAT: "wrong-shares"})])
def test_wrong_shares_of_masks_are_corrected_and_void_nothing(secrets: int, named: Mapping[str, str]) -> None:
    def wrong(row: Array) -> Array:
        row[: 40 * secrets : 8] ^= 1
        return row

    scene = cast(M, assumed=2, lie=rows(SessionStage.UNMASK, wrong))
    total = play(scene, Mode.PRIVATE)
    assert np.array_equal(total.words, exact(scene, total))
    assert total.record.alarms == (f"{CHEAT}: wrong shares of {secrets} mask secrets",)
    assert total.named == named


@pytest.mark.parametrize("mode", few_of(Mode, Mode.SUM))
def test_too_many_wrong_shares_void_the_session_and_name_nobody(mode: Mode) -> None:
    def wrong(row: Array) -> Array:
        row[::7] ^= 1
        return row

    scene = cast(M, assumed=2, lie=rows(SessionStage.UNMASK, wrong, *names(range(5))))
    assert outcome(scene, mode) == ("void", {})


def test_entries_of_the_gram_matrix_can_be_shifted_a_little() -> None:
    for amount, expected in ((0.1, "passes"), (3.0, "void")):
        lie = rows(SessionStage.OPEN, shifted(amount), opening=1)
        assert outcome(cast(M, assumed=2, lie=lie), Mode.PRIVATE)[0] == expected


def accusing(who: Mapping[str, tuple[str, ...]]) -> Callable[..., Result]:
    """Members that accuse others of bad ciphertexts."""

    def lie(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage == SessionStage.OPEN.value and getattr(work, "opening", 0) == 0 and member.name in who:
            return replace(result, statement=replace(result.statement, complaints=who[member.name]))
        return result

    return lie


@pytest.mark.parametrize("mode", few_of([Mode.SUM, Mode.PRIVATE], Mode.PRIVATE))
def test_a_member_that_accuses_five_leaves_alone_and_two_take_one_each(mode: Mode) -> None:
    scene = cast(10, assumed=2, lie=accusing({"silo-00": tuple(names(range(1, 6)))}))
    assert play(scene, mode).record.members == tuple(names(range(1, 10)))
    scene = cast(10, assumed=2, lie=accusing({"silo-00": ("silo-01",)}))
    assert play(scene, mode).record.members == tuple(names(range(2, 10)))


@pytest.mark.parametrize("mode", few_of([Mode.SUM, Mode.PRIVATE], Mode.SUM))
def test_a_bad_ciphertext_costs_its_sender_and_its_receiver(mode: Mode) -> None:
    def bad(row: Array) -> Array:
        row[TAG] ^= 1  # of the ciphertext for the first other member
        return row

    scene = cast(10, assumed=2, lie=rows(SessionStage.DEAL, bad))
    total = play(scene, mode)
    assert total.record.members == tuple(name for name in names(range(10)) if name not in {CHEAT, "silo-00"})
    assert np.array_equal(total.words, exact(scene, total))


def test_a_key_that_another_member_has_shown_makes_the_later_one_a_dropout() -> None:
    shown: dict[str, bytes] = {}

    def copied(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage == SessionStage.READY.value:
            shown[member.name] = result.statement.keys
            if member.name == CHEAT:
                keys = shown["silo-00"][:32] + result.statement.keys[32:]
                return replace(result, statement=replace(result.statement, keys=keys))
        return result

    scene = cast(8, assumed=1, lie=copied)
    total = play(scene, Mode.SUM)
    assert CHEAT not in total.record.ready
    assert any(alarm.startswith(f"{CHEAT}: repeated-key") for alarm in total.record.alarms)


@pytest.mark.parametrize(
    "field", [{"keys": bytes(64)}, {"session": bytes(32)}, {"stage": SessionStage.MASK}, {"view": bytes(32)}]
)
def test_a_statement_that_does_not_fit_is_refused(field: Mapping[str, object]) -> None:
    def wrong(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage == SessionStage.READY.value and member.name == CHEAT:
            return replace(result, statement=replace(result.statement, **field))
        return result

    scene = cast(8, assumed=1, lie=wrong)
    total = play(scene, Mode.SUM)
    assert scene.declined == {(SessionStage.READY.value, CHEAT): "statement"}
    assert CHEAT not in total.record.ready


def test_members_that_were_told_different_coefficients_make_masks_that_do_not_cancel() -> None:
    half = set(names(range(4)))

    def split(stage: str, member: Member, work: Work, inputs: Inputs) -> Question:
        if isinstance(work, Mask) and member.name in half:
            return replace(work, coefficients=tuple(a - 1 for a in work.coefficients)), inputs
        return work, inputs

    with pytest.raises(TooFewUpdatesError, match="4 of 8 members have sent their masked vectors"):
        play(cast(8, assumed=1, change=split), Mode.PRIVATE)


def test_a_member_that_signs_other_lists_before_the_second_sketch_is_named() -> None:
    def other(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage == SessionStage.CONFIRM.value and member.name == CHEAT:
            return replace(result, statement=replace(result.statement, view=bytes(32)))
        return result

    assert outcome(cast(M, assumed=2, lie=other), Mode.VERIFIED) == ("void", {CHEAT: "other-view"})
    total = play(cast(M, assumed=2, lie=other), Mode.PRIVATE)
    assert total.record.alarms == (f"{CHEAT}: it signed another view at secure-confirm",)


TWENTY = 20  # members of the protocol's table of cheats
WIDE = 1100  # more coordinates than S has rows, so that the sketch of some vectors is 0


def unseen(session: bytes, d: int) -> Array:
    """A vector of length 1 whose sketch S is 0 but for rounding: a member can compute it before it sends its own."""
    count = Thresholds(TWENTY, Mode.PRIVATE).k
    bits = np.frombuffer(Stream(dense_key(session)).read(count * 4 * 4096 // 8), np.uint8)
    signs = (1 - 2 * np.unpackbits(bits).astype(np.int8)).reshape(count, -1)
    columns = []
    for place in range(count + 1):
        table = _table(session, [np.eye(1, count + 1, place)[0]])
        (buckets,) = np.nonzero(table)
        columns.append(signs[:, buckets] @ np.sign(table[buckets]))
    S = np.stack(columns, axis=1)
    found = np.append(np.linalg.solve(S[:, :count], -S[:, count]), 1.0)
    assert np.abs(S @ found).max() < 1e-6 * np.abs(found).max()
    return np.append(found / np.linalg.norm(found), np.zeros(d - count - 1))


def adding(length: float) -> Callable[..., Result]:
    """A member that adds a vector to its masked one that the sketch S does not see."""

    def sent(row: Array) -> bytes:
        layout = payload_layout((RowSchema("masked", len(row), "U32"),))
        return parse(digest(b"".join(payload_bytes(layout, {"masked": row}))))[1].encode()

    def lie(stage: str, member: Member, work: Work, result: Result) -> Result:
        if stage != SessionStage.MASK.value or member.name != CHEAT:
            return result
        honest = result.rows["masked"]
        added = unseen(work.session, len(honest)) * length / TWENTY * 2.0**28  # type: ignore[attr-defined]
        row = honest + np.rint(added).astype(np.int64).astype(np.uint32)
        for name, value in member.memory.values.items():  # it confirms what it sent
            member.memory.values[name] = value.replace(sent(honest), sent(row))
        return replace(result, rows={"masked": row})

    return lie


@pytest.mark.parametrize("mode", few_of([Mode.PRIVATE, Mode.VERIFIED], Mode.VERIFIED))
@pytest.mark.parametrize(
    ("lie", "passes"),
    [
        pytest.param(scaled(2, SessionStage.OPEN, SessionStage.MASK), True, id="own update times 2"),
        pytest.param(scaled(3, SessionStage.OPEN, SessionStage.MASK), True, id="times 3", marks=pytest.mark.full),
        pytest.param(scaled(8, SessionStage.OPEN, SessionStage.MASK), False, id="times 8", marks=pytest.mark.full),
        # A longer one is taken for a failed computation by the code of the member itself.
        pytest.param(scaled(100, SessionStage.OPEN, SessionStage.MASK), False, id="times 100", marks=pytest.mark.full),
        pytest.param(adding(10), False, id="a vector of length 10 that S does not see", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_one_cheater_of_twenty(lie: Callable[..., Result], passes: bool, mode: Mode) -> None:
    """The rows of the protocol's table about one member's own vector; `private` lets a small factor pass."""
    scene = cast(TWENTY, WIDE, lie=lie)
    expected = "passes" if passes and mode is Mode.PRIVATE else "void"
    assert outcome(scene, mode) == (expected, {})
