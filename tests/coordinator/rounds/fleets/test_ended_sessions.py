"""Members are told when a private round is over."""

from federation.work.secure.orders import asked_session
from tests.coordinator.rounds.fleets.scene import PRIVATE, ended, is_ready
from tests.stage import Stage

NAMES = ("ann", "ben", "cid", "dan", "eve")


def test_members_are_told_that_a_private_round_was_skipped_or_stopped_also_those_that_come_back(stage: Stage) -> None:
    run, players = stage.begin(*NAMES, rounds=2, algorithm="fedavg-n", more=PRIVATE)
    ready, last = players[:4], players[4]
    orders = {player.name: player.order() for player in players}
    (session,) = {asked_session(order) for order in orders.values()}
    for player in ready:
        is_ready(player, orders[player.name])
    last.decline(orders[last.name], "paused")
    for player in players:
        assert ended(player) == [(orders[player.name].assignment_id, session, "round-ended")]
    ready[0].attend(**ready[0].tasks)
    assert ended(ready[0]) == [(orders["ann"].assignment_id, session, "round-ended")]

    # In the next round, an administrator stops the run while one has not replied.
    again = {player.name: player.order() for player in players}
    (other,) = {asked_session(order) for order in again.values()}
    assert other != session
    for player in ready:
        is_ready(player, again[player.name])
    stage.stop_run(run)
    for player in players:
        assert ended(player, 2)[1:] == [(again[player.name].assignment_id, other, "run-ended")]
