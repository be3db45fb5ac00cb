"""Housekeeping: records when clients last attended, ends the work of revoked ones, removes blobs and uploads.

The age of a blob depends on the clock. After the clock is set, nothing is removed for a day.
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import select

from coordinator.fault_state import FaultState
from coordinator.rounds.fleets.presence import Presence, note_sign
from coordinator.rounds.replies.past_payloads import PastPayloads
from coordinator.rounds.replies.uploads import Uploads
from storage.blobs import BlobStore
from storage.database import UNAVAILABLE, Database, Duty
from storage.faults import explain_fault
from storage.models import Client
from storage.retention import collect

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 10.0
COLLECTION_INTERVAL = timedelta(hours=1)
COLLECTION_GRACE = timedelta(hours=24)  # longer than it takes to record an upload, an aggregation or a phase's replies
COLLECTION_SECONDS = 3600  # after which another coordinator may collect although this one has not ended
REMOVAL_INTERVAL = timedelta(seconds=30)
CLOCK_SET = timedelta(minutes=1)  # a smaller difference between clock and elapsed time is drift


class Housekeeper:
    """A thread that does what is left to do; it notes faults in `faults`.

    `end_revoked` ends the open assignments of revoked clients; `keep_rounds` is that of `collect`.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        presence: Presence,
        uploads: Uploads,
        faults: FaultState,
        *,
        end_revoked: Callable[[], None],
        keep_rounds: int | None,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._presence = presence
        self._uploads = uploads
        self._faults = faults
        self._end_revoked = end_revoked
        self._keep_rounds = keep_rounds
        self._clock = clock
        self._monotonic = monotonic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeper", daemon=True)
        self._last = clock(), monotonic()
        self._next_collection = self._last[1] + COLLECTION_INTERVAL.total_seconds()
        self._past = None if keep_rounds is None else PastPayloads(database, blobs, keep_rounds)
        self._next_removal = self._last[1] + REMOVAL_INTERVAL.total_seconds()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and records when clients last attended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._note_seen()
        except UNAVAILABLE as error:
            if self._faults.gone() is None:
                log.warning("could not record when members last attended: %s", explain_fault(error))

    def tidy(self) -> None:
        """Does the work that is due."""
        self._look_at_clock()
        self._end_revoked()
        self._note_seen()
        self._uploads.collect()
        if self._monotonic() >= self._next_collection:
            self._next_collection = self._monotonic() + COLLECTION_INTERVAL.total_seconds()
            self._collect()
        if self._monotonic() >= self._next_removal:
            self._next_removal = self._monotonic() + REMOVAL_INTERVAL.total_seconds()
            self._remove_past_payloads()

    def _run(self) -> None:
        while not self._stopping.wait(HOUSEKEEPING_SECONDS):
            try:
                self.tidy()
            except Exception as error:
                if self._faults.note(error) is None:
                    log.exception("housekeeping failed; it is tried again")

    def _look_at_clock(self) -> None:
        """Detects a clock that was set; a machine that slept looks the same."""
        now, passed = self._clock(), self._monotonic()
        ahead = now - self._last[0] - timedelta(seconds=passed - self._last[1])
        self._last = now, passed
        if abs(ahead) > CLOCK_SET:
            way = "forward" if ahead > timedelta(0) else "back"
            by = abs(timedelta(seconds=round(ahead.total_seconds())))
            log.warning("the clock of this machine was set %s by %s: no blob is removed for a day", way, by)
            self._next_collection = self._next_removal = passed + COLLECTION_GRACE.total_seconds()

    def _collect(self) -> None:
        """Removes blobs that no retained round refers to, unless another coordinator does so at this time."""
        with self._database.turn(Duty.COLLECTION, seconds=COLLECTION_SECONDS) as mine:
            if not mine:
                return
            collected = collect(
                self._database,
                self._blobs,
                now=self._clock(),
                grace_seconds=COLLECTION_GRACE.total_seconds(),
                keep_rounds=self._keep_rounds,
            )
        if collected.deleted:
            log.info("removed %d blobs that nothing needs, %.1f MB", collected.deleted, collected.freed / 1e6)

    def _remove_past_payloads(self) -> None:
        """Removes the payloads of rounds that have left the last ones of their run."""
        removed = None if self._past is None else self._past.remove(self._clock())
        if removed and removed.deleted:
            log.info("removed %d payloads of past rounds, %.1f MB", removed.deleted, removed.freed / 1e6)

    def _note_seen(self) -> None:
        if seen := self._presence.take_seen():
            with self._database.begin() as session:
                rows = select(Client).where(Client.client_id.in_(seen)).order_by(Client.client_id)
                # Locked in the order of all that lock several.
                for client in session.scalars(rows.with_for_update(key_share=True)):
                    note_sign(client, seen[client.client_id])
