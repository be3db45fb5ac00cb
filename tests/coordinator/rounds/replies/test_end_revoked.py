"""The work of a revoked client ends also if the coordinator loses its database just after the revocation."""

from storage.models import Client
from storage.states import ClientState
from tests.coordinator.rounds.scene import at, fail, once
from tests.running import refused
from tests.stage import Stage


def test_assignments_that_a_failed_revocation_left_open_are_cancelled_by_the_housekeeper(stage: Stage) -> None:
    leaver = f"leaver-{stage.count}"
    more = "selection.minimum = 2\nselection.quorum = 0.5\nevaluate.every = 0"
    run, (ann, gone) = stage.begin("ann", leaver, more=more)
    mine, _ = ann.order(), gone.order()
    with at("", "UPDATE assignments", once(fail)) as seen, refused("UNAVAILABLE", "database"):
        stage.revoke(leaver)
    assert seen
    assert stage.look(lambda session: session.get_one(Client, leaver).state) is ClientState.REVOKED
    ann.reply(mine)
    keeper = stage.supervisor._housekeeper
    keeper.tidy()
    assert stage.outcomes(run) == {"ann": ("FULFILLED", ""), leaver: ("CANCELLED", "client-revoked")}
    ended = stage.assignments(run)[leaver].ended
    stage.play(run, ann)
    keeper.tidy()
    assert stage.assignments(run)[leaver].ended == ended
