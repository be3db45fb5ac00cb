"""Members that are lost while they are asked: whom a round asks once more, and by which times a phase waits."""

from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.rounds.fleets.base import Question
from federation.spec.client_sections import SelectionSpec
from storage.models import Assignment, Phase
from storage.states import AssignmentState

ABSENT = "absent"  # the reason of an assignment whose client was lost


def asked_again(
    session: Session, question: Question, selection: SelectionSpec, *, could: AbstractSet[str], there: AbstractSet[str]
) -> list[str]:
    """The clients to be asked a question once more, sorted.

    Args:
        session: in which the round is read.
        question: that was asked.
        selection: the section of the specification.
        could: the clients that may be asked, now or when they come back.
        there: those of them that could work now.
    """
    asked = select(Phase.number, Assignment.client_id, Assignment.state, Assignment.reason)
    rows = session.execute(asked.join_from(Assignment, Phase).where(Phase.round_id == question.current.round_id)).all()
    if again := [row.client_id for row in rows if row.number > question.number]:
        return sorted(again)  # before a restart
    lost = {row.client_id for row in rows if (row.state, row.reason) == (AssignmentState.EXPIRED, ABSENT)}
    # The question waits its whole grace for those that were selected because they attended. Of others, it would wait
    # until the deadline for each that does not come back.
    waits = selection.pool == "attending" and selection.grace_seconds > 0
    found = lost & (could if waits else there)
    # With other methods, who was not selected was not away.
    return sorted(found | (there - {row.client_id for row in rows}) if selection.method == "all" else found)


class PhaseTimes(NamedTuple):
    """The times of a phase, by the clock of this process.

    Attributes:
        started: when it began.
        deadline: after which it waits for nobody.
        found: True if it began before its conductor, such as before a restart of the coordinator.
    """

    started: datetime
    deadline: datetime
    found: bool


def times_of(started: datetime, deadline: datetime, *, began: datetime, set_right: datetime | None) -> PhaseTimes:
    """The times of a phase whose conductor `began`.

    A phase that begins only in time to come was begun by a clock that was ahead, and has been set right. It would wait
    until the clock comes there. It has as long as it was given, from the look on that found this.

    Args:
        started: its beginning on record.
        deadline: its deadline on record.
        began: the beginning of the conductor.
        set_right: when a look found that the phase begins in time to come; None if none has.
    """
    if set_right is None:
        return PhaseTimes(started, deadline, found=started < began)
    return PhaseTimes(set_right, set_right + (deadline - started), found=True)
