"""A failed computation of a private session: it is answered like any other, counted, and told to the owner alone.

The model is the coordinator's choice, so it can be made such that the computation fails exactly if the data have a
property. If members declined then, or answered otherwise, one question would tell the property. So the reply is the
same, and after some failures in a row a worker takes part in no private session until its owner has looked.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from federation.secure.random_direction import random_direction
from federation.work.base import WorkError, WorkingClient
from federation.work.secure.journal import Journal
from federation.work.site import FailedSession

SHOWN = "training-failed"
"""The reason for which a failure is declined if the run discloses numbers, which a failed computation does not have."""


class FailureShown(WorkError):
    """The run discloses numbers of this member, so it declines, without saying what failed.

    Attributes:
        failure: the error of the computation, for the owner.
    """

    def __init__(self, failure: str) -> None:
        # Section 2d: one fixed text. That of the error can depend on the data, and only the owner gets it.
        super().__init__("the numbers that this run discloses could not be computed", reason=SHOWN)
        self.failure = failure


def stand_in(journal: Journal, clip: float, length: int) -> NDArray[np.float32]:
    """The vector in place of one that could not be computed, (length,).

    Zero with a clip, which members may send then: `Journal.direction` gives its sketch a random direction. Without a
    clip, a vector becomes a unit vector, and so it is itself a random direction.
    """
    # Section 2d: with a clip, vectors can be short, and a random one of full length would stand out.
    if clip > 0:
        return np.zeros(length, np.float32)
    return random_direction(journal.secret, journal.session, length)


def check_failing(client: WorkingClient, session: str) -> None:
    """Raises WorkError, `failing`, if too many sessions of the data set failed in a row, this one not counted.

    It is asked before the data are used. `session` is asked again after a crash.
    """
    # Section 2d: without this session: asked again after a crash, it must get the answer that it got before.
    failed = [entry for entry in _row(client) if entry.session != session]
    # Section 2d: each failure can tell a coordinator, which chose the model, one bit about the data. This bounds their
    # number.
    if len(failed) >= client.site.failures:
        raise WorkError(
            f"{len(failed)} computations of private rounds failed here in a row; the owner of this site has to look",
            reason="failing",
        )


def count(client: WorkingClient, session: str, work: str, failure: str) -> None:
    """Counts a session whose computation failed, or ends the row of failures, durably before this returns.

    The same session counts once. Raises OSError if the ledger cannot be written.

    Args:
        client: the member.
        session: its hexadecimal digest.
        work: the kind of work of the vectors, whose row of failures ends.
        failure: the error; empty if there was none.
    """
    site, origin = client.site, client.origin
    # Section 2d: the caller replies afterwards. Counted after the reply, a worker that is killed in between never
    # counts.
    with site.ledger.lock:
        if failure:
            site.ledger.fail(FailedSession(session, origin.run_id, client.round, origin.task, work, failure))
        else:
            # Section 2d: of the same kind of work alone: an evaluation that succeeds must not reset the count of failed
            # trainings.
            site.ledger.succeed(site.tasks_beside(origin.task), work)


def _row(client: WorkingClient) -> Sequence[FailedSession]:
    return client.site.ledger.failures(client.site.tasks_beside(client.origin.task))
