"""What honest members refuse of a lying coordinator, stage by stage, and what they answer after they were killed."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from federation.secure.payloads import join_envelopes, split_envelopes
from federation.secure.thresholds import Mode
from federation.spec.run_sections import Scalar
from federation.trust.envelope import sign
from federation.v1.common_pb2 import ReplyManifest, SignedEnvelope
from federation.v1.secure_pb2 import SecureStatement
from federation.work.base import Work
from federation.work.secure.masking import Unmask
from federation.work.secure.ready import Ready
from federation.work.secure.terms import Invited, SessionStage
from federation.work.secure.wire import terms_bytes
from federation.work.site import SecurePolicy, SessionEntry
from tests.federation.work.scene import (
    ORIGIN,
    VICTIM,
    Cast,
    Inputs,
    Killed,
    Liar,
    Member,
    Question,
    cast,
    play,
    setting,
    tried,
)
from tests.few import few


def but(**fields: Any) -> Any:
    """The same question with other fields."""
    return lambda work, inputs: (replace(work, **fields), inputs)


def of(function: Any) -> Any:
    """The same question with other fields, made of the work."""
    return lambda work, inputs: (replace(work, **function(work)), inputs)


def alone(mine: int, others: int) -> tuple[int, ...]:
    """The victim's coefficient, and that of each of the other seven."""
    return (others, others, mine, *[others] * 5)


def without_third(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return items[:2] + items[3:]


def terms(**fields: Any) -> Any:
    """READY with other terms."""

    def changed(work: Ready, inputs: Inputs) -> Question:
        agreed = replace(work.agreed, **fields)
        return Ready(agreed=agreed, terms_bytes=terms_bytes(agreed)), inputs

    return changed


def test_terms_that_differ_from_the_assignment_the_roster_or_the_policy_are_declined() -> None:
    liar = Liar(Mode.PRIVATE)
    ids = liar.scene.members[VICTIM].members.key_ids()
    invited = tuple(Invited(name, ids[name]) for name in sorted(ids))
    stranger, copied = Invited("silo-99", bytes(32)), replace(invited[0], key_id=ids["silo-01"])
    liar.hears(
        secure_ready__0={
            "length": ("terms", terms(length=41)),
            "nonce": ("terms", terms(nonce=b"short")),
            "clip": ("terms", terms(clip=-1.0)),
            "unsorted": ("terms", terms(invited=invited[::-1])),
            "repeated": ("terms", terms(invited=(*invited, invited[-1]))),
            "without me": ("terms", terms(invited=tuple(one for one in invited if one.client_id != VICTIM))),
            "a stranger": ("roster", terms(invited=(*invited, stranger))),
            "another's key": ("roster", terms(invited=(copied, *invited[1:]))),
            "few": ("cohort", terms(invited=invited[:3])),
        }
    )


@few("policy:mode", "sessions")
@pytest.mark.parametrize(
    ("policy", "mode", "reason"),
    [
        (SecurePolicy(modes=(Mode.SUM,)), Mode.PRIVATE, "policy:mode"),
        (SecurePolicy(assumed=3), Mode.PRIVATE, "cohort"),
        (SecurePolicy(smallest=9), Mode.SUM, "cohort"),
        (SecurePolicy(sessions=0), Mode.SUM, "sessions"),
        (SecurePolicy(sessions_per_model=0), Mode.SUM, "model-sessions"),
    ],
)
def test_the_owner_decides(policy: SecurePolicy, mode: Mode, reason: str) -> None:
    scene = cast(8, assumed=1)
    scene.members[VICTIM].allow(policy)
    play(scene, mode)
    assert scene.declined == {(SessionStage.READY.value, VICTIM): reason}


def test_numbers_are_shown_only_where_the_owner_allows_it() -> None:
    scene = cast(8, assumed=1)
    for name, member in scene.members.items():
        member.losses, member.metrics = {"loss": 0.5, "secret": 1.0}, {"train/accuracy": 0.25, "train/loss": 0.5}
        shown: tuple[Scalar, ...] = ("loss",) if name != VICTIM else ()
        member.allow(SecurePolicy(assumed=1, disclose=shown))
    play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, disclose=("loss",)))
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "policy:disclose"}
    ready = scene.sent[SessionStage.READY.value, 0]
    assert {tuple(reply.losses) for reply in ready} == {("loss", "secret")}
    assert {tuple(reply.metrics) for reply in ready} == {("train/loss",)}
    assert all(
        reply.samples == 0 for (stage, _), replies in scene.sent.items() for reply in replies if "ready" not in stage
    )


def test_a_worker_without_a_roster_takes_no_part() -> None:
    scene = cast(8, assumed=1)
    scene.members[VICTIM].change_site(roster={})
    play(scene, Mode.SUM)
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "roster"}


def envelopes(change: Any) -> Any:
    """The same question with other replies of members."""

    def changed(work: Any, inputs: Inputs) -> Question:
        found, _ = split_envelopes(inputs["replies"])
        return work, {**inputs, "replies": join_envelopes(change(found))}

    return changed


def forged(scene: Cast, signer: str, envelope: bytes, **fields: Any) -> bytes:
    """A reply to READY with other fields, signed by a member's key."""
    manifest = ReplyManifest.FromString(SignedEnvelope.FromString(envelope).manifest)
    said = SecureStatement.FromString(manifest.statement)
    for name, value in fields.items():
        setattr(said if name in {"session", "keys", "stage"} else manifest, name, value)
    manifest.statement = said.SerializeToString()
    key = next(iter(scene.members.values())).members.keys[signer]
    return sign(manifest, key).SerializeToString()


def test_keys_that_a_coordinator_swaps_repeats_or_forges_are_declined() -> None:
    liar = Liar(Mode.SUM)
    scene = liar.scene

    def first(signer: str = "silo-00", **fields: Any) -> Any:
        """With other fields in the reply of silo-00; one that is a function is made of the keys of all."""

        def changed(found: list[bytes]) -> list[bytes]:
            made = {name: one(list(map(keys_of, found))) if callable(one) else one for name, one in fields.items()}
            return [forged(scene, signer, found[0], **made), *found[1:]]

        return envelopes(changed)

    def keys_of(envelope: bytes) -> bytes:
        manifest = ReplyManifest.FromString(SignedEnvelope.FromString(envelope).manifest)
        return SecureStatement.FromString(manifest.statement).keys

    zero = bytes(32)
    liar.hears(
        secure_deal__0={
            "without me": ("members", envelopes(lambda found: [*found[:2], *found[3:]])),
            "one missing": ("members", envelopes(lambda found: found[:-1])),
            "another key of mine": (
                "keys",
                envelopes(
                    lambda found: [
                        *(*found[:2], forged(scene, VICTIM, found[2], keys=keys_of(found[2])[::-1])), *found[3:]
                    ]
                ),
            ),
            "a repeated key": ("keys", first(keys=lambda keys: keys[1])),
            "a low-order key": ("keys", first(keys=lambda keys: zero + keys[0][32:])),
            "short keys": ("keys", first(keys=b"123")),
            "signed by another": ("envelope", first(signer="silo-01")),
            "another session": ("envelope", first(session=zero)),
            "another stage": ("envelope", first(stage="secure-confirm")),
            "another run": ("envelope", first(run_id="other")),
            "twice": ("envelope", envelopes(lambda found: [found[0], *found])),
            "no envelope": ("envelope", envelopes(lambda found: [b"nonsense", *found[1:]])),
        }
    )  # fmt: skip


def test_lists_coefficients_and_digests_that_a_coordinator_changes_are_declined() -> None:
    liar = Liar(Mode.VERIFIED)
    liar.hears(
        secure_open__0={
            "too few": ("members", of(lambda work: {"members": work.members[:3]})),
            "unsorted": ("members", of(lambda work: {"members": work.members[::-1]})),
            "without me": ("members", of(lambda work: {"members": tuple(n for n in work.members if n != VICTIM)})),
        },
        secure_open__1={
            "grown": ("members", of(lambda work: {"members": (*work.members, "silo-99")})),
            "too few": ("members", of(lambda work: {"members": work.members[:3]})),
            "opening 2 first": ("stage", but(opening=2)),
        },
        secure_mask__0={
            "other members": (
                "members", of(lambda work: {"members": work.members[:-1], "coefficients": work.coefficients[:-1]})
            ),
            "my share": ("cover", of(lambda work: {"coefficients": alone(2**31, 2**31 // 7)})),
            "me alone": ("cover", of(lambda work: {"coefficients": alone(2**32, 0)})),
            "me alone, at a tiny scale": ("coefficients", of(lambda work: {"coefficients": alone(2**11, 0)})),
            "more than 1": ("coefficients", of(lambda w: {"coefficients": tuple(2 * a for a in w.coefficients)})),
            "less than 1": ("coefficients", of(lambda w: {"coefficients": tuple(a // 2 for a in w.coefficients)})),
            "one fewer": ("", of(lambda work: {"coefficients": work.coefficients[:-1]})),
            "length": ("terms", but(length=41)),
        },
        secure_confirm__0={
            "too few": ("members", of(lambda work: {"members": work.members[:3], "masked": work.masked[:3]})),
            "without me": (
                "members", of(lambda w: {"members": without_third(w.members), "masked": without_third(w.masked)})
            ),
            "my digest": ("members", of(lambda work: {"masked": (*work.masked[:2], bytes(32), *work.masked[3:])})),
            "one digest fewer": ("members", of(lambda work: {"masked": work.masked[:-1]})),
            "no challenge": ("terms", but(tau1=b"", commitment=b"")),
        },
        secure_unmask__0={
            "another challenge": ("terms", but(tau2=bytes(32))),
            "fewer": ("members", of(lambda work: {"members": work.members[:-1], "lost": work.members[-1:]})),
            "lost": ("members", but(lost=("silo-07",))),
        },
    )  # fmt: skip


def test_confirmations_that_are_forged_replayed_or_too_few_unmask_nothing() -> None:
    liar = Liar(Mode.VERIFIED)

    def tampered(work: Any, inputs: Inputs) -> Question:
        encrypted = bytearray(inputs["ciphertexts"])
        encrypted[len(encrypted) // 7 + 5] ^= 1  # of the second of seven senders
        return work, {**inputs, "ciphertexts": bytes(encrypted)}

    def ready(found: list[bytes]) -> list[bytes]:
        return [liar.scene.sent[SessionStage.READY.value, 0][0].signed, *found[1:]]

    liar.hears(
        secure_unmask__0={
            "five of six": ("quorum", envelopes(lambda found: found[:5])),
            "one twice": ("envelope", envelopes(lambda found: [*found, found[0]])),
            "of READY": ("envelope", envelopes(ready)),
            "a broken signature": (
                "envelope", envelopes(lambda found: [found[0][:-1] + bytes([found[0][-1] ^ 1]), *found[1:]])
            ),
            "a bad share": ("bad-share:silo-01", tampered),
        }
    )  # fmt: skip


def test_a_stage_that_is_asked_again_gets_the_same_bytes_and_another_question_none() -> None:
    first: dict[str, tuple[Question, Any]] = {}

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if member.name == VICTIM:
            for question, _ in first.values():
                assert tried(member, question) in {"answers", "stage"}
            state = copy.deepcopy((member.memory.values, member.asked))
            result = member.do(work, inputs)
            repeated = member.do(work, inputs)
            assert repeated.statement == result.statement
            assert all(np.array_equal(repeated.rows[name], row) for name, row in result.rows.items())
            if len(first) == 1:
                assert tried(member, first["secure-ready/0"][0]) == "stage"
            member.memory.values, member.asked = state
            first[f"{stage}/{getattr(work, 'opening', 0)}"] = ((work, inputs), result)

    scene = cast(8, assumed=1, change=change)
    play(scene, Mode.VERIFIED)
    assert len(first) == 7
    member = scene.members[VICTIM]
    for name, (question, _) in first.items():
        expected = "answers" if name.startswith("secure-unmask") else "stage"
        assert tried(member, question) == expected, name
    mask, inputs = first["secure-unmask/0"][0]
    assert isinstance(mask, Unmask)
    assert tried(member, (replace(mask, tau2=bytes(32)), inputs)) == "answered"


def doubled(member: Member) -> None:
    """Its memory holds another update than the one with which it became ready."""
    (name,) = (name for name in member.memory.values if name.endswith("/vector"))
    member.memory.values[name] = (2 * member.vector).tobytes()


@pytest.mark.parametrize(
    ("edit", "again"), [(lambda member: member.memory.values.clear(), "session-over"), (doubled, "stage")]
)
def test_a_member_whose_memory_is_gone_or_holds_another_update_drops_out_of_its_session(
    edit: Callable[[Member], None], again: str
) -> None:
    asked: dict[str, Question] = {}

    def change(stage: str, member: Member, work: Work, inputs: Inputs) -> None:
        if member.name == VICTIM:
            asked[stage] = (work, inputs)
            if stage == SessionStage.MASK:
                edit(member)

    scene = cast(8, assumed=1, change=change)
    total = play(scene, Mode.PRIVATE)
    assert scene.declined == {(SessionStage.MASK.value, VICTIM): "session-over"}
    assert VICTIM not in total.record.survivors
    assert tried(scene.members[VICTIM], asked[SessionStage.READY]) == again


def test_sessions_from_one_model_are_counted_from_the_first_opening() -> None:
    scene = cast(8, assumed=1)
    victim = scene.members[VICTIM]
    victim.allow(SecurePolicy(assumed=1, sessions_per_model=2))
    ledger = victim.site.ledger
    scene.unasked = SessionStage.MASK
    for number in range(3):
        chosen = setting(scene, Mode.PRIVATE, nonce=bytes([number]) * 16)
        with pytest.raises(Exception, match="have sent their masked"):
            play(scene, Mode.PRIVATE, setting_=chosen)
        assert len(ledger.entries({ORIGIN.task})) == min(number + 1, 2)
    assert scene.declined == {(SessionStage.READY.value, VICTIM): "model-sessions"}
    ledger.add(SessionEntry("00", ORIGIN.run_id, ORIGIN.task, "another model", "train"))
    assert len(ledger.entries({ORIGIN.task})) == 3


@pytest.mark.parametrize(
    ("mode", "step"),
    [
        (Mode.VERIFIED, 4),
        pytest.param(Mode.SUM, 4, marks=pytest.mark.full),
        *(pytest.param(mode, 1, marks=pytest.mark.full) for mode in Mode),
    ],
)
def test_a_member_killed_at_any_write_gives_the_same_bytes_or_drops_out(mode: Mode, step: int) -> None:
    undisturbed = cast(8, assumed=1)
    play(undisturbed, mode)
    writes = undisturbed.members[VICTIM].memory.writes
    expected = {
        (stage, opening, reply.client_id): (reply.statement, [np.asarray(row).tobytes() for row in reply.rows])
        for (stage, opening), replies in undisturbed.sent.items()
        for reply in replies
    }
    assert writes > 8
    for place in range(0 if step == 1 else 2, writes, step):
        scene = cast(8, assumed=1)
        victim = scene.members[VICTIM]
        victim.memory.fails_at = place
        answer = victim.do

        def restarted(work: Work, inputs: Inputs, victim: Member = victim, answer: Any = answer, **more: Any) -> Any:
            try:
                return answer(work, inputs, **more)
            except Killed:
                victim.memory.fails_at = None
                return answer(work, inputs, **more)

        victim.do = restarted  # type: ignore[method-assign]
        total = play(scene, mode)
        if VICTIM in total.record.survivors:
            for (stage, opening), replies in scene.sent.items():
                for reply in replies:
                    same = (reply.statement, [np.asarray(row).tobytes() for row in reply.rows])
                    assert same == expected[stage, opening, reply.client_id], (place, stage)
        else:
            assert scene.declined
