"""The members that call, as the record has them: their rows are read once, and used until this process changes any."""

import threading
from dataclasses import dataclass

from storage.database import Database
from storage.states import ClientState

TABLES = ("clients", "certificates", "rotations")
MOST = 10_000  # certificates


@dataclass(frozen=True)
class KnownMember:
    """A member as its row and that of the certificate with which it calls have it.

    Attributes:
        certificate: in DER.
        state: ACTIVE or PENDING; others are read on each call.
        signing_key: its present public key, 32 raw bytes.
        start: of its worker, in hexadecimal digits; empty if it has told none.
    """

    certificate: bytes
    state: ClientState
    signing_key: bytes
    start: str


class KnownMembers:
    """Members by the serial numbers of their certificates, for several threads.

    All are forgotten with each transaction of this process that changes a row of members, certificates or rotations: a
    revocation, a withdrawal, a renewal, a rotation, an approval, a new start. With a database that other processes
    change, nothing is remembered. The end of a certificate is compared on each call.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        # The members, and the number of changes at which they were read: one object, so that they fit each other.
        self._memory: tuple[int | None, dict[str, KnownMember]] = (None, {})

    def changes(self) -> int | None:
        """To be called before a member is read that is then noted."""
        return self._database.changes(*TABLES)

    def find(self, serial: str) -> KnownMember | None:
        """The member with this certificate, if nothing about members has changed since it was read."""
        read_at, known = self._memory
        return known.get(serial) if read_at is not None and read_at == self.changes() else None

    def note(self, serial: str, member: KnownMember, changes: int | None) -> None:
        """Remembers a member that was read after `changes` had this value."""
        with self._lock:
            if changes is None or changes != self.changes():
                return
            if changes != self._memory[0] or len(self._memory[1]) >= MOST:
                self._memory = (changes, {})
            self._memory[1][serial] = member
