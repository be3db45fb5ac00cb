"""Restarts of the coordinator between the phases of rounds over several objectives."""

import pytest

from tests.coordinator.rounds.scene import EXACT, begin
from tests.few import few_of
from tests.running import wait_for
from tests.stage import Stage

CONVERSATIONS = {
    "one-leg": (EXACT, 2),
    "two-legs": ('algorithm.sketch = "svd-two-way"\nalgorithm.exact_stationarity = true', 4),
    "unbiased": ("algorithm.unbiased = true\nselection.method = 'count'\nselection.count = 2", 4),
}


@pytest.mark.parametrize("conversation", few_of(CONVERSATIONS, "unbiased"))
def test_a_restart_between_any_two_phases_leads_to_the_same_bytes(stage: Stage, conversation: str) -> None:
    more, count = CONVERSATIONS[conversation]
    expected, players = begin(stage, "fedcmoo", more, rounds=2)
    stage.play(expected, *players.values())
    assert len(stage.phases(expected)) == count
    run, players = begin(stage, "fedcmoo", more, rounds=2)
    for phase in range(count):

        def reached(phase: int = phase) -> bool:
            return len(stage.rounds(run)) > 0 and len(stage.phases(run)) > phase

        stage.play(run, *players.values(), until=reached, phases=phase)
        before = ids(stage, run)
        stage.restart()
        assert before.items() <= ids(stage, run).items()  # nobody was asked twice
    stage.play(run, *players.values())
    for number in (0, 1):
        rounds = [stage.rounds(one)[number] for one in (expected, run)]
        assert rounds[0].result_model == rounds[1].result_model != rounds[0].base_model
        assert rounds[0].objectives == rounds[1].objectives
        wanted = [[phase.wanted for phase in stage.phases(one, number)] for one in (expected, run)]
        assert wanted[0] == wanted[1]
    assert stage.run(run).state_data == stage.run(expected).state_data


def ids(stage: Stage, run: str) -> dict[str, tuple[int, int]]:
    return {
        a.assignment_id: (number, phase.number)
        for number in range(len(stage.rounds(run)))
        for phase in stage.phases(run, number)
        for a in stage.assignments(run, number, phase.number).values()
    }


def test_independent_choices_are_made_of_whoever_was_there_when_the_round_began(stage: Stage) -> None:
    """A restart empties the pool of those who attend for a while; the choice must not depend on that."""
    more = CONVERSATIONS["unbiased"][0]
    run, players = begin(stage, "fedcmoo", more)
    selected = wait_for(lambda: [*stage.outcomes(run)], "the first phase")
    orders = {name: players[name].order() for name in selected}
    players[selected[0]].reply(orders[selected[0]])
    stage.stop()
    stage.start()
    away = {player.name: player for player in players.values() if player.name != selected[1]}
    for player in away.values():
        player.leave()
    for player in stage.players.values():
        if player.name not in away:
            player.attend(**(player.tasks if player.stream is not None else {}))
    players[selected[1]].reply(orders[selected[1]])
    for player in away.values():
        player.attend(**player.tasks)
    stage.play(run, *players.values())
    assert [phase.wanted for phase in stage.phases(run)] == [2, 2, 2, 2, 3]
    assert all(len(stage.outcomes(run, 0, phase)) == 2 for phase in range(3))
