"""Runs that go badly, for the pages that show them."""

from collections.abc import Callable

from tests.running import wait_for
from tests.stage import ALL, Player, Stage, reply_to, spec


def troubled_run(stage: Stage, name: str, rounds: int, reason: str, message: str) -> str:
    """A run in whose first round one member replies, one has its update refused, and one declines."""
    more = "selection.minimum = 3\nselection.quorum = 0.1"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", name=name, rounds=rounds, more=more)
    ann.reply(ann.order())
    ben.submit_zeros(ben.order())
    cleo.decline(cleo.order(), reason, message)
    stage.play(run, ann, ben, cleo)
    return run


def run_without_some(stage: Stage, name: str, rounds: int) -> tuple[str, list[Player], Player]:
    """A run that ann and ben will play, and cleo declines; dora offers its task, and has left before it begins.

    Returns its id, those who play, and the one who declines.
    """
    task, (ann, ben, cleo, dora) = stage.crew("ann", "ben", "cleo", "dora")
    stage.hang_up(dora)
    run = stage.submit(spec(name, task, rounds, more="selection.minimum = 3\nselection.quorum = 0.1"))
    return run, [ann, ben], cleo


def play_without(players: list[Player], declining: Player, until: Callable[[], object], rounds: int = ALL) -> None:
    """Some reply to everything, and another one declines everything; orders of a round from `rounds` on are kept."""

    def over() -> object:
        for envelope, order in declining.orders():
            if order.round < rounds:
                declining.decline(order, "memory", "no room on the device")
            else:
                declining.kept.append((envelope, order))
        reply_to(players, lambda order: order.round < rounds)
        return until()

    wait_for(over, "the rounds to be played")
