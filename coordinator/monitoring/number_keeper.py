"""The keeper of the numbers of `/metrics`: a thread that looks at the record and the machine, so that no scrape does.

Of several coordinators, the one that has the turn gives the numbers of the federation. It keeps the turn until it
stops, freezes, or loses its database; then another one takes it. Numbers that are too old are not shown.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import chain

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.alerts.about_federation import last_backup
from coordinator.fault_state import LASTING
from coordinator.monitoring.federation_numbers import DAY, federation_numbers, member_numbers
from coordinator.rounds.fleets.presence import Presence
from coordinator.startup import OpenRecord
from federation.monitoring.tally import MonitoredKind, MonitoredNumber, Reading, by_label, single
from storage.database import Duty
from storage.models import Federation

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
MEMBERS_SECONDS = 30.0  # between two looks at each member
OLD_SECONDS = 25.0  # older numbers of the federation are not shown; less than the next one
TURN_SECONDS = 30  # after which another coordinator may take the turn of one that is frozen
BACKUP_LOOK = timedelta(hours=1)  # how far back a look at the log goes, after the first one
GIVES_FEDERATION = MonitoredNumber(
    "fedpareto_gives_federation",
    "1 if this coordinator gives the numbers of the whole federation; of several, one does.",
    MonitoredKind.GAUGE,
)
LOOKED = MonitoredNumber(
    "fedpareto_looked_timestamp_seconds",
    "When the coordinator last looked at its machine and the record.",
    MonitoredKind.GAUGE,
)
DISK_FREE = MonitoredNumber(
    "fedpareto_disk_free_bytes",
    "Bytes that are free where the coordinator writes.",
    MonitoredKind.GAUGE,
    ("directory",),
)
FAULTS = MonitoredNumber(
    "fedpareto_faults", "1 while the coordinator's machine has this fault, else 0.", MonitoredKind.GAUGE, ("fault",)
)
CERTIFICATE = MonitoredNumber(
    "fedpareto_certificate_days",
    "Days until a certificate of the federation ends.",
    MonitoredKind.GAUGE,
    ("certificate",),
)


class NumberKeeper:
    """Keeps the numbers of one coordinator; `readings` may be called in any thread.

    Args:
        record: of the coordinator.
        presence: the members that attend.
        names_members: True if numbers may name members: a scrape needs a token.
        monotonic: seconds that only grow.
    """

    def __init__(
        self,
        record: OpenRecord,
        presence: Presence,
        *,
        names_members: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = record.database
        self._directories = {"blobs": record.home.blobs_dir}
        if (directory := record.database.directory) is not None:
            self._directories["database"] = directory
        self._certificates = {"ca": record.home.ca, "coordinator": record.home.server}
        self._faults = record.faults
        self._clock = record.clock
        self._presence = presence
        self._names_members = names_members
        self._monotonic = monotonic
        self._machine: list[Reading] = []
        self._federation: tuple[float, list[Reading]] = -math.inf, []
        self._members: tuple[float, list[Reading]] = -math.inf, []
        self._backed_up: datetime | None = None
        self._backup_looked: datetime | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="numbers", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def readings(self) -> list[Reading]:
        """All numbers, from memory."""
        at, federation = self._federation
        gives = self._monotonic() - at < OLD_SECONDS
        counted = (item for item in self._database.tally.readings() if self._names_members or not _names(item))
        of_record = chain(federation, self._members[1]) if gives else ()
        return [*self._machine, single(GIVES_FEDERATION, gives), *counted, *of_record]

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._database.turns(Duty.NUMBERS, TURN_SECONDS) as mine:
                    while not self._stopping.is_set():
                        self.look(gives=mine())
                        self._stopping.wait(LOOK_SECONDS)
            except Exception as error:
                if self._faults.note(error) is None:
                    log.exception("the numbers for /metrics are not complete; they are tried again")
                self._look_at_machine(self._clock())
                self._stopping.wait(LOOK_SECONDS)

    def look(self, *, gives: bool) -> None:
        """Looks at the machine and, if this coordinator gives the numbers of the federation, at the record."""
        began, now = self._monotonic(), self._clock()
        if gives:
            self._look_at_record(began, now)
        else:
            self._federation = -math.inf, []
        self._look_at_machine(now)

    def _look_at_record(self, began: float, now: datetime) -> None:
        attending = self._presence.attending()
        with self._database.read() as session:
            backed_up = self._newest_backup(session, now)
            federation = list(federation_numbers(session, attending, backed_up=backed_up, now=now))
            if self._names_members and began - self._members[0] >= MEMBERS_SECONDS:
                self._members = began, list(member_numbers(session, attending, now=now))
        self._federation = began, federation

    def _look_at_machine(self, now: datetime) -> None:
        self._machine = list(self._machine_numbers(now))

    def _machine_numbers(self, now: datetime) -> Iterator[Reading]:
        yield single(LOOKED, now.timestamp())
        there = {name: path for name, path in self._directories.items() if path.is_dir()}
        yield by_label(DISK_FREE, {name: shutil.disk_usage(path).free for name, path in there.items()})
        present = self._faults.present
        yield by_label(FAULTS, {str(fault): fault in present for fault in LASTING})
        ends = {name: certificate.not_valid_after_utc for name, certificate in self._certificates.items()}
        yield by_label(CERTIFICATE, {name: (end - now).total_seconds() / DAY for name, end in ends.items()})

    def _newest_backup(self, session: Session, now: datetime) -> datetime:
        """When the newest backup was made; when the federation was made, if there is none."""
        self._backed_up = last_backup(session, self._backup_looked, now) or self._backed_up
        self._backup_looked = now - BACKUP_LOOK
        return self._backed_up or session.scalar(select(func.min(Federation.created))) or now


def _names(reading: Reading) -> bool:
    """True if a number names members."""
    return "member" in reading[0].labels
