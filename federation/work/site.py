"""A client's site: its owner's decisions about private rounds, and the records that outlive a round."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from federation.secure.thresholds import BLUR, EVALUATION_NOISE, SMALLEST, Mode, assumed

EVALUATE = "evaluate"
"""The kind of work whose vectors are metrics."""
FAILURES = 3
"""Failed computations of private sessions in a row, after which a data set takes part in none."""
SCALARS = ("accuracy", "evaluation", "loss", "norm")
"""The numbers that an owner may disclose besides sums: of the training split, of an evaluation, an update's length."""


@dataclass(frozen=True)
class PeerReply:
    """Another member's reply, whose signature by the key of the pinned roster holds.

    Attributes:
        client_id: the member that signed it.
        federation_id, run_id, round, attempt, base_model, spec, task: as in its assignment.
        samples: training samples that it claims.
        statement: its statement; None without one.
    """

    client_id: str
    federation_id: str
    run_id: str
    round: int
    attempt: int
    base_model: str
    spec: str
    task: str
    samples: int
    statement: Any


@dataclass(frozen=True)
class SecurePolicy:
    """The permissions of the owner for private rounds, for one task.

    Attributes:
        required: decline all work that shows an update, or a gradient, in the clear.
        modes: the allowed ones.
        assumed: the number of colluding members to withstand; None is floor((N - 1) / 4) of a pinned roster of N.
        smallest: the least number of members of a session.
        disclose: the numbers of `SCALARS` that may be shown besides.
        sessions: the most sessions of training with this data set, over all runs.
        evaluations: the most sessions of evaluation, likewise.
        sessions_per_model: sessions of one kind of work that may start from one model.
        sums_per_model: sums of one kind of work that may be unmasked for one model.
        effective_members: E*, the least cover of this member in a sum; None for that of the cohort.
        blur: the least size of the noise by which members blur their updates.
        evaluation_noise: the least sigma of the noise on a private evaluation.
        algorithms: the names of algorithms that the owner allows by name, known to this worker or not.
        evaluations_ahead: evaluations in a run beyond its sessions of training that count. Only a simulation has any,
            since its ledger ends with its process.
        failures: computations of private sessions that may fail in a row, before the owner has to look. Only a
            simulation has more: it has no owner who looks.
    """

    required: bool = False
    modes: frozenset[Mode] = frozenset(Mode)
    assumed: int | None = None
    smallest: int = SMALLEST
    disclose: frozenset[str] = frozenset()
    sessions: int = 1000
    evaluations: int = 1000
    sessions_per_model: int = 4
    sums_per_model: int = 1
    effective_members: float | None = None
    blur: float = BLUR
    evaluation_noise: float = EVALUATION_NOISE
    algorithms: frozenset[str] = frozenset()
    evaluations_ahead: int = 0
    failures: int = FAILURES


@dataclass(frozen=True)
class SessionEntry:
    """A session that counts: this site answered OPEN 1 or MASK in it, or showed numbers at READY.

    An evaluation in the clear, where the owner requires private rounds, is an entry too.

    Attributes:
        session: the hexadecimal digest of the session, or the name of the question of the evaluation.
        run_id, task, base_model: of the work.
        work: the kind of work of the members' vectors, which is a phase of the run's algorithm.
        masked, unmasked: True if this site has answered MASK, UNMASK.
    """

    session: str
    run_id: str
    task: str
    base_model: str
    work: str
    masked: bool = False
    unmasked: bool = False

    @property
    def evaluation(self) -> bool:
        """True if metrics were summed, or shown."""
        return self.work == EVALUATE


@dataclass(frozen=True)
class FailedSession:
    """A session whose computation failed at this site.

    Attributes:
        session: the hexadecimal digest of the session.
        run_id, round, task, work: as of `SessionEntry`; the round counts from 0.
        error: for the owner alone.
    """

    session: str
    run_id: str
    round: int
    task: str
    work: str
    error: str


class SessionLedger(ABC):
    """The sessions that count, over all runs, which are never erased; and the latest failures in a row.

    Hold `lock` to read and then add.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    @abstractmethod
    def entries(self, tasks: Collection[str]) -> Sequence[SessionEntry]:
        """The entries of some tasks."""

    @abstractmethod
    def add(self, entry: SessionEntry) -> None:
        """Records an entry durably before this returns; a second time changes nothing. Raises OSError if it cannot."""

    @abstractmethod
    def mask(self, session: str) -> None:
        """Records durably that this site answers MASK in a session that counts. Raises OSError if it cannot."""

    @abstractmethod
    def unmask(self, session: str) -> None:
        """Records durably that this site answers UNMASK in a session that counts. Raises OSError if it cannot."""

    @abstractmethod
    def failures(self, tasks: Collection[str]) -> Sequence[FailedSession]:
        """The sessions of some tasks whose computations failed since the last of the same kind that did not."""

    @abstractmethod
    def fail(self, failed: FailedSession) -> None:
        """Records a failed computation durably; the same session is recorded once. Raises OSError if it cannot."""

    @abstractmethod
    def succeed(self, tasks: Collection[str], work: str = "") -> None:
        """Ends the row of failures of some tasks, durably: of one kind of work, or of all. Raises OSError if it cannot.

        A site whose training always fails is found, although its evaluations succeed.
        """


class MemoryLedger(SessionLedger):
    """A ledger that ends with its process, for simulations."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, SessionEntry] = {}
        self._failed: dict[str, FailedSession] = {}

    def entries(self, tasks: Collection[str]) -> Sequence[SessionEntry]:
        """The entries of some tasks."""
        return [entry for entry in self._entries.values() if entry.task in tasks]

    def add(self, entry: SessionEntry) -> None:
        """Records an entry; a second time changes nothing."""
        self._entries.setdefault(entry.session, entry)

    def mask(self, session: str) -> None:
        """Records that MASK was answered in a session that counts."""
        self._entries[session] = replace(self._entries[session], masked=True)

    def unmask(self, session: str) -> None:
        """Records that UNMASK was answered in a session that counts."""
        self._entries[session] = replace(self._entries[session], unmasked=True)

    def failures(self, tasks: Collection[str]) -> Sequence[FailedSession]:
        """The sessions of some tasks whose computations failed since the last of the same kind that did not."""
        return [failed for failed in self._failed.values() if failed.task in tasks]

    def fail(self, failed: FailedSession) -> None:
        """Records a failed computation; the same session is recorded once."""
        self._failed.setdefault(failed.session, failed)

    def succeed(self, tasks: Collection[str], work: str = "") -> None:
        """Ends the row of failures of some tasks: of one kind of work, or of all."""
        self._failed = {
            name: failed
            for name, failed in self._failed.items()
            if failed.task not in tasks or work not in ("", failed.work)
        }


def _no_peers(envelope: bytes, roster: Mapping[str, bytes]) -> PeerReply:
    raise ValueError("this client reads no replies of others")


@dataclass(frozen=True, eq=False)
class Site:
    """The services of a client's site for kinds of work.

    Attributes:
        roster: the raw Ed25519 keys of all members by client id, pinned by the owner; empty without a roster.
        policies: by task; others have the defaults.
        data_sets: for each task the tasks that train on the same data set, itself among them; others are alone.
        ledger: of sessions.
        open_reply: the reply in an envelope, verified with the keys of a roster. Raises ValueError if it is not signed
            by one of them, or not a reply.
        new_secret: returns 32 random bytes for a named purpose.
        stretch: the length of the vector that this client enters into private rounds; above 1 for an attacker.
    """

    roster: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, SecurePolicy] = field(default_factory=lambda: MappingProxyType({}))
    data_sets: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    ledger: SessionLedger = field(default_factory=MemoryLedger)
    open_reply: Callable[[bytes, Mapping[str, bytes]], PeerReply] = _no_peers
    new_secret: Callable[[str], bytes] | None = None
    stretch: float = 1.0

    def key_id(self, client_id: str) -> bytes | None:
        """The id of a member's pinned key: the BLAKE3 digest of its 32 bytes; None for other clients."""
        key = self.roster.get(client_id)
        return None if key is None else blake3(key).digest()

    def policy(self, task: str) -> SecurePolicy:
        """The permissions of the owner for a task."""
        return self.policies.get(task, SecurePolicy())

    def tasks_beside(self, task: str) -> frozenset[str]:
        """The tasks that train on the data set of a task, itself among them."""
        return self.data_sets.get(task, frozenset({task}))

    def counted(self, task: str) -> Sequence[SessionEntry]:
        """The sessions that count for the data set of a task."""
        return self.ledger.entries(self.tasks_beside(task))

    def sessions_left(self, task: str, *, evaluation: bool) -> int:
        """The number of further sessions of a task that the owner allows."""
        policy = self.policy(task)
        used = sum(entry.evaluation == evaluation for entry in self.counted(task))
        return max(0, (policy.evaluations if evaluation else policy.sessions) - used)

    def assumed(self, task: str) -> int:
        """The number of colluding members that the owner assumes."""
        chosen = self.policy(task).assumed
        return assumed(len(self.roster)) if chosen is None else chosen
