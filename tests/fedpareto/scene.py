"""A run that goes badly, for the pages that show it."""

from tests.stage import Stage


def troubled_run(stage: Stage, name: str, rounds: int, reason: str, message: str) -> str:
    """A run in whose first round one member replies, one has its update refused, and one declines."""
    more = "selection.minimum = 3\nselection.quorum = 0.1"
    run, (ann, ben, cleo) = stage.begin("ann", "ben", "cleo", name=name, rounds=rounds, more=more)
    ann.reply(ann.order())
    ben.submit_zeros(ben.order())
    cleo.decline(cleo.order(), reason, message)
    stage.play(run, ann, ben, cleo)
    return run
