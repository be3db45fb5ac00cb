"""Members that are lost while a model is measured, or data are described, in the open: they are asked once more."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from federation.digests import digest
from federation.spec.run_spec import with_models
from federation.v1.admin_pb2 import GetRoundRequest, ListRoundsRequest, MeasuredModel
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import to_bytes
from storage.states import PhaseState, RoundState, RunState
from tests.described import begin as begin_described
from tests.described import drawn, tell
from tests.harness import wait_for
from tests.running import refused
from tests.stage import LAYOUT, Player, Stage, measurements
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.scene import verified

GRACE = timedelta(seconds=60)
MODEL = to_bytes(LAYOUT, np.full(LAYOUT.size, 0.5, np.float32))
SELECTION = "selection.grace_seconds = 60\n"
NAMES = ("ann", "ben", "cleo")


def begin(stage: Stage, more: str = SELECTION) -> tuple[str, list[Player]]:
    """A run that measures one model at three members."""
    task, players = stage.crew(*NAMES)
    text = f'name = "{task}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["test"]\n'
    text += f"evaluate.deadline_seconds = 900\n{more}"
    document = with_models(text.encode(), [digest(MODEL)])
    header = MeasuredModel(digest=digest(MODEL), size=len(MODEL))
    return stage.submit(document, model=MODEL, models=[header], further=[]), players


def lose_cleo(stage: Stage, run: str, players: Sequence[Player]) -> list[AssignmentManifest]:
    """All are asked; one dies with its order, and the others reply. Its grace passes, and it is asked once more."""
    orders = [player.order() for player in players]
    stage.hang_up(players[2])
    for player, order in zip(players[:2], orders[:2], strict=True):
        player.reply(order)
    after_grace(stage)
    wait_for(lambda: len(stage.phases(run)) == 2, "the second question")
    return orders


def after_grace(stage: Stage) -> None:
    stage.clock.ahead += 2 * GRACE
    stage.nudge()


def restart(stage: Stage, *players: Player) -> None:
    """The coordinator starts anew, and only these come back."""
    stage.stop()
    stage.start()
    for player in players:
        player.attend(**player.tasks)


def check_counted(stage: Stage, run: str, names: Sequence[str], phases: int, path: Path) -> None:
    """The model was measured once by each of these members, and the record verifies."""
    stage.wait_state(run, RunState.COMPLETED)
    (row,) = stage.rounds(run)
    assert (row.state, row.metrics["evaluated"], len(stage.phases(run))) == (RoundState.COMPLETED, len(names), phases)
    of = {name: order for phase in range(phases) for name, order in stage.orders(run, 0, phase).items()}
    means = [measurements(name, of[name])["test/accuracy"] for name in names]
    assert row.metrics["accuracy/mean"] == pytest.approx(float(np.mean(means)))
    (told,) = verified(stage, run, path)
    assert told.words.startswith(f"{len(names)} members measured")
    assert verify_independently(path / "run.fedpareto").missing == []


def test_a_member_that_is_lost_before_its_reply_is_asked_once_more_and_counts_once(
    stage: Stage, tmp_path: Path
) -> None:
    run, (ann, ben, cleo) = begin(stage)
    orders = lose_cleo(stage, run, (ann, ben, cleo))
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")
    cleo.attend(**cleo.tasks)
    second = cleo.order()
    assert (second.phase, second.members, second.base_model) == (1, 1, digest(MODEL))
    with refused("FAILED_PRECONDITION", "assignment-closed"):  # what was in its spool
        cleo.reply(orders[2])
    cleo.reply(second)
    check_counted(stage, run, NAMES, 2, tmp_path)
    (summary,) = stage._admin.ListRounds(ListRoundsRequest(run=run)).rounds
    assert (summary.asked, summary.accepted, summary.missing) == (3, 3, 0)
    parts = stage._admin.GetRound(GetRoundRequest(run=run, round=0)).participations
    assert [(part.client_id, part.reason) for part in parts] == [(name, "") for name in NAMES]


def test_a_member_that_is_lost_after_its_reply_is_not_asked_again(stage: Stage, tmp_path: Path) -> None:
    run, (ann, ben, cleo) = begin(stage)
    orders = [player.order() for player in (ann, ben, cleo)]
    cleo.reply(orders[2])  # and the answer is lost
    stage.hang_up(cleo)
    after_grace(stage)
    ann.reply(orders[0])
    ben.reply(orders[1])
    check_counted(stage, run, NAMES, 1, tmp_path)


def test_a_member_that_does_not_come_back_is_asked_once_more_and_no_third_time(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage)
    lose_cleo(stage, run, players)
    after_grace(stage)
    check_counted(stage, run, ("ann", "ben"), 2, tmp_path)
    ends = {(row.state.value, row.reason) for phase in (0, 1) for name, row in stage.assignments(run, 0, phase).items()}
    assert ("EXPIRED", "absent") in ends
    (summary,) = stage._admin.ListRounds(ListRoundsRequest(run=run)).rounds
    assert (summary.asked, summary.accepted, summary.missing) == (3, 2, 1)


@pytest.mark.full
def test_a_member_that_declines_or_is_too_slow_is_not_asked_again(stage: Stage, tmp_path: Path) -> None:
    run, (ann, ben, cleo) = begin(stage, SELECTION + "selection.quorum = 0.3\n")
    orders = [player.order() for player in (ann, ben, cleo)]
    ann.reply(orders[0])
    ben.decline(orders[1], "busy")
    stage.pass_deadline()  # cleo attends
    check_counted(stage, run, ("ann",), 1, tmp_path)
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "deadline")


@pytest.mark.full
@pytest.mark.parametrize("asked", [False, True], ids=["before-the-second-question", "after-it"])
def test_a_restart_of_the_coordinator_changes_nothing(stage: Stage, tmp_path: Path, asked: bool) -> None:
    run, (ann, ben, cleo) = begin(stage)
    orders = [player.order() for player in (ann, ben, cleo)]
    stage.hang_up(cleo)
    if asked:
        ann.reply(orders[0])
        ben.reply(orders[1])
        after_grace(stage)
        wait_for(lambda: len(stage.phases(run)) == 2, "the second question")
        restart(stage, ann, ben)
    else:
        ann.reply(orders[0])
        restart(stage, ann, ben)
        ben.reply(orders[1])
        stage.clock.ahead += 2 * GRACE  # from the start of the coordinator on
        stage.nudge()
        wait_for(lambda: len(stage.phases(run)) == 2, "the second question")
    assert [phase.state for phase in stage.phases(run)] == [PhaseState.CLOSED, PhaseState.OPEN]
    cleo.attend(**cleo.tasks)
    cleo.reply(cleo.order())
    check_counted(stage, run, NAMES, 2, tmp_path)


@pytest.mark.full
def test_a_member_that_is_revoked_meanwhile_is_not_asked_and_what_it_is_asked_ends(
    stage: Stage, tmp_path: Path
) -> None:
    task, players = stage.crew("ann", "ben", "gus")  # a member that no other test needs
    run, players = begin_with(stage, task, players)
    lose_cleo(stage, run, players)
    stage.revoke("gus")
    check_counted(stage, run, ("ann", "ben"), 2, tmp_path)
    assert stage.outcomes(run, phase=1)["gus"] == ("CANCELLED", "client-revoked")


@pytest.mark.full
def test_a_member_that_is_revoked_before_it_is_asked_once_more_is_not(stage: Stage, tmp_path: Path) -> None:
    task, players = stage.crew("ann", "ben", "hal")
    run, (ann, ben, hal) = begin_with(stage, task, players)
    orders = [player.order() for player in players]
    stage.hang_up(hal)
    ann.reply(orders[0])
    stage.revoke("hal")
    ben.reply(orders[1])
    check_counted(stage, run, ("ann", "ben"), 1, tmp_path)


def begin_with(stage: Stage, task: str, players: list[Player]) -> tuple[str, list[Player]]:
    text = f'name = "{task}"\ntask = "{task}"\nkind = "evaluate"\nevaluate.splits = ["test"]\n{SELECTION}'
    header = MeasuredModel(digest=digest(MODEL), size=len(MODEL))
    document = with_models(text.encode(), [digest(MODEL)])
    return stage.submit(document, model=MODEL, models=[header], further=[]), players


@pytest.mark.full
def test_a_run_that_is_paused_goes_on_with_the_same_second_question(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage)
    lose_cleo(stage, run, players)
    stage.pause(run)
    stage.wait_state(run, RunState.PAUSED)
    (before,) = stage.assignments(run, 0, 1).values()
    cleo = players[2]
    cleo.attend(**cleo.tasks)
    after_grace(stage)
    stage.resume(run)
    cleo.reply(cleo.order())
    check_counted(stage, run, NAMES, 2, tmp_path)
    (after,) = stage.assignments(run, 0, 1).values()
    assert before.assignment_id == after.assignment_id


@pytest.mark.full
def test_of_an_enrolled_pool_a_lost_member_that_does_not_attend_is_not_asked_once_more(
    stage: Stage, tmp_path: Path
) -> None:
    """The round would wait for it until the deadline once more."""
    run, (ann, ben, cleo) = begin(stage, SELECTION + 'selection.pool = "enrolled"\n')
    orders = [player.order() for player in (ann, ben, cleo)]
    stage.hang_up(cleo)
    ann.reply(orders[0])
    stage.clock.ahead += 2 * GRACE
    ben.reply(orders[1])
    check_counted(stage, run, ("ann", "ben"), 1, tmp_path)
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")


def test_statistics_of_a_member_that_is_lost_are_asked_for_once_more_and_count_once(
    stage: Stage, tmp_path: Path
) -> None:
    run, (ann, ben, cleo) = begin_described(stage, *NAMES, more=SELECTION)
    cleo.order()
    stage.hang_up(cleo)
    for number, player in enumerate((ann, ben)):
        assert tell(player, drawn(number)).accepted
    after_grace(stage)
    wait_for(lambda: len(stage.phases(run)) == 2, "the second question")
    cleo.attend(**cleo.tasks)
    assert tell(cleo, drawn(2)).accepted
    stage.wait_state(run, RunState.COMPLETED)
    (told,) = verified(stage, run, tmp_path)
    assert told.words.startswith("3 members described their data")
    assert verify_independently(tmp_path / "run.fedpareto").missing == []
    (summary,) = stage._admin.ListRounds(ListRoundsRequest(run=run)).rounds
    assert (summary.asked, summary.accepted, summary.missing) == (3, 3, 0)
