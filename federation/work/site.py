"""A client's site: what its owner decided about private rounds, and what the site remembers beyond a round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from federation.secure.thresholds import SMALLEST, Mode, assumed

SCALARS = ("accuracy", "evaluation", "loss", "norm")
"""What an owner may let members show besides sums: numbers of the training split, an evaluation, an update's length."""


@dataclass(frozen=True)
class PeerReply:
    """Another member's reply, whose signature by the key of the pinned roster holds.

    Attributes:
        client_id: who signed it.
        federation_id, run_id, round, attempt, base_model, spec, task: as in its assignment.
        statement: what it says besides; None where there is none.
    """

    client_id: str
    federation_id: str
    run_id: str
    round: int
    attempt: int
    base_model: str
    spec: str
    task: str
    statement: Any


@dataclass(frozen=True)
class SecurePolicy:
    """What the owner allows of private rounds, for one task.

    Attributes:
        required: decline all work that shows an update, or a gradient, in the clear.
        modes: those that are allowed.
        assumed: the number of colluding members to withstand; None is floor((N - 1) / 4) of a pinned roster of N.
        smallest: members that a session needs at least.
        disclose: the numbers that may be shown besides, of `SCALARS`.
        sessions: of training that this data set may take part in, over all runs.
        evaluations: likewise of evaluation.
        sessions_per_model: sessions of training that may start from one model.
    """

    required: bool = False
    modes: frozenset[Mode] = frozenset(Mode)
    assumed: int | None = None
    smallest: int = SMALLEST
    disclose: frozenset[str] = frozenset()
    sessions: int = 1000
    evaluations: int = 1000
    sessions_per_model: int = 4


@dataclass(frozen=True)
class SessionEntry:
    """A session that counts: this site answered OPEN 1 or MASK in it. `session` is hexadecimal."""

    session: str
    run_id: str
    task: str
    base_model: str
    evaluation: bool


class SessionLedger(ABC):
    """The sessions that count, over all runs. It is never erased."""

    @abstractmethod
    def entries(self, task: str) -> Sequence[SessionEntry]:
        """Those of a task."""

    @abstractmethod
    def add(self, entry: SessionEntry) -> None:
        """Records one durably before this returns; a second time changes nothing. Raises OSError if it cannot."""


class MemoryLedger(SessionLedger):
    """A ledger that ends with its process, for simulations."""

    def __init__(self) -> None:
        self._entries: dict[str, SessionEntry] = {}

    def entries(self, task: str) -> Sequence[SessionEntry]:
        """Those of a task."""
        return [entry for entry in self._entries.values() if entry.task == task]

    def add(self, entry: SessionEntry) -> None:
        """Records one; a second time changes nothing."""
        self._entries.setdefault(entry.session, entry)


def _no_peers(envelope: bytes, roster: Mapping[str, bytes]) -> PeerReply:
    raise ValueError("this client reads no replies of others")


@dataclass(frozen=True, eq=False)
class Site:
    """What a kind of work may ask of a client's site.

    Attributes:
        roster: the raw Ed25519 keys of all members by client id, pinned by the owner; empty without a roster.
        policies: by task; others have the defaults.
        ledger: of sessions.
        open_reply: the reply in an envelope, verified with the keys of a roster. Raises ValueError if it is not signed
            by one of them, or not a reply.
        new_secret: 32 random bytes for the purpose that is named.
        stretch: the length of the vector that this client enters into private rounds; above 1 for an attacker.
    """

    roster: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, SecurePolicy] = field(default_factory=lambda: MappingProxyType({}))
    ledger: SessionLedger = field(default_factory=MemoryLedger)
    open_reply: Callable[[bytes, Mapping[str, bytes]], PeerReply] = _no_peers
    new_secret: Callable[[str], bytes] | None = None
    stretch: float = 1.0

    def key_id(self, client_id: str) -> bytes | None:
        """The id of a member's pinned key: the BLAKE3 digest of its 32 bytes; None for somebody else."""
        key = self.roster.get(client_id)
        return None if key is None else blake3(key).digest()

    def policy(self, task: str) -> SecurePolicy:
        """What the owner allows of a task."""
        return self.policies.get(task, SecurePolicy())

    def sessions_left(self, task: str, *, evaluation: bool, besides: str = "") -> int:
        """How many more sessions of a task the owner allows; the one named `besides` is not counted."""
        policy = self.policy(task)
        counted = [one for one in self.ledger.entries(task) if one.evaluation == evaluation and one.session != besides]
        return max(0, (policy.evaluations if evaluation else policy.sessions) - len(counted))

    def assumed(self, task: str) -> int:
        """Colluding members that the owner assumes."""
        chosen = self.policy(task).assumed
        return assumed(len(self.roster)) if chosen is None else chosen
