"""Runs `fedpareto` and kills it (SIGKILL, nothing is flushed) when it comes to a named point.

    python tests/programs/crashing.py POINT[,frozen][,unfenced] coordinator serve --home DIR

The functions around the point run as shipped; the kill comes before or after one of them. With `frozen` the process is
stopped there (SIGSTOP), until somebody lets it go on. With `unfenced` a conductor does not compare the epoch of its
lease, which is a planted bug.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

SIGNAL = signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), SIGNAL)


def unfence() -> None:
    """Removes the comparison of epochs from all transactions of conductors."""
    from coordinator.rounds.fleets.base import RunFacts
    from storage.models import Run

    RunFacts.locked = lambda self, session: session.get_one(  # type: ignore[method-assign]
        Run, self.run_id, with_for_update=True
    )


def before(owner: Any, name: str, *, count: int = 1, returned: bool = False) -> None:
    """Dies on entering `owner.name` for the `count`-th time, or when it has `returned` as often."""
    original, places = getattr(owner, name), itertools.count(1)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not returned and next(places) == count:
            die()
        result = original(*args, **kwargs)
        if returned and next(places) == count:
            die()
        return result

    setattr(owner, name, replaced)


after = partial(before, returned=True)


def coordinator(point: str) -> None:
    from coordinator.rounds import conductor, finish
    from coordinator.rounds.fleets.presence import Presence
    from coordinator.rounds.fleets.remote import RemoteFleet
    from coordinator.rounds.replies.intake import Intake

    points: dict[str, Callable[[], None]] = {
        # the round is recorded, nobody has been asked
        "before-dispatch": lambda: before(RemoteFleet, "_issue"),
        # the assignments are recorded, nobody has been told
        "dispatching": lambda: before(Presence, "say"),
        # one update is accepted, its client has not heard of it
        "one-update-in": lambda: after(Intake, "record", count=1),
        # all updates are accepted, the last client has not heard of it
        "all-updates-in": lambda: after(Intake, "record", count=3),
        # the gradients are in, nobody has been asked to train (of a round that asks for both)
        "gradients-in": lambda: before(RemoteFleet, "_issue", count=2),
        # the weights are found and sent, some have trained
        "some-trained": lambda: after(Intake, "record", count=5),
        # the phase is closed, nothing is computed
        "aggregating": lambda: before(conductor, "make_step"),
        # the new model is a blob that no row names
        "model-written": lambda: before(conductor, "record_step"),
        # the step is recorded, nobody has been told
        "stored": lambda: after(conductor, "record_step"),
        # some have evaluated the new model
        "one-evaluation-in": lambda: after(Intake, "record", count=4),
        # the evaluation is in, the round is not over
        "evaluated": lambda: before(finish, "complete_round"),
        # the round is over, the next one has not begun
        "between-rounds": lambda: after(finish, "complete_round"),
    }
    for number in range(1, 20):  # the phases before it are closed, this one is not opened
        points[f"phase-{number}"] = partial(before, RemoteFleet, "_issue", count=number)
    points[point]()


def worker(point: str) -> None:
    from federation.training.trainer import Trainer
    from worker import rotation
    from worker.connection import renewal
    from worker.connection.attendance import Attendance
    from worker.ledgers.left_ledger import LeftLedger
    from worker.work import submitter
    from worker.work.spool import Spool

    def during_training() -> None:
        original = Trainer.compute

        def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
            report = kwargs["progress"]

            def progress(share: float) -> None:
                report(share)
                if share > 0.4:
                    die()

            return original(self, *args, **{**kwargs, "progress": progress})

        Trainer.compute = compute  # type: ignore[method-assign]

    def while_uploading() -> None:
        original = submitter._requests

        def requests(*arguments: Any) -> Any:
            first = True
            for request in original(*arguments):
                yield request
                if not first:
                    die()  # the header and some of the payload are on their way
                first = False

        submitter._requests = requests  # type: ignore[assignment]

    points: dict[str, Callable[[], None]] = {
        "training": during_training,
        "trained": lambda: before(Spool, "add"),
        "spooled": lambda: after(Spool, "add"),
        # the reply is signed, and not in the ledger of what left
        "recording": lambda: before(LeftLedger, "keep"),
        # it is in the ledger, and no byte of it has left
        "recorded": lambda: after(LeftLedger, "keep"),
        "uploading": while_uploading,
        # the coordinator has counted the update, the worker does not know
        "before-receipt": lambda: after(submitter, "exchange"),
        "after-receipt": lambda: before(Spool, "settle"),
        # the coordinator has issued the next certificate, which is not on the disk
        "certificate-issued": lambda: before(renewal, "save"),
        # it is on the disk, and no stream has shown it
        "certificate-saved": lambda: before(Attendance, "renewed"),
        # the new signing key is on the disk, and the coordinator has not heard of it
        "rotation-begun": lambda: after(rotation, "_begin"),
        # the coordinator has registered it, and the member does not know
        "rotation-registered": lambda: after(rotation, "_ask"),
        # it is in its place, and what has begun is still noted
        "rotation-saved": lambda: after(rotation, "replace_together"),
    }
    for number in range(1, 20):  # the reply with this number is not in the spool
        points[f"reply-{number}"] = partial(before, Spool, "add", count=number)
    points[point]()


if __name__ == "__main__":
    _, words, *arguments = sys.argv
    chosen, *options = words.split(",")
    {"coordinator": coordinator, "worker": worker}[arguments[0]](chosen)
    if "frozen" in options:
        SIGNAL = signal.SIGSTOP
    if "unfenced" in options:
        unfence()
    sys.argv = ["fedpareto", *arguments]
    from fedpareto.cli.main import main

    main()
