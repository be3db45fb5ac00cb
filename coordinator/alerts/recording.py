"""Brings the alerts about one run up to date with its record."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from coordinator.alerts import about_runs, rows
from coordinator.alerts.about_rounds import RoundFacts, WeightBounds
from coordinator.rounds.runs.participation import read_rounds
from storage.database import Database
from storage.models import Alert, Run
from storage.states import AlertKind


@dataclass(frozen=True)
class Recorded:
    """The result of a look at a run.

    Attributes:
        facts: about the rounds so far, for the next look; None if there is none.
        new: the rows that began.
        changed: True if a row was written.
    """

    facts: RoundFacts | None
    new: Sequence[Alert] = ()
    changed: bool = False


def record_run(database: Database, run_id: str, facts: RoundFacts | None, now: datetime) -> Recorded:
    """Writes the alerts that follow from the rounds that have ended since `facts`; from all rounds if it is None.

    All that belongs to a run that has ended is one transaction. If this raises, `facts` may no longer be used.
    """
    with database.read() as session:
        run = session.get(Run, run_id)
        if run is None or (run.ended is not None and rows.complete(session, run_id)):
            return Recorded(None)
        facts = facts or RoundFacts(run_id, WeightBounds.of(run))
        for round_ in read_rounds(session, run_id, facts.participation.next_round):
            facts.add(round_)
        paused = about_runs.paused(run, now)
        pauses = rows.differ(session, run_id, [AlertKind.RUN_PAUSED], paused)
    if run.ended is not None:
        facts.end(run.ended)
    fresh = facts.take_changed()
    if not (fresh or pauses or run.ended is not None):
        return Recorded(facts)
    with database.begin() as session:
        new = rows.save(session, run_id, fresh)
        new += rows.reconcile(session, run_id, [AlertKind.RUN_PAUSED], paused, now)
        if run.ended is not None:
            rows.end_of_run(session, run_id, run.ended)
            new += rows.save(session, run_id, [about_runs.ended(run, facts.participation.next_round)])
    return Recorded(None if run.ended is not None else facts, new, changed=True)
