"""What the entries of the audit log tell, in 32 bytes each: a verification of a long log takes little memory."""

from collections.abc import Collection, Iterable, Iterator

import numpy as np
from blake3 import blake3
from sqlalchemy import select
from sqlalchemy.orm import Session

from federation.record.log_entries import Fact
from storage.models import AuditEntry

_AT_A_TIME = 500  # rows
_HASH = np.dtype("S32")  # values of equal length compare as their bytes do, trailing zeros included


def read_facts(session: Session, actions: Collection[str]) -> Iterator[Fact]:
    """Reads the entries of some actions, in the order of their rows."""
    rows = select(AuditEntry.action, AuditEntry.subject, AuditEntry.digest).where(AuditEntry.action.in_(actions))
    rows = rows.order_by(AuditEntry.entry_id).execution_options(yield_per=_AT_A_TIME)
    for action, subject, digest in session.execute(rows):
        yield Fact(action, subject, digest)


class LoggedFacts:
    """A set of facts that remembers which of them were seen. It keeps only a hash of each fact."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        hashes = bytearray()
        for fact in facts:
            hashes += _hash(fact)
        self._hashes = np.unique(np.frombuffer(hashes, _HASH))
        self._seen = np.zeros(len(self._hashes), np.bool_)

    def see(self, fact: Fact) -> bool:
        """Marks a fact as seen; False if it is not in the set."""
        if (place := self._place(fact)) is None:
            return False
        self._seen[place] = True
        return True

    def has_seen(self, fact: Fact) -> bool:
        """True if a fact is in the set and was seen."""
        return (place := self._place(fact)) is not None and bool(self._seen[place])

    @property
    def all_seen(self) -> bool:
        """True if every fact of the set was seen."""
        return bool(self._seen.all())

    def __contains__(self, fact: Fact) -> bool:
        return self._place(fact) is not None

    def _place(self, fact: Fact) -> int | None:
        sought = np.frombuffer(_hash(fact), _HASH)
        place = int(np.searchsorted(self._hashes, sought)[0])
        found = place < len(self._hashes) and self._hashes[place] == sought[0]
        return place if found else None


def _hash(fact: Fact) -> bytes:
    parts = (fact.action, fact.subject, fact.digest)
    lengths = " ".join(str(len(part)) for part in parts)
    return blake3("".join((lengths, *parts)).encode(errors="surrogatepass")).digest()
