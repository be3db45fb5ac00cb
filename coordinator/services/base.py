"""The parts of the coordinator that the services share."""

from dataclasses import dataclass

from coordinator.cluster.announcements import Announcements
from coordinator.members.access.control import Access
from coordinator.members.coordinators import CoordinatorAddresses
from coordinator.rounds.changes import RunChanges
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.fleets.attendances import Attendances
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.fleets.presence import Presence
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.rounds.replies.evidence import SignatureMemory
from coordinator.rounds.replies.uploads import Uploads
from coordinator.rounds.run_commands import RunCommands
from coordinator.rounds.runs.run_states import RunStates
from coordinator.services.views.reader import RecordParts, RecordViews
from coordinator.startup import OpenRecord


@dataclass(frozen=True)
class Rounds:
    """What goes on with the runs.

    Attributes:
        announcements: of other coordinators, and for them.
        presence: the members that attend.
        attendances: number the streams of members.
        offers: ask members about runs.
        uploads: of replies.
        changes: of runs.
        states: of runs.
        signatures: those that this process has verified or made.
        housekeeper: does what is left to do.
        conductors: of the runs.
        commands: to runs, of operators.
    """

    announcements: Announcements
    presence: Presence
    attendances: Attendances
    offers: Offers
    uploads: Uploads
    changes: RunChanges
    states: RunStates
    signatures: SignatureMemory
    housekeeper: Housekeeper
    conductors: Conductors
    commands: RunCommands


@dataclass(frozen=True, kw_only=True)
class Parts(RecordParts):
    """The parts of a coordinator that serves.

    Attributes:
        record: which is open.
        rounds: of the runs.
        access: knows the caller of each rpc.
        address: of this coordinator for members, "host:port".
        enrollment_address: of this coordinator for newcomers, "host:port".
    """

    record: OpenRecord
    rounds: Rounds
    access: Access
    address: str
    enrollment_address: str


class Service(RecordViews):
    """The base of a gRPC service."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        record, rounds = parts.record, parts.rounds
        self._home = record.home
        self._in_thread = parts.threads.run
        self._read_file = parts.threads.read_file
        self._write = parts.threads.write
        self._database = record.database
        self._sequencer = record.sequencer
        self._rights = record.rights
        self._faults = record.faults
        self._machine_clock = record.machine_clock
        self._attendances = rounds.attendances
        self._offers = rounds.offers
        self._commands = rounds.commands
        self._states = rounds.states
        self._changes = rounds.changes
        self._access = parts.access
        self._own_addresses = (parts.address, parts.enrollment_address)

    async def _addresses(self) -> CoordinatorAddresses:
        """The addresses of this coordinator and of the others that serve."""
        return await self._read(CoordinatorAddresses.serving, *self._own_addresses)
