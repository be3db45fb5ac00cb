"""The parts from which the record is shown, by a coordinator that serves or by a command on its machine."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.rounds.presence import Presence
from coordinator.services.checks import EnvelopeChecks
from coordinator.settings import Settings
from coordinator.threads import Threads
from federation.key_chain import KeyChain
from storage.blobs import BlobStore


@dataclass(frozen=True, kw_only=True)
class RecordParts:
    """The parts from which the record is shown.

    Attributes:
        settings: of the coordinator.
        chain: the public keys with which the coordinator has signed.
        clock: the time, aware.
    """

    settings: Settings
    chain: KeyChain
    threads: Threads
    blobs: BlobStore
    presence: Presence
    clock: Callable[[], datetime]


class Reader:
    """The base of what shows the record."""

    def __init__(self, parts: RecordParts) -> None:
        self._settings = parts.settings
        self._read = parts.threads.read
        self._blobs = parts.blobs
        self._presence = parts.presence
        self._checks = EnvelopeChecks(parts.settings.federation_id, parts.chain)
        self._clock = parts.clock
