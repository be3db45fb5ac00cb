"""Rounds with a private evaluation end with means over their members, or say why there are none."""

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.rounds import finish
from coordinator.rounds.fleets.base import Question, RevokedMeanwhile, Skipped
from federation.aggregation.phases import Voided, Waiting
from federation.digests import digest
from federation.record.bundle import BlobAbsent, BundleReader
from fedpareto import simulate
from fedpareto.simulation.fleet import Answer, SimulatedDecline, SimulatedFleet
from tests.coordinator.rounds.runs.scene import PRIVATE
from tests.few import few
from tests.verification import record_vectors
from verification.private import private_means
from verification.run import OpenedRun


def test_a_private_evaluation_gives_means_over_the_members() -> None:
    (row,) = simulate(PRIVATE, threads=1, progress=lambda _: None).rounds.to_dict("records")
    assert (row["state"], row["reason"], row["evaluated"]) == ("COMPLETED", "", 5.0)
    assert 0 <= row["accuracy/mean"] <= 1
    assert row["bytes/up"] > 0


@few("quorum: 1 of 4", "a member of the round was revoked")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Skipped("quorum: 1 of 4"), "quorum: 1 of 4"),
        (Voided("a share is wrong"), "a share is wrong"),
        (Waiting("an owner must agree"), "an owner must agree"),
        (RevokedMeanwhile(), "a member of the round was revoked"),
    ],
)
def test_a_round_whose_private_evaluation_fails_keeps_its_step_and_says_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(finish, "hold_evaluation", fail)
    (row,) = simulate(PRIVATE, threads=1, progress=lambda _: None).rounds.to_dict("records")
    assert (row["state"], row["reason"]) == ("COMPLETED", f"evaluation: {why}")
    assert row["step/rate"] == 1.0
    assert "evaluated" not in row


def test_a_member_that_declines_a_private_evaluation_has_replied_to_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = SimulatedFleet._answers

    def without_one(self: SimulatedFleet, question: Question, clients: list[str]) -> dict[str, Answer]:
        evaluates = question.current.state == "STEPPED" and "client-000" in clients
        declining = {"client-000": SimulatedDecline("policy", "not now")} if evaluates else {}
        return answers(self, question, [name for name in clients if name not in declining]) | declining

    monkeypatch.setattr(SimulatedFleet, "_answers", without_one)
    history = simulate(PRIVATE.replace("clients = 5", "clients = 6"), threads=1, progress=lambda _: None)
    assert history.round_records[0]["evaluated"] == 5
    told = [(record["asked"], record["replied"], record["declined"]) for record in history.member_records]
    assert told == [(1, 1, 0)] * 6
    weights = [record["weight"] for record in history.reply_records if record["accepted"]]
    assert weights == pytest.approx([1 / 6] * 6)


def test_of_a_model_that_steps_have_kept_the_earlier_numbers_stand() -> None:
    kept = PRIVATE.replace("rounds = 1", "rounds = 9").replace("simulation", "server.learning_rate = 1e-30\nsimulation")
    stop = 'stop = { metric = "loss", split = "test", patience = 2 }\nevaluate.every = 1\n'
    rows = simulate(kept + stop, threads=1, progress=lambda _: None).rounds.to_dict("records")
    why = "evaluation: the model is that of round 0; its numbers stand"
    assert [row["reason"] for row in rows] == ["", why, why], "a run without better numbers stops all the same"
    assert [row["evaluated"] == 5 for row in rows] == [True, False, False]
    assert rows[2]["stop/value"] == rows[0]["loss/test"]


def test_the_means_over_the_members_cannot_be_verified_without_the_model_that_was_evaluated() -> None:
    removed, signed = digest(b"removed"), SimpleNamespace(evaluations={})  # a round without replies
    with BundleReader(record_vectors.DIRECTORY / "open.fedpareto") as bundle:
        facts: Any = OpenedRun.of(bundle).facts
        with pytest.raises(BlobAbsent, match=removed):
            private_means(facts, signed, 0, removed)  # type: ignore[arg-type] # a round without replies
