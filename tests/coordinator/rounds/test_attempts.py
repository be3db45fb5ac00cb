"""Attempts at a round that an algorithm gives up, and steps that are combined already."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from federation.aggregation.base import Opened
from federation.aggregation.interface import Combination
from federation.aggregation.phase_kinds import TrainingPhase
from federation.aggregation.phases import RoundContext, RoundGenerator, Step, Voided, Waiting
from federation.vectors import RowFile, update_rows
from storage.models import AuditEntry
from storage.states import RoundState, RunState
from tests.compared_metrics import differences
from tests.coordinator.members.scene import leave
from tests.coordinator.rounds.scene import Averaging, at, fail, once, register
from tests.running import refused
from tests.stage import Player, Stage
from tests.verification.scene import verified

NAMES = ("ann", "ben", "cleo")


@dataclass(frozen=True, kw_only=True)
class SecondThoughts(Averaging):
    """The first attempts at each round are given up after their phase."""

    name: ClassVar[str] = "second-thoughts"
    given_up: int = 1

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        if context.attempt < self.given_up:
            raise Voided(f"{len(replies)} replies are not trusted", named={"cleo": "its sums differ"})
        return Step(replies, self.combine(replies.rows(context)))


class Hesitant(SecondThoughts):
    """Every attempt is given up but the last; the second one waits for an operator."""

    name: ClassVar[str] = "hesitant"

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        if context.attempt == 1:
            raise Waiting("an owner must agree")
        if context.attempt < 3:
            raise Voided("not yet")
        return Step(replies, self.combine(replies.rows(context)))


class Decoded(SecondThoughts):
    """The step is a vector that is combined already."""

    name: ClassVar[str] = "decoded"

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        total = np.sum([row.read() for row in replies.updates if isinstance(row, RowFile)], axis=0, dtype=np.float64)
        weights = np.full(len(replies), 1 / len(replies))
        vector = np.asarray(total / len(replies), dtype=np.float32)
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        answer = Combination(np.ones(1), weights, {}, {"direction_norm": norm, "stationary": 0.0})
        return Step(replies, answer, combined=vector)


class Careless(SecondThoughts):
    """It says that it has private rounds, and asks for updates in the clear."""

    name: ClassVar[str] = "careless"
    private: ClassVar[Opened] = "sum"


class Corrected(SecondThoughts):
    """The step names a member whose wrong answers were corrected."""

    name: ClassVar[str] = "corrected"

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        return Step(replies, self.combine(replies.rows(context)), named={"cleo": "wrong-shares"})


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, SecondThoughts, Hesitant, Decoded, Careless, Corrected)


def begin(
    stage: Stage, algorithm: str, more: str = "", rounds: int = 1, names: tuple[str, ...] = NAMES
) -> tuple[str, list[Player]]:
    return stage.begin(*names, algorithm=algorithm, rounds=rounds, more=f"selection.minimum = 3\n{more}")


def test_a_voided_attempt_is_followed_by_another_one_and_skips_no_round(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "limits.skipped_rounds = 1", rounds=2)
    stage.play(run, *players)
    for number in (0, 1):
        round_ = stage.rounds(run)[number]
        assert (round_.state, round_.attempt) == (RoundState.COMPLETED, 1)
        phases = [(phase.kind, phase.number, phase.attempt) for phase in stage.phases(run, number)]
        assert phases == [("train", 0, 0), ("train", 1, 1), ("evaluate", 2, 1)]
        step = stage.step(run, number)
        assert sorted(step.replies) == sorted(u.envelope_digest for u in stage.replies(run, number, 1).values())
        assert [(void.attempt, void.named) for void in round_.voided] == [(0, {"cleo": "its sums differ"})]
    details = [f"run {run} round {number} attempt 0: its sums differ" for number in (0, 1)]
    assert [entry.detail for entry in stage.served.entries(action="member.named", subject="cleo")] == details


def test_a_member_whose_answers_were_corrected_is_named_in_a_round_that_makes_its_step(stage: Stage) -> None:
    run, players = begin(stage, "corrected")
    stage.play(run, *players)
    (round_,) = stage.rounds(run)
    assert (round_.state, round_.attempt, round_.voided) == (RoundState.COMPLETED, 0, ())
    assert round_.named == {"cleo": "wrong-shares"}
    (named,) = stage.served.entries(AuditEntry.detail.contains(run), action="member.named")
    assert named.detail == f"run {run} round 0 attempt 0: wrong-shares"


def test_a_restart_after_the_last_voided_attempt_skips_the_round_and_voids_nothing_twice(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "algorithm.given_up = 9\nlimits.attempts = 2")
    with at(f"run-{run}", "UPDATE rounds SET state", once(fail)) as seen:  # a conductor begins anew
        stage.play(run, *players, until=lambda: stage.rounds(run) and stage.rounds(run)[0].state is RoundState.SKIPPED)
    assert len(seen) == 2
    skipped = stage.rounds(run)[0]
    assert skipped.reason == "voided: 2 attempts; the last one: 3 replies are not trusted"
    assert [void.attempt for void in skipped.voided] == [0, 1]
    details = [f"run {run} round 0 attempt {attempt}: its sums differ" for attempt in (0, 1)]
    named = stage.served.entries(AuditEntry.detail.contains(run), action="member.named")
    assert [entry.detail for entry in named] == details


def test_after_a_pause_of_a_round_its_attempts_are_counted_anew(stage: Stage) -> None:
    run, players = begin(stage, "hesitant", "limits.attempts = 2")
    stage.play(run, *players, until=lambda: stage.run(run).state is RunState.PAUSED)
    assert stage.run(run).reason == "an owner must agree"
    stage.resume(run, *players)
    (round_,) = stage.rounds(run)
    assert (round_.state, round_.attempt) == (RoundState.COMPLETED, 3)
    assert [void.paused for void in round_.voided] == [False, True, False]


def test_a_restart_goes_on_with_the_attempt_that_was_under_way(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts")
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    before = stage.assignment_ids(run, 0, 1)
    stage.restart()
    stage.play(run, *players)
    assert stage.assignment_ids(run, 0, 1) == before
    assert len(stage.phases(run)) == 3


def test_a_restart_goes_on_with_the_round_that_was_under_way(stage: Stage) -> None:
    run, players = begin(stage, "fedavg", rounds=2)
    stage.play(run, *players, until=lambda: stage.assignments(run, 1))
    stage.restart()
    stage.play(run, *players)
    assert [(one.number, one.state) for one in stage.rounds(run)] == [(n, RoundState.COMPLETED) for n in (0, 1)]


def test_a_reply_counts_in_its_own_attempt_alone(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "selection.quorum = 0.5")
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    ann, ben, cleo = players
    order = ann.order()
    assert order.attempt == 1
    with refused("INVALID_ARGUMENT", "mismatch:attempt"):
        ann.submit(order, attempt=0)
    ann.reply(order)
    ben.answer()
    cleo.decline(cleo.order(), "busy")
    for player, loss in ((ann, 0.0), (ben, 0.0), (cleo, 9.0)):
        player.reply(player.order(), metrics={"train/loss": loss})
    assert stage.wait_round(run, 0).metrics["improved"] == 1.0  # of ann and ben, who took part in the second attempt


@pytest.mark.parametrize("ends", ["revoked", "leaves"])
def test_a_member_that_is_revoked_or_leaves_after_a_voided_attempt_does_not_stop_the_next_one(
    stage: Stage, tmp_path: Path, ends: str
) -> None:
    run, players = begin(stage, "second-thoughts", "selection.quorum = 0.5", names=("ben", "cleo", f"dan-{ends}"))
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    stage.revoke(f"dan-{ends}") if ends == "revoked" else leave(players[2])
    stage.play(run, *players[:2])
    assert sorted(stage.replies(run, 0, 1)) == ["ben", "cleo"]
    stage.wait_state(run, RunState.COMPLETED)
    assert len(verified(stage, run, tmp_path)) == 1
    assert differences(stage, run) == []  # the code of the rule is the operator's own


def test_a_step_may_be_a_vector_that_is_combined_already(stage: Stage) -> None:
    run, players = begin(stage, "decoded")
    stage.play(run, *players)
    round_, step = stage.rounds(run)[0], stage.step(run)
    assert (step.combined, list(step.coefficients)) == (round_.combined, [1.0])
    direction = update_rows(stage.blobs.local(step.combined))["combined"].read()
    moved = stage.parameters(round_.base_model) - direction
    np.testing.assert_array_equal(stage.parameters(round_.result_model), moved)
    for update in stage.replies(run, 0).values():
        assert [update.weight, update.norm, update.coefficient] == [pytest.approx(1 / 3), None, None]


def test_a_run_with_private_rounds_asks_for_no_update_in_the_clear(stage: Stage) -> None:
    run, players = begin(stage, "careless", 'privacy.secure = "sum"', names=(*NAMES, "dora", "emil"))
    stage.play(run, *players, until=lambda: stage.rounds(run) and stage.rounds(run)[0].state is RoundState.SKIPPED)
    (skipped,) = stage.rounds(run)
    assert skipped.reason == "privacy.secure: the algorithm asks for train, which shows updates in the clear"
    assert not stage.phases(run)
