"""The canonical bytes of an entry of the audit log, from which its leaf in the log's tree is computed."""

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from federation.record.merkle import HASH_BYTES, leaf_hash

FIRST = bytes(HASH_BYTES)  # takes the place of the previous leaf in the first entry
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CONTEXT = b"fedpareto/v1/entry\0"
# Actions whose entries are about an envelope, or about a round that has none.
ISSUED = "assignment.issued"
DECLINED = "assignment.declined"
ACCEPTED = "reply.accepted"
REFUSED = "reply.refused"
EQUIVOCATED = "reply.equivocation"
STEPPED = "round.stepped"
SKIPPED = "round.skipped"
MEASURED = "round.measured"  # the end of a round that only measures a model, whose digest is in the entry
DESCRIBED = "round.described"  # the end of a round that describes data; the digest is that of its signed result
SUBMITTED = "run.submitted"


@dataclass(frozen=True, slots=True)
class Fact:
    """The content of an entry without its time and its actor.

    Attributes:
        action, subject: as in the entry.
        digest: of the envelope that the entry is about; empty without one.
    """

    action: str
    subject: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogEntry:
    """An entry as the log binds it.

    Attributes:
        number: its place in the log, from 0.
        entry_id: the key of its row; ids grow with gaps, and not in the order of the log.
        at: the time of the event, aware, to the microsecond.
        actor: the SAN URI of a certificate, "peer ADDRESS", "coordinator", or a command on the coordinator's machine.
        action: an rpc ("Submit") or an event ("run.completed").
        subject: of the event: a run, a client, an assignment.
        outcome: the reason of a refusal; empty otherwise.
        detail: more, as text.
        digest: of the envelope or object that it is about; empty without one.
        times: the number of times that it happened.
    """

    number: int
    entry_id: int
    at: datetime
    actor: str
    action: str
    subject: str
    outcome: str
    detail: str
    digest: str
    times: int

    def encode(self, previous: bytes) -> bytes:
        """The canonical bytes, with the leaf of the entry before (FIRST for the first).

        The context, then `previous`, then number, entry_id, at in microseconds since 1970, and times as big-endian
        64-bit integers, then each text in UTF-8 after its length as a big-endian 32-bit integer.
        """
        microseconds = (self.at - EPOCH) // timedelta(microseconds=1)
        parts = [_CONTEXT, previous, struct.pack(">QQqQ", self.number, self.entry_id, microseconds, self.times)]
        for text in (self.actor, self.action, self.subject, self.outcome, self.detail, self.digest):
            data = text.encode()
            parts += (struct.pack(">I", len(data)), data)
        return b"".join(parts)

    def leaf(self, previous: bytes) -> bytes:
        """The leaf of the entry in the log's tree, 32 bytes."""
        return leaf_hash(self.encode(previous))
