"""The parts of the coordinator that the services share."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.audit.sequencer import Sequencer
from coordinator.condition import Condition
from coordinator.home import Home
from coordinator.members.access import Access
from coordinator.rounds.consents import Offers
from coordinator.rounds.presence import Presence
from coordinator.rounds.supervisor import Supervisor
from coordinator.rounds.uploads import Uploads
from coordinator.threads import Threads
from storage.blobs import BlobStore


@dataclass(frozen=True)
class Parts:
    """The parts of a coordinator.

    Attributes:
        access: knows the caller of each rpc.
        sequencer: of the audit log.
        address: where members attend, "host:port".
        enrollment_address: where newcomers enroll, "host:port".
        clock: the time, aware.
    """

    home: Home
    threads: Threads
    blobs: BlobStore
    uploads: Uploads
    presence: Presence
    supervisor: Supervisor
    access: Access
    sequencer: Sequencer
    condition: Condition
    address: str
    enrollment_address: str
    clock: Callable[[], datetime]


class Service:
    """The base of a gRPC service."""

    def __init__(self, parts: Parts) -> None:
        self._home = parts.home
        self._settings = parts.home.settings
        self._in_thread = parts.threads.run
        self._read = parts.threads.read
        self._read_file = parts.threads.read_file
        self._write = parts.threads.write
        self._database = parts.threads.database
        self._blobs = parts.blobs
        self._presence = parts.presence
        self._supervisor = parts.supervisor
        self._access = parts.access
        self._sequencer = parts.sequencer
        self._condition = parts.condition
        self._address = parts.address
        self._enrollment_address = parts.enrollment_address
        self._clock = parts.clock
        self._offers = Offers(parts.home.federation_id, parts.home.signing_key)
