"""Attempts at a round that an algorithm gives up, and steps that are combined already."""

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import grpc
import numpy as np
import pytest
from sqlalchemy import select

from coordinator.aggregation import registry
from coordinator.aggregation.base import Algorithm, Opened
from coordinator.aggregation.diagnostics import describe
from coordinator.aggregation.interface import Combination, Rows
from coordinator.aggregation.phase_kinds import TrainingPhase
from coordinator.aggregation.phases import RoundContext, RoundGenerator, Step, Voided, Waiting
from federation.line.channels import refusal_from_rpc_error
from federation.record.bundle import BundleReader
from federation.v1.common_pb2 import SignedEnvelope, StepManifest
from federation.vectors import read_vector, update_rows
from storage.models import AuditEntry
from storage.states import RoundState, RunState
from tests.stage import Player, Stage, spec
from tests.verification.test_bundle import exported
from verification.run import verify

NAMES = ("ann", "ben", "cleo")


@dataclass(frozen=True, kw_only=True)
class SecondThoughts(Algorithm):
    """The first attempts at each round are given up after their phase."""

    name: ClassVar[str] = "second-thoughts"
    given_up: int = 1

    def combine(self, rows: Rows) -> Combination:
        """The plain average."""
        return Combination(rows.prior, rows.prior, {}, describe(rows.gram, rows.prior, rows.prior))

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        if context.attempt < self.given_up:
            raise Voided(f"{len(replies)} replies are not trusted", named={"cleo": "its sums differ"})
        return Step(replies, self.combine(replies.rows(context)))


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Decoded(SecondThoughts):
    """The step is a vector that is combined already."""

    name: ClassVar[str] = "decoded"

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        total = np.sum([row.read() for row in replies.updates], axis=0, dtype=np.float64)
        weights = np.full(len(replies), 1 / len(replies))
        vector = np.asarray(total / len(replies), dtype=np.float32)
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        answer = Combination(np.ones(1), weights, {}, {"direction_norm": norm, "stationary": 0.0})
        return Step(replies, answer, combined=vector)


@dataclass(frozen=True, kw_only=True)
class Careless(SecondThoughts):
    """It says that it has private rounds, and asks for updates in the clear."""

    name: ClassVar[str] = "careless"
    private: ClassVar[Opened] = "sum"


@dataclass(frozen=True, kw_only=True)
class Corrected(SecondThoughts):
    """The step names a member whose wrong answers were corrected."""

    name: ClassVar[str] = "corrected"

    def round(self, context: RoundContext) -> RoundGenerator:
        replies = yield TrainingPhase()
        return Step(replies, self.combine(replies.rows(context)), named={"cleo": "wrong-shares"})


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        **registry.ALGORITHMS,
        **{toy.name: toy for toy in (SecondThoughts, Hesitant, Decoded, Careless, Corrected)},
    }
    monkeypatch.setattr(registry, "ALGORITHMS", MappingProxyType(known))


def begin(
    stage: Stage, algorithm: str, more: str = "", rounds: int = 1, names: tuple[str, ...] = NAMES
) -> tuple[str, list[Player]]:
    task = stage.task()
    players = stage.cast(task, *names)
    text = spec(f"{algorithm}-{stage.count}", task, rounds, algorithm=algorithm, more=f"selection.minimum = 3\n{more}")
    return stage.submit(text), players


def test_a_voided_attempt_is_followed_by_another_one_and_skips_no_round(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "limits.skipped_rounds = 1", rounds=2)
    stage.play(run, *players)
    for number in (0, 1):
        round_ = stage.rounds(run)[number]
        assert (round_.state, round_.attempt) == (RoundState.COMPLETED, 1)
        phases = [(phase.kind, phase.number, phase.attempt) for phase in stage.phases(run, number)]
        assert phases == [("train", 0, 0), ("train", 1, 1), ("evaluate", 2, 1)]
        assert round_.step is not None
        step = StepManifest.FromString(SignedEnvelope.FromString(round_.step).manifest)
        assert sorted(step.replies) == sorted(u.envelope_digest for u in stage.replies(run, number, 1).values())
        assert [(void.attempt, void.named) for void in round_.voided] == [(0, {"cleo": "its sums differ"})]
    named = select(AuditEntry.detail).where(AuditEntry.action == "member.named", AuditEntry.subject == "cleo")
    named = named.order_by(AuditEntry.entry_id)
    details = [f"run {run} round {number} attempt 0: its sums differ" for number in (0, 1)]
    assert stage.look(lambda session: list(session.scalars(named))) == details


def test_a_member_whose_answers_were_corrected_is_named_in_a_round_that_makes_its_step(stage: Stage) -> None:
    run, players = begin(stage, "corrected")
    stage.play(run, *players)
    (round_,) = stage.rounds(run)
    assert (round_.state, round_.attempt, round_.voided) == (RoundState.COMPLETED, 0, ())
    assert round_.named == {"cleo": "wrong-shares"}
    named = select(AuditEntry.detail).where(AuditEntry.action == "member.named", AuditEntry.detail.contains(run))
    assert stage.look(lambda session: list(session.scalars(named))) == [f"run {run} round 0 attempt 0: wrong-shares"]


def test_the_last_voided_attempt_skips_the_round_and_says_why(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "algorithm.given_up = 9\nlimits.attempts = 2")
    stage.play(run, *players, until=lambda: stage.rounds(run) and stage.rounds(run)[0].state is RoundState.SKIPPED)
    skipped = stage.rounds(run)[0]
    assert skipped.reason == "voided: 2 attempts; the last one: 3 replies are not trusted"
    assert [phase.attempt for phase in stage.phases(run)] == [0, 1]
    assert skipped.attempt == 1


def test_after_a_pause_of_a_round_its_attempts_are_counted_anew(stage: Stage) -> None:
    run, players = begin(stage, "hesitant", "limits.attempts = 2")
    stage.play(run, *players, until=lambda: stage.run(run).state is RunState.PAUSED)
    assert stage.run(run).reason == "an owner must agree"
    stage.resume(run)
    stage.play(run, *players)
    (round_,) = stage.rounds(run)
    assert (round_.state, round_.attempt) == (RoundState.COMPLETED, 3)
    assert [void.paused for void in round_.voided] == [False, True, False]


def test_a_restart_goes_on_with_the_attempt_that_was_under_way(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts")
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    before = {assignment.assignment_id for assignment in stage.assignments(run, 0, 1).values()}
    stage.restart()
    stage.play(run, *players)
    assert {assignment.assignment_id for assignment in stage.assignments(run, 0, 1).values()} == before
    assert len(stage.phases(run)) == 3


def test_a_restart_goes_on_with_the_round_that_was_under_way(stage: Stage) -> None:
    run, players = begin(stage, "fedavg", rounds=2)
    stage.play(run, *players, until=lambda: stage.assignments(run, 1))
    stage.restart()
    stage.play(run, *players)
    assert [(round_.number, round_.state) for round_ in stage.rounds(run)] == [
        (0, RoundState.COMPLETED),
        (1, RoundState.COMPLETED),
    ]


def test_a_reply_counts_in_its_own_attempt_alone(stage: Stage) -> None:
    run, players = begin(stage, "second-thoughts", "selection.quorum = 0.5")
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    ann, ben, cleo = players
    order = ann.order()
    assert order.attempt == 1
    with pytest.raises(grpc.RpcError) as refused:
        ann.submit(order, attempt=0)
    assert refusal_from_rpc_error(refused.value).reason == "mismatch:attempt"
    ann.reply(order)
    ben.reply(ben.order())
    cleo.decline(cleo.order(), "busy")
    for player, loss in ((ann, 0.0), (ben, 0.0), (cleo, 9.0)):
        player.reply(player.order(), metrics={"train/loss": loss})
    assert stage.wait_round(run, 0).metrics["improved"] == 1.0  # of ann and ben, who took part in the second attempt


def test_a_member_that_is_revoked_after_a_voided_attempt_does_not_stop_the_next_one(
    stage: Stage, tmp_path: Path
) -> None:
    run, players = begin(stage, "second-thoughts", "selection.quorum = 0.5", names=("ben", "cleo", "dan"))
    stage.play(run, *players, until=lambda: stage.assignments(run, 0, 1), phases=1)
    stage.revoke("dan")
    stage.play(run, *players[:2])
    assert sorted(stage.replies(run, 0, 1)) == ["ben", "cleo"]
    stage.wait_state(run, RunState.COMPLETED)
    with BundleReader(exported(stage, run, tmp_path / "run.fedpareto")) as bundle:
        assert [one.missing for one in verify(bundle)] == [()]


def test_a_step_may_be_a_vector_that_is_combined_already(stage: Stage) -> None:
    run, players = begin(stage, "decoded")
    stage.play(run, *players)
    round_ = stage.rounds(run)[0]
    assert round_.step is not None
    assert round_.result_model is not None
    assert round_.combined is not None
    step = StepManifest.FromString(SignedEnvelope.FromString(round_.step).manifest)
    assert (step.combined, list(step.coefficients)) == (round_.combined, [1.0])
    direction = update_rows(stage.blobs.local(step.combined))["combined"].read()
    base = read_vector(stage.blobs.local(round_.base_model))[1]
    np.testing.assert_array_equal(read_vector(stage.blobs.local(round_.result_model))[1], base - direction)
    for update in stage.replies(run, 0).values():
        assert (update.weight, update.norm, update.coefficient) == (pytest.approx(1 / 3), None, None)


def test_a_run_with_private_rounds_asks_for_no_update_in_the_clear(stage: Stage) -> None:
    run, players = begin(stage, "careless", 'privacy.secure = "sum"')
    stage.play(run, *players, until=lambda: stage.rounds(run) and stage.rounds(run)[0].state is RoundState.SKIPPED)
    (skipped,) = stage.rounds(run)
    assert skipped.reason == "privacy.secure: the algorithm asks for train, which shows updates in the clear"
    assert not stage.phases(run)
