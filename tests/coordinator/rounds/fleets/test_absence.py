"""Members that take their assignment and hang up: a phase waits for them for a while, and not to its deadline."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.lost_members import times_of
from federation.spec.run_spec import RunSpec
from federation.v1.common_pb2 import AssignmentManifest
from storage.database import Database
from storage.models import Phase, Round
from storage.states import RoundState
from tests.few import few
from tests.running import refused
from tests.stage import Player, Stage, spec

GRACE = timedelta(seconds=60)  # as in `begin`; the deadlines are 900 seconds


def begin(stage: Stage, pool: str = "attending") -> tuple[str, list[Player], list[AssignmentManifest]]:
    more = f'selection.minimum = 3\nselection.pool = "{pool}"\nselection.grace_seconds = 60'
    run, players = stage.begin("ann", "ben", "cleo", algorithm="fedavg", more=more)
    return run, players, [player.order() for player in players]


def after(stage: Stage, time: timedelta) -> None:
    stage.clock.ahead += time
    stage.nudge()


@few("attending")
@pytest.mark.parametrize("pool", ["attending", "enrolled"])
def test_a_member_that_hangs_up_is_waited_for_during_the_grace_and_not_to_the_deadline(stage: Stage, pool: str) -> None:
    run, (ann, ben, cleo), orders = begin(stage, pool)
    stage.hang_up(cleo)
    ann.reply(orders[0])
    after(stage, 2 * GRACE)
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")  # ben still works, so nothing is lost by waiting
    ben.reply(orders[1])
    stage.wait_outcome(run, "cleo", "EXPIRED")
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")
    with refused("FAILED_PRECONDITION", "assignment-closed"):
        cleo.reply(orders[2])
    if pool == "enrolled":  # it is asked to evaluate, though it does not attend
        cleo.attend(**cleo.tasks)
    stage.play(run, ann, ben, cleo)
    assert stage.rounds(run)[0].state is RoundState.COMPLETED


def test_a_member_that_is_back_within_the_grace_replies_and_counts(stage: Stage) -> None:
    run, (ann, ben, cleo), orders = begin(stage)
    stage.hang_up(cleo)
    ann.reply(orders[0])
    ben.reply(orders[1])
    after(stage, GRACE / 2)
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    cleo.attend(**cleo.tasks)
    after(stage, 2 * GRACE)  # it attends, so the grace is nothing to it
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    cleo.reply(orders[2])
    stage.play(run, ann, ben, cleo)
    assert set(stage.replies(run)) == {"ann", "ben", "cleo"}


def test_a_member_that_does_not_come_back_after_a_restart_of_the_coordinator_is_given_the_grace_too(
    stage: Stage,
) -> None:
    run, (ann, ben, cleo), orders = begin(stage)
    ann.reply(orders[0])
    ben.reply(orders[1])
    cleo.leave()
    stage.stop()
    stage.start()
    for player in (ann, ben):
        player.attend(**player.tasks)
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    after(stage, 2 * GRACE)
    stage.wait_outcome(run, "cleo", "EXPIRED")
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")
    stage.play(run, ann, ben)


def test_who_is_not_connected_at_the_deadline_was_absent_and_who_is_was_too_slow(stage: Stage) -> None:
    task, (ann, ben, cleo) = stage.crew("ann", "ben", "cleo")
    stage.hang_up(cleo)
    run = stage.submit(
        spec("enrolled", task, algorithm="fedavg", more='selection = { pool = "enrolled", quorum = 0.1 }')
    )
    ann.answer()
    ben.order()
    stage.pass_deadline()
    stage.wait_outcome(run, "cleo", "EXPIRED")
    assert stage.outcomes(run) == {
        "ann": ("FULFILLED", ""), "ben": ("EXPIRED", "deadline"), "cleo": ("EXPIRED", "absent"),
    }  # fmt: skip


def test_the_grace_is_five_minutes_unless_the_specification_sets_it() -> None:
    assert RunSpec.parse('name = "a"\ntask = "t"\nrounds = 1').selection.grace_seconds == 300.0


def put_ahead(stage: Stage, run: str, ahead: timedelta) -> None:
    """Moves the times of a run's phases, as if a clock that was ahead had begun them; the coordinator is stopped."""
    with Session(Database.open(stage.served.home.database_url).engine) as session, session.begin():
        phases = select(Phase).join(Round).where(Round.run_id == run)
        for phase in session.scalars(phases):
            phase.started, phase.deadline = phase.started + ahead, phase.deadline + ahead


def test_a_phase_that_a_clock_ahead_has_begun_waits_no_longer_after_the_clock_was_set_back_than_it_was_given(
    stage: Stage,
) -> None:
    """Its beginning and its deadline are to come; the coordinator was stopped meanwhile, and an officer vouched."""
    run, (ann, ben, _), orders = begin(stage)
    stage.stop()
    put_ahead(stage, run, timedelta(days=300))
    stage.start()
    for player in (ann, ben):
        player.attend(**player.tasks)
    ann.reply(orders[0])
    ben.reply(orders[1])
    after(stage, GRACE / 2)
    assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    after(stage, GRACE)  # cleo does not come back
    stage.wait_outcome(run, "cleo", "EXPIRED")
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "absent")


def test_the_deadline_of_a_phase_that_a_clock_ahead_has_begun_stays_when_the_time_on_record_comes(stage: Stage) -> None:
    """The deadline is 15 minutes after the restart; on record, the phase begins 10 minutes after it."""
    run, (ann, _, _), orders = begin(stage, "enrolled")
    stage.stop()
    put_ahead(stage, run, timedelta(minutes=10))
    stage.start()
    ann.attend(**ann.tasks)
    ann.reply(orders[0])
    for minutes in (6, 6):
        after(stage, timedelta(minutes=minutes))
        assert stage.outcomes(run)["cleo"] == ("OPEN", "")
    after(stage, timedelta(minutes=4))
    stage.wait_outcome(run, "cleo", "EXPIRED")
    # Nobody knows whether it has worked all the time.
    assert stage.outcomes(run)["cleo"] == ("EXPIRED", "deadline")


def test_times_of_a_phase_are_those_on_record_unless_they_were_found_to_come() -> None:
    began, given = datetime(2026, 4, 30, tzinfo=UTC), timedelta(hours=1)
    for started, found in ((began - given, True), (began, False), (began + given, False)):
        on_record = (started, started + given)
        assert times_of(*on_record, began=began, set_right=None) == (*on_record, found)
    later, look = began + timedelta(days=300), began + timedelta(seconds=9)
    assert times_of(later, later + given, began=began, set_right=look) == (look, look + given, True)
