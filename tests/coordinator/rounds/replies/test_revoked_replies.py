"""A member that is revoked after its reply was accepted, and before the step, has no part in the step."""

from typing import Any

import pytest

from coordinator.members.membership import revoke
from coordinator.rounds import conductor
from coordinator.rounds.step import make_step
from federation.digests import digest
from federation.v1 import admin_pb2 as admin
from storage.states import RoundState, RunState
from tests.few import few
from tests.running import SECONDS, wait_for
from tests.stage import MODEL, Player, Stage, answer

LEFT_OUT = ("FULFILLED", "client-revoked")


def begin(stage: Stage, more: str = "selection.minimum = 3", algorithm: str = "fedavg") -> tuple[str, list[Player]]:
    """Ann, ben, and one who is about to be revoked, with a run of one round."""
    return stage.begin("ann", "ben", f"gone-{stage.count}", algorithm=algorithm, more=more)


@few(True)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_member_that_is_revoked_after_its_update_was_accepted_does_not_enter_the_step(
    stage: Stage, restarts: bool
) -> None:
    run, (ann, ben, gone) = begin(stage)
    answer(ann, gone)
    stage.revoke(gone.name)
    gone.leave()
    if restarts:
        stage.players.pop(gone.name)  # who is revoked cannot come back
        stage.restart()
    stage.play(run, ann, ben)
    assert stage.outcomes(run)[gone.name] == LEFT_OUT
    updates = stage.replies(run)
    step = stage.step(run)
    assert list(step.replies) == [updates[name].envelope_digest for name in ("ann", "ben")]
    assert list(step.revoked) == [gone.name]
    assert [updates[name].weight for name in ("ann", "ben", gone.name)] == [0.5, 0.5, None]
    # Its receipt stands, and operators see why it has no weight.
    shown = stage._admin.GetRound(admin.GetRoundRequest(run=run, round=0), timeout=SECONDS).participations
    (part,) = [part for part in shown if part.client_id == gone.name]
    assert part.reason == "client-revoked: its reply was accepted, and does not count"
    assert "improved" in stage.rounds(run)[0].metrics


def test_no_round_waits_for_a_member_whose_revocation_was_cut_short_by_the_coordinators_death(stage: Stage) -> None:
    run, (ann, ben, gone) = begin(stage, 'selection = { minimum = 3, pool = "enrolled" }')
    answer(ann, ben)
    gone.leave()
    stage.players.pop(gone.name)
    with stage.served.database.begin() as session:  # recorded; what it was asked for is not cancelled yet
        revoke(session, gone.name, "left", by="test", now=stage.clock())
    stage.restart()
    wait_for(lambda: stage.outcomes(run)[gone.name] == ("CANCELLED", "client-revoked"), "the assignment to be void")
    stage.play(run, ann, ben)


def test_a_quorum_counts_members_only(stage: Stage) -> None:
    run, (ann, ben, gone) = begin(stage, "selection = { minimum = 3, quorum = 1.0 }")
    order = ann.order()
    answer(ben, gone)
    stage.revoke(gone.name)
    ann.reply(order)
    assert stage.wait_round(run, 0).reason == "quorum: 2 of 3 members replied, 3 are needed"
    assert stage.run(run).model == digest(MODEL)


def test_a_member_that_is_revoked_while_the_step_is_made_is_taken_out_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def and_revoke(*arguments: Any, **values: Any) -> object:
        stepped = make_step(*arguments, **values)
        if not made:
            stage.revoke(gone.name)
        made.append(stepped.model)
        return stepped

    monkeypatch.setattr(conductor, "make_step", and_revoke)
    run, (ann, ben, gone) = begin(stage)
    answer(ann, ben, gone)
    stage.play(run, ann, ben)
    first, second = made
    assert stage.run(run).model == second != first
    assert list(stage.step(run).revoked) == [gone.name]
    assert stage.outcomes(run)[gone.name] == LEFT_OUT


def test_a_round_whose_training_was_asked_for_by_a_revoked_members_gradients_is_skipped(stage: Stage) -> None:
    run, players = begin(stage, 'selection.minimum = 3\nalgorithm.sketch = "exact"\nalgorithm.budget = 1.0', "fedcmoo")
    ann, ben, gone = players
    answer(*players)
    orders = {player: player.order() for player in players}  # of training: the weights are in them
    assert [phase.kind for phase in stage.phases(run)] == ["jacobian", "train"]
    stage.revoke(gone.name)
    ann.reply(orders[ann])
    ben.reply(orders[ben])
    skipped = stage.wait_round(run, 0, RoundState.SKIPPED)
    assert skipped.reason == (f"client-revoked: {gone.name}: revoked after the next phase was asked for by its reply")
    assert stage.run(run).model == digest(MODEL)
    stage.wait_state(run, RunState.FAILED)
