"""What the rounds of a run that have ended mean for the next one."""

from sqlalchemy import update

from coordinator.rounds.fleets.past_rounds import PastRounds
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.models import Round
from storage.records import VoidRecord
from tests.storage.kept_rounds import Federation


def test_each_round_is_read_once_and_only_those_before_count(database: Database, blobs: DirectoryStore) -> None:
    federation, past = Federation(database, blobs), PastRounds("r")
    federation.run("r")
    for number in range(3):
        federation.round("r", number, metrics={"stop/value": float(number), "evaluated": 1.0})
    with database.begin() as session:
        session.execute(update(Round).where(Round.number == 0).values(named={"eve": "sketch"}))
        void = VoidRecord(attempt=0, reason="cheated", named={"mallory": "commitment"})
        session.execute(update(Round).where(Round.number == 1).values(voided=(void,)))
    with database.read() as session:
        assert past.named(session, 1) == {"eve"}
        assert past.metrics(session, 1).stops == [0.0]
        assert past.named(session, 3) == {"eve", "mallory"}
    with database.begin() as session:  # what nobody does: it shows that these rounds are not read again
        session.execute(update(Round).values(metrics={}, named={}, voided=()))
    federation.round("r", 3, metrics={"stop/value": 3.0})
    with database.read() as session:
        found = past.metrics(session, 4)
        assert (found.steps, found.stops) == (4, [0.0, 1.0, 2.0, 3.0])
        assert len(found.measured) == 3
        assert past.metrics(session, 2).stops == [], "a round that comes again, as after a restored backup"
