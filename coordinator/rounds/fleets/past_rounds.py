"""What the ended rounds of a run mean for its next one; each of them is read once."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.aggregation.metrics.run_metrics import Earlier
from storage.models import Round


class PastRounds:
    """Reads each round of a run once, after it has ended: nothing of it changes any more.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._next = 0  # the number of the first round that was not read
        self._metrics = Earlier()
        self._named: set[str] = set()

    def metrics(self, session: Session, before: int) -> Earlier:
        """The metrics on record of the rounds before this one."""
        self._read(session, before)
        return self._metrics

    def named(self, session: Session, before: int) -> frozenset[str]:
        """The members that were named as cheats in the rounds before this one."""
        self._read(session, before)
        return frozenset(self._named)

    def _read(self, session: Session, before: int) -> None:
        if before < self._next:
            self._next, self._metrics, self._named = 0, Earlier(), set()
        columns = select(Round.number, Round.deployed_model, Round.metrics, Round.named, Round.voided)
        these = Round.run_id == self._run_id, Round.number >= self._next, Round.number < before
        for number, model, recorded, named, voided in session.execute(columns.where(*these).order_by(Round.number)):
            self._metrics.add(number, model, recorded)
            self._named.update(named, *(void.named for void in voided))
        self._next = before
