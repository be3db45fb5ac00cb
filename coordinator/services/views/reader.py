"""The parts from which the record is shown, by a coordinator that serves or by a command on its machine."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from coordinator.rounds.fleets.presence import Presence
from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.settings import Settings
from coordinator.thread_pool import ThreadPool
from federation.trust.key_chain import KeyChain
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
    threads: ThreadPool
    blobs: BlobStore
    presence: Presence
    clock: Callable[[], datetime]


class RecordViews:
    """The base of classes that show the record."""

    def __init__(self, parts: RecordParts) -> None:
        self._settings = parts.settings
        self._read = parts.threads.read
        self._blobs = parts.blobs
        self._presence = parts.presence
        self._checks = EnvelopeChecks(parts.settings.federation_id, parts.chain)
        self._clock = parts.clock
