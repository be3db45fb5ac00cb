"""A computation that fails in a private session is answered like any other, and counted."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation.interface import TooFewUpdatesError
from federation.digests import digest
from federation.secure import hashing
from federation.secure.evaluation import clip
from federation.secure.random_direction import random_direction
from federation.secure.thresholds import EVALUATION_NOISE, Mode
from federation.work.base import Result, Work, WorkError
from federation.work.evaluate.work import Evaluate
from federation.work.secure.ready import Ready
from federation.work.secure.terms import SessionStage
from federation.work.site import FAILURES, FailedSession, MemoryLedger, SecurePolicy, SessionEntry, SessionLedger
from tests.federation.secure.reference import failed_direction
from tests.federation.work.scene import (
    FREE,
    ORIGIN,
    VICTIM,
    Cast,
    Inputs,
    Kept,
    Killed,
    Member,
    cast,
    names,
    play,
    round_of,
    setting,
    tried,
)
from tests.few import few_of
from worker.ledgers.round_ledger import RoundLedger

FAILURE = "TrainingDiverged: the loss is not finite at step 1"
READY = SessionStage.READY.value


def failing(scene: Cast) -> Member:
    """The victim, whose computations fail from now on."""
    member = scene.members[VICTIM]
    member.failure = FAILURE
    member.allow(SecurePolicy(assumed=1, blur=0.0))
    return member


def question(
    scene: Cast, mode: Mode = Mode.SUM, algorithm: str = FREE, *, nonce: bytes = b"0" * 16, **terms: Any
) -> tuple[Ready, Inputs]:
    """READY as the coordinator asks for it."""
    chosen = setting(scene, mode, algorithm, nonce=nonce, **terms)
    for member in scene.members.values():
        member.origin = scene.origin
    return Ready(agreed=chosen.agreed, terms_bytes=chosen.terms_bytes), {"specification": chosen.specification}


# --- the reply


UNUSABLE = [np.nan, np.inf, 0.0]


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("value", UNUSABLE)
def test_the_reply_is_the_same_whatever_went_wrong(value: float, clip: float) -> None:
    scene = cast(8, assumed=1)
    work, inputs = question(scene, Mode.PRIVATE, "fedavg" if clip else FREE, clip=clip)
    member = scene.members[VICTIM]
    good = member.do(work, inputs)
    member.asked, member.memory = {}, Kept()
    member.vector = np.full_like(member.vector, value)
    bad = member.do(work, inputs)
    member.asked, member.memory, member.failure = {}, Kept(), FAILURE
    assert [item.name for item in fields(Result)] == [
        *("rows", "losses", "metrics", "samples", "seconds", "statement", "privacy", "personal", "residual", "failure")
    ]
    for reply in (bad, member.do(work, inputs)):
        assert reply.failure
        assert vars(replace(reply, failure="")) == vars(good)
    assert good.seconds == 0, "its time would tell how far a computation went"


def test_nothing_of_a_failed_training_is_kept() -> None:
    scene = cast(5, assumed=1)
    work, inputs = question(scene)
    member = failing(scene)
    values = np.ones(3, np.float32)
    client_answer = Ready.answer
    kept: list[Result] = []

    def with_state(self: Ready, client: Any, computed: Result) -> Result:
        kept.append(client_answer(self, client, replace(computed, personal=values, residual=values, failure="")))
        return kept[-1]

    member.failure = ""
    member.vector = np.zeros_like(member.vector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ready, "answer", with_state)
        member.do(work, inputs)
    (result,) = kept
    assert result.failure.startswith("WorkError: every element of the vector is zero")
    assert (result.personal, result.residual, dict(result.rows)) == (None, None, {})


# --- whole sessions


@pytest.mark.parametrize("mode", few_of(list(Mode), Mode.VERIFIED))
def test_without_a_clip_the_sum_has_a_random_direction_of_its_own(mode: Mode) -> None:
    scene = cast(8, assumed=1)
    member = failing(scene)
    total = play(scene, mode, setting_=setting(scene, mode, blur=0.0))
    assert not scene.declined
    assert not total.record.alarms
    assert total.record.survivors == tuple(scene.members)
    secret = member.members.derive("secret", f"{VICTIM}\0{total.record.session.hex()}")
    direction = random_direction(secret, total.record.session, len(member.vector))
    vectors = [direction if name == VICTIM else other.vector for name, other in scene.members.items()]
    expected = np.mean([vector / np.linalg.norm(vector) for vector in vectors], axis=0)
    assert total.vector(1.0) == pytest.approx(expected, abs=1e-6)
    assert abs(member.vector @ direction) < 0.6 * np.linalg.norm(member.vector) * np.linalg.norm(direction)


@pytest.mark.parametrize("mode", few_of(list(Mode), Mode.VERIFIED))
def test_with_a_clip_a_failed_member_adds_nothing_and_its_sketch_is_one_of_length_1(mode: Mode) -> None:
    scene = cast(8, assumed=1)
    failing(scene)
    step = round_of(scene, mode, "fedavg", clip=1.0, blur=0.0)
    assert not scene.declined
    assert step.sessions[0].survivors == tuple(scene.members)
    others = [unit for name, unit in zip(scene.members, scene.units, strict=True) if name != VICTIM]
    assert step.combined == pytest.approx(np.sum(others, axis=0) / 8, abs=1e-6)


def test_gradients_that_fail_are_answered_too() -> None:
    scene = cast(6, assumed=1)
    for member in scene.members.values():
        member.gradients = {"loss": member.vector}
    failing(scene)
    values = {"bound": "none", "sketch": "exact", "scope": "all", "weights": "exact"}
    step = round_of(scene, Mode.SUM, "fedcmoo", values=values, clip=1.0)
    assert not scene.declined
    assert [session.survivors for session in step.sessions] == [tuple(scene.members)] * 2


def test_a_random_direction_is_that_of_the_protocol() -> None:
    words = failed_direction(b"s" * 32, b"1" * 32)
    expected = [np.float32(word * (math.sqrt(3) / 2**32)) for word in words]
    assert random_direction(b"s" * 32, b"1" * 32, 4).tolist() == expected


def test_a_random_direction_is_that_of_the_session_alone() -> None:
    first = random_direction(b"s" * 32, b"1" * 32, 70_000)
    assert first.dtype == np.float32
    assert (first == random_direction(b"s" * 32, b"1" * 32, 70_000)).all()
    assert (first[:10] == random_direction(b"s" * 32, b"1" * 32, 10)).all()
    assert abs(first @ random_direction(b"s" * 32, b"2" * 32, 70_000)) / 70_000 < 0.02
    assert (first.mean(), first.var()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))


# --- failures in a row


@pytest.fixture(params=["worker", "simulation"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> SessionLedger:
    return RoundLedger(tmp_path / "private-rounds.db") if request.param == "worker" else MemoryLedger()


def asked(scene: Cast, number: int, **terms: Any) -> str:
    """The reason for which the victim declines READY of a session; "answers" if it does not."""
    return tried(scene.members[VICTIM], question(scene, nonce=bytes([number]) * 16, **terms))


def test_after_three_failures_in_a_row_a_member_declines_until_its_owner_has_looked(ledger: SessionLedger) -> None:
    scene = cast(5, assumed=1)
    member = failing(scene)
    member.change_site(ledger=ledger)
    assert [asked(scene, number) for number in range(5)] == ["answers"] * FAILURES + ["failing"] * 2
    assert asked(scene, FAILURES - 1) == "answers", "the same session is asked again, as after a crash"
    assert len(ledger.failures({ORIGIN.task})) == FAILURES
    member.failure = ""
    assert asked(scene, 5) == "failing", "though it would succeed: the data are not read"
    ledger.succeed({ORIGIN.task})
    assert asked(scene, 5) == "answers"


def test_a_success_ends_the_row_and_the_same_session_counts_once(ledger: SessionLedger) -> None:
    scene = cast(5, assumed=1)
    member = failing(scene)
    member.change_site(ledger=ledger)
    for number in (0, 0, 1, 1):
        assert asked(scene, number) == "answers"
    assert len(ledger.failures({ORIGIN.task})) == 2
    member.failure = ""
    assert asked(scene, 2) == "answers"
    assert not ledger.failures({ORIGIN.task})


def test_a_site_whose_training_always_fails_is_found_although_its_evaluations_succeed(ledger: SessionLedger) -> None:
    scene = cast(5, assumed=1)
    member = failing(scene)
    member.change_site(ledger=ledger)
    member.metrics = {"test/loss": 1.0, "test/accuracy": 0.5}
    evaluation = {"work": Evaluate(splits=("test",)), "length": 2, "clip": clip(2, EVALUATION_NOISE)}
    answers = []
    for number in range(4):
        member.failure = FAILURE
        answers.append(asked(scene, number))
        member.failure = ""
        ledger.add(SessionEntry(f"{number}", ORIGIN.run_id, ORIGIN.task, digest(b"%d" % number), "train"))
        answers.append(asked(scene, number, **evaluation))
    assert answers == ["answers"] * 5 + ["failing"] * 3


def test_tasks_of_one_data_set_fail_together_and_others_do_not(ledger: SessionLedger) -> None:
    scene = cast(5, assumed=1)
    together = frozenset({ORIGIN.task, "digits-by-site"})
    scene.members[VICTIM].allow(SecurePolicy(assumed=1))
    scene.members[VICTIM].change_site(ledger=ledger, data_sets=dict.fromkeys(together, together))
    for number, task in enumerate(("digits-by-site", ORIGIN.task, "mnist", "digits-by-site")):
        ledger.fail(FailedSession(str(number), "run", 0, task, "train", FAILURE))
    assert asked(scene, 0) == "failing"
    ledger.succeed(together)
    assert [failed.task for failed in ledger.failures({*together, "mnist"})] == ["mnist"]
    assert asked(scene, 0) == "answers"


def test_a_failure_is_counted_before_the_reply_and_once_if_the_member_dies_between_the_two(tmp_path: Path) -> None:
    scene = cast(5, assumed=1)
    member = failing(scene)
    work, inputs = question(scene)
    path = tmp_path / "private-rounds.db"

    def restarted() -> RoundLedger:
        ledger = RoundLedger(path)
        member.change_site(ledger=ledger)
        return ledger

    ledger = restarted()
    member.memory.fails_at = 1  # after the secret, the vector is kept
    with pytest.raises(Killed):
        member.do(work, inputs)
    ledger.close()
    ledger, member.memory.fails_at = restarted(), None
    counted = [FailedSession(hashing.session(work.terms_bytes).hex(), ORIGIN.run_id, 0, ORIGIN.task, "train", FAILURE)]
    assert ledger.failures({ORIGIN.task}) == counted
    assert member.do(work, inputs).statement.keys
    assert ledger.failures({ORIGIN.task}) == counted
    ledger.close()


def test_enough_failing_members_skip_a_round_and_the_coordinator_reads_the_reason() -> None:
    scene = cast(5, assumed=1)
    for member in scene.members.values():
        for number in range(FAILURES):
            member.site.ledger.fail(FailedSession(str(number), "run", 0, ORIGIN.task, "train", FAILURE))
        member.allow(SecurePolicy(assumed=1))
    with pytest.raises(TooFewUpdatesError, match="0 are ready"):
        play(scene, Mode.SUM)
    assert scene.declined == {(READY, name): "failing" for name in names(range(5))}


# --- disclosed numbers


def test_where_numbers_are_disclosed_a_failure_is_declined_without_a_text_and_counts() -> None:
    scene = cast(5, assumed=1)
    member = failing(scene)
    member.allow(SecurePolicy(assumed=1, disclose=("loss",)))
    work, inputs = question(scene, disclose=("loss",))
    with pytest.raises(WorkError, match="could not be computed") as caught:
        member.do(work, inputs)
    assert caught.value.reason == "training-failed"
    assert FAILURE not in str(caught.value)
    assert [entry.session for entry in member.site.counted(ORIGIN.task)] == [hashing.session(work.terms_bytes).hex()]
    assert [failed.error for failed in member.site.ledger.failures({ORIGIN.task})] == [FAILURE]


def test_every_stage_of_a_session_conceals() -> None:
    from federation.work.registry import kind
    from tests.worker.work.scene import STAGES

    assert all(kind(name).work.conceals for name in STAGES)
    assert not Work.conceals
