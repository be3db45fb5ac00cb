"""The payloads of rounds that are no longer among the last ones of their run: they are removed minutes later."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from itertools import islice

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from federation.record.best_round import BestSoFar
from storage.blobs import BlobStore
from storage.database import Database
from storage.models import Round, Run
from storage.retention import Collection, needed_elsewhere, payloads_of, stop_split
from storage.states import RoundState

GRACE = timedelta(minutes=10)  # longer than it takes to record an equal update that has been stored or claimed
LOOKS_BACK = timedelta(hours=25)  # after a start; `collect` removes what is older
BATCH = 50  # rounds that are looked at in one go
MOST = 500  # payloads that are looked at in one go, or those of one round


class PastPayloads:
    """Removes the payloads of rounds that leave the last `keep_rounds` of their run.

    It reads each round once, after it has ended, and looks at the payloads of the rounds that have left alone: what
    it does for a round does not depend on how many there are. Models and other blobs are left to `collect`.

    Args:
        database: the rows.
        blobs: the store.
        keep_rounds: that of `collect`.
    """

    def __init__(self, database: Database, blobs: BlobStore, keep_rounds: int) -> None:
        self._database = database
        self._blobs = blobs
        self._keep_rounds = keep_rounds
        self._runs: dict[str, _PastRounds] = {}

    def remove(self, now: datetime) -> Collection:
        """Removes what is due, of `BATCH` rounds and `MOST` payloads at most. `now` has a time zone."""
        due, payloads = dict[int, _PastRounds](), set[str]()
        with self._database.read() as session:
            self._read(session, now - LOOKS_BACK)
            for round_id, rounds in islice(self._due(now - GRACE), BATCH):
                more = payloads_of(session, [round_id])
                if due and len(payloads) + len(more) > MOST:
                    break
                due[round_id] = rounds
                payloads |= more
            needed = needed_elsewhere(session, payloads, due, self._keep_rounds) if payloads else set()
        old = (now - GRACE).timestamp()
        deleted = [self._blobs.delete(digest, older_than=old) for digest in sorted(payloads - needed)]
        sizes = [size for size in deleted if size is not None]
        for round_id, rounds in due.items():
            rounds.forget(round_id)
        return Collection(kept=len(payloads) - len(sizes), deleted=len(sizes), freed=sum(sizes))

    def _read(self, session: Session, since: datetime) -> None:
        """Reads the rounds that have ended, of the runs that go on or have ended since."""
        run_ids = sorted(session.scalars(select(Run.run_id).where(or_(Run.ended.is_(None), Run.ended > since))))
        self._runs = {run_id: self._runs.get(run_id) or _PastRounds(run_id) for run_id in run_ids}
        for rounds in self._runs.values():
            rounds.read(session, since)

    def _due(self, before: datetime) -> Iterator[tuple[int, "_PastRounds"]]:
        for rounds in self._runs.values():
            yield from ((round_id, rounds) for round_id in rounds.due(self._keep_rounds, before))


class _PastRounds:
    """The rounds of one run that have ended, and whose payloads are there."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._best = BestSoFar()
        self._newest = -1  # the number of the newest round, ended or not
        self._read = -1  # the number of the newest round that was read
        self._ended: dict[int, tuple[int, datetime]] = {}  # by id, ascending: number and end

    def read(self, session: Session, since: datetime) -> None:
        """Reads the rounds that have ended and were not read yet; those that ended before `since` count as removed."""
        of_run, split = Round.run_id == self._run_id, partial(stop_split, session, self._run_id)
        self._newest = session.scalar(select(func.max(Round.number)).where(of_run)) or 0
        columns = select(Round.round_id, Round.number, Round.ended, Round.metrics).order_by(Round.number)
        ended = Round.state.in_((RoundState.COMPLETED, RoundState.SKIPPED))
        for round_id, number, end, metrics in session.execute(columns.where(of_run, Round.number > self._read, ended)):
            if self._read >= 0 and end and end > since:  # the first round is retained
                self._ended[round_id] = number, end
            self._best.add(number, metrics, split)
            self._read = number

    def due(self, keep_rounds: int, before: datetime) -> Iterator[int]:
        """The ids of the rounds that are not retained and ended before a time."""
        for round_id, (number, end) in self._ended.items():
            if number > self._newest - keep_rounds or end > before:
                return
            if number != self._best.number:
                yield round_id

    def forget(self, round_id: int) -> None:
        """Notes that the payloads of a round are removed."""
        del self._ended[round_id]
