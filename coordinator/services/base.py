"""The parts of the coordinator that the services share."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.audit.sequencer import Sequencer
from coordinator.fault_state import FaultState
from coordinator.home import CoordinatorHome
from coordinator.members.access.control import Access
from coordinator.members.coordinators import CoordinatorAddresses
from coordinator.members.logged_rights import LoggedRights
from coordinator.rounds.fleets.attendances import Attendances
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.replies.uploads import Uploads
from coordinator.rounds.supervisor import Supervisor
from coordinator.services.views.reader import RecordParts, RecordViews


@dataclass(frozen=True, kw_only=True)
class Parts(RecordParts):
    """The parts of a coordinator that serves.

    Attributes:
        attendances: number the streams of members.
        offers: ask members about runs.
        access: knows the caller of each rpc.
        sequencer: of the audit log.
        rights: as the log tells of them.
        address: of this coordinator for members, "host:port".
        enrollment_address: of this coordinator for newcomers, "host:port".
        machine_clock: that of the machine, by which files are dated.
    """

    home: CoordinatorHome
    attendances: Attendances
    offers: Offers
    uploads: Uploads
    supervisor: Supervisor
    access: Access
    sequencer: Sequencer
    rights: LoggedRights
    faults: FaultState
    address: str
    enrollment_address: str
    machine_clock: Callable[[], datetime]


class Service(RecordViews):
    """The base of a gRPC service."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._home = parts.home
        self._in_thread = parts.threads.run
        self._read_file = parts.threads.read_file
        self._write = parts.threads.write
        self._database = parts.threads.database
        self._supervisor = parts.supervisor
        self._access = parts.access
        self._sequencer = parts.sequencer
        self._rights = parts.rights
        self._faults = parts.faults
        self._machine_clock = parts.machine_clock
        self._own_addresses = (parts.address, parts.enrollment_address)
        self._attendances = parts.attendances
        self._offers = parts.offers

    async def _addresses(self) -> CoordinatorAddresses:
        """The addresses of this coordinator and of the others that serve."""
        return await self._read(CoordinatorAddresses.serving, *self._own_addresses)
