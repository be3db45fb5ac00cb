"""The present faults of the coordinator's machine, and the log lines and refusals that report them.

Faults are noted where they occur, in any thread: in a conductor, in a call, in the housekeeping. Each is logged once a
minute at most. `coordinator.monitor` notes when a fault is over.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from coordinator.listeners import Listeners
from federation.directories import Directories, DirectoryGone
from federation.refusals import Refusal
from storage.faults import StorageFault, explain_fault, fault_of

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
_WORDS = {
    StorageFault.DISK: "the coordinator's disk is full or fails ({}); its runs are paused until it takes writes again",
    StorageFault.DATABASE: "the coordinator waits for its database ({})",
    StorageFault.DESCRIPTORS: "the coordinator has no file descriptors left ({}); raise its limit "
    "(ulimit -n, LimitNOFILE)",
    StorageFault.BLOB: "{}; restore the blob from a backup",
    StorageFault.BLOB_STORE: "the bucket of the blobs fails ({}); the runs are paused until it works",
    StorageFault.CLOCK: "the clock of this machine is wrong ({}); nothing is served until it is right: set it, and let "
    "it be kept by NTP",
}
_ANSWERS = {
    StorageFault.DISK: "the coordinator's disk is full or fails: it takes nothing until it is well; try again later",
    StorageFault.DATABASE: "the coordinator waits for its database; try again in a moment",
    StorageFault.DESCRIPTORS: "the coordinator has no file descriptors left; try again in a moment",
    StorageFault.GONE: "the coordinator is stopping; try again when it is back",
    StorageFault.BLOB_STORE: "the coordinator cannot reach the storage of its models and updates; try again later",
    StorageFault.CLOCK: "the coordinator's clock is wrong: it serves nobody until it is right; try again later, or "
    "another coordinator",
}
# Faults that pause the runs until the monitor sees that they are over.
PAUSING = (StorageFault.DISK, StorageFault.BLOB_STORE)
LASTING = (*PAUSING, StorageFault.DATABASE, StorageFault.CLOCK)  # the faults that can be present
# Calls of gRPC's own services, which need neither disk nor database.
_ALWAYS = frozenset({"Check", "List", "Watch", "ServerReflectionInfo"})
# Calls that are served while a disk is full: they need no space, or free some.
_COMMANDS = frozenset({"PauseRun", "ResumeRun", "StopRun"})
_SPARING = _COMMANDS | {"FetchBlob", "LocateBlob", "RevokeClient"}
# Calls whose upload would be in vain while the bucket is away.
_STORING = frozenset({"Submit", "SubmitRun"})


@dataclass
class _Noted:
    logged: float
    times: int = 0


class FaultState:
    """The lasting faults. Its methods may be called from any thread.

    Args:
        clock: gives seconds that only grow.
        alone: True if no other coordinator can serve meanwhile.
        directories: the coordinator can only work while they are there; None if it has none.

    Attributes:
        noted: those who are told of a fault of disk, bucket or database when it first occurs, of a directory that is
            gone, and with None to look if the faults are over.
        clock_back: how far the machine's clock was set back; 0 if it was not.
        clock_vouched: True if an operator has said that the machine's clock is right, until that is taken into account.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        alone: bool = True,
        directories: Directories | None = None,
    ) -> None:
        self.noted: Listeners[[StorageFault | None]] = Listeners()
        self._clock = clock
        self._alone = alone
        self.clock_back = timedelta()
        self.clock_vouched = False
        self._lock = threading.Lock()
        self._noted: dict[StorageFault, _Noted] = {}
        self._lasting: dict[StorageFault, str] = {}
        self._directories = directories or Directories()
        self._gone: DirectoryGone | None = None

    def gone(self) -> DirectoryGone | None:
        """Why the coordinator must stop; None while its directories are there. It does not change back."""
        if self._gone is None:
            try:
                self._directories.check_there()
            except DirectoryGone as error:
                self._gone = error
                self.noted.tell(StorageFault.GONE)
        return self._gone

    @property
    def present(self) -> dict[StorageFault, str]:
        """The lasting faults, each with its cause."""
        with self._lock:
            return dict(self._lasting)

    def note(self, error: BaseException, *, lasts: bool = False) -> StorageFault | None:
        """Notes and logs the fault behind an exception; returns None, and notes nothing, if there is none.

        `lasts` says that the database does not answer at all. A fault that pauses runs always lasts. Every exception is
        due to a directory that is gone, if one is; the coordinator then says so once, when it stops.
        """
        if self.gone() is not None:
            return StorageFault.GONE
        fault = fault_of(error)
        if fault is None:
            return None
        cause = explain_fault(error)
        with self._lock:
            known = fault in self._lasting
            if fault in PAUSING or (fault is StorageFault.DATABASE and lasts):
                self._lasting.setdefault(fault, cause)
            suffix = self._log_suffix(fault)
        if suffix is not None:
            log.error("%s%s", _WORDS[fault].format(cause), suffix)
        if fault in (*PAUSING, StorageFault.DATABASE) and not (known or lasts):
            self.noted.tell(fault)
        return fault

    def begin(self, fault: StorageFault, cause: str) -> None:
        """Notes a lasting fault that no exception shows."""
        with self._lock:
            self._lasting[fault] = cause
            suffix = self._log_suffix(fault)
        if suffix is not None:
            log.error("%s%s", _WORDS[fault].format(cause), suffix)

    def look_again(self) -> None:
        """Asks the listeners to check if the faults are over."""
        self.noted.tell(None)

    def over(self, fault: StorageFault) -> None:
        """Notes that a lasting fault has ended."""
        with self._lock:
            ended = self._lasting.pop(fault, None)
            self._noted.pop(fault, None)
        if ended is not None:
            log.info("the fault is over: %s", fault)

    def refusal(self, error: BaseException) -> Refusal | None:
        """The refusal of a call that failed; None if the exception comes from no fault."""
        fault = self.note(error)
        if fault is None:
            return None
        message = f"{explain_fault(error)}: restore it from a backup (with keep_rounds, old rounds keep no models)"
        return Refusal(fault, _ANSWERS.get(fault, message))

    def check_serving(self, action: str) -> None:
        """Raises if a call of the rpc `action` could only fail, or would take the last space on the disk.

        Raises:
            Refusal: `clock`, `database`, `disk` or `blob-store`.
        """
        faults = self._lasting
        if not faults or action in _ALWAYS:
            return
        if StorageFault.DATABASE in faults:
            raise Refusal(StorageFault.DATABASE, _ANSWERS[StorageFault.DATABASE])
        reads = action.startswith(("Get", "List", "Watch", "Export"))
        if StorageFault.CLOCK in faults and not (self._alone and (action in _COMMANDS or reads)):
            raise Refusal(StorageFault.CLOCK, _ANSWERS[StorageFault.CLOCK])
        if StorageFault.DISK in faults and not (action in _SPARING or reads):
            raise Refusal(StorageFault.DISK, _ANSWERS[StorageFault.DISK])
        if StorageFault.BLOB_STORE in faults and action in _STORING:
            raise Refusal(StorageFault.BLOB_STORE, _ANSWERS[StorageFault.BLOB_STORE])

    def _log_suffix(self, fault: StorageFault) -> str | None:
        """The text to add to a line of the log; None if the last line is too recent."""
        now = self._clock()
        noted = self._noted.get(fault)
        if noted is not None and now - noted.logged < LOG_SECONDS:
            noted.times += 1
            return None
        repetitions = f" ({noted.times} more times since the last line)" if noted is not None and noted.times else ""
        self._noted[fault] = _Noted(now)
        return repetitions
