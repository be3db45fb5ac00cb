"""A client's site: its owner's decisions about private rounds, and the records that outlive a round."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, get_args

from blake3 import blake3
from pydantic import Field

from federation.secure.thresholds import BLUR, EVALUATION_NOISE, LARGEST, SMALLEST, Mode, assumed
from federation.spec.problems import Section
from federation.spec.run_sections import Scalar
from federation.statistics.rules import MemberRules

EVALUATE = "evaluate"
"""The kind of work whose vectors are metrics."""
STATISTICS = "statistics"
"""The kind of work whose vectors are integers, which describe the data."""
FAILURES = 3
"""Failed computations of private sessions in a row, after which a data set takes part in none."""
SCALARS: tuple[Scalar, ...] = get_args(Scalar)
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


class SecurePolicy(Section):
    """The owner's rules for the private rounds of one task: a section of policy.toml."""

    required: bool = Field(
        False,
        description="Whether the worker declines work that shows an update or a gradient in the clear, with "
        "[`policy:required`](reference/reasons.md#reasons-of-a-worker). For evaluations see [Private "
        "rounds](member/privacy.md#the-limits-of-an-owner).",
    )
    modes: Annotated[tuple[Annotated[Mode, Field(strict=False)], ...], Field(strict=False)] = Field(
        tuple(Mode),
        description="The [modes](reference/run-spec.md#privacy) of private rounds that are allowed.",
    )
    assumed: int | None = Field(
        None,
        ge=0,
        description="The number of colluding members that a private round must withstand. Without the key it is (N "
        "- 1) / 4, rounded down, of a [roster](member/privacy.md#rosters) of N members.",
    )
    smallest: int = Field(
        SMALLEST,
        ge=SMALLEST,
        le=LARGEST,
        description=f"The fewest members in a private round, {SMALLEST} to {LARGEST}.",
    )
    disclose: Annotated[tuple[Scalar, ...], Field(strict=False)] = Field(
        (),
        description='Numbers that may be shown in the clear: `"loss"` and `"accuracy"` on the training split, the '
        '`"norm"` of an update, and `"evaluation"`.',
    )
    sessions: int = Field(
        1000, ge=0, description="The most private rounds of training that a data set may take part in, over all runs."
    )
    evaluations: int = Field(
        1000,
        ge=0,
        description="The most evaluations that a data set may take part in, over all runs: private ones and, with "
        "`secure.required`, those in the clear.",
    )
    sessions_per_model: int = Field(
        4,
        ge=0,
        description="The most private rounds of one [kind of work](member/privacy.md#the-limits-of-an-owner) "
        "that may start from one model.",
    )
    sums_per_model: int = Field(
        1,
        ge=0,
        description="The most sums of one [kind of work](member/privacy.md#the-limits-of-an-owner) that may be "
        "unmasked for one model. Two sums of which one lacks this member show its update. The worker sends masked "
        "vectors in at most two sessions more.",
    )
    effective_members: float | None = Field(
        None,
        ge=1,
        le=LARGEST,
        description="The least [cover](reference/private-protocol.md#35-coefficients) of this member's vector in a "
        "sum. Without the key it is (n_min - t) / 2 of the members of the round, at least 2. A larger number hides "
        "the vector better, and refuses more rounds.",
    )
    blur: float = Field(
        BLUR,
        ge=0,
        description="The least size of the noise by which members [blur their "
        "updates](member/privacy.md#what-a-private-round-does-not-hide) in a private round. If the run has less "
        "(`privacy.blur`), the worker declines with `policy:blur`.",
    )
    evaluation_noise: float = Field(
        EVALUATION_NOISE,
        ge=0,
        description="The least [noise](member/privacy.md#what-a-private-round-does-not-hide) on a private "
        "evaluation. If the run has less (`privacy.evaluation_noise`), the worker declines the evaluation with "
        "`policy:evaluation-noise`.",
    )


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


@dataclass(frozen=True)
class DescribedEntry:
    """A sum of statistics for which a data set was masked, or a run in which it was described in the open.

    Attributes:
        session: the hexadecimal digest of the session; of an open run, its name and the task.
        run_id, task: of the work.
        question: the digest of the columns, ranges, bins and splits.
        masked: W, for which it was masked; none of an open run.
        confirmed: V, which this site has confirmed; none before CONFIRM.
    """

    session: str
    run_id: str
    task: str
    question: str
    masked: tuple[str, ...]
    confirmed: tuple[str, ...] = ()

    @property
    def work(self) -> str:
        """The kind of work of the members' vectors."""
        return STATISTICS


class SessionLedger(ABC):
    """The sessions that count, over all runs, which are never erased; the latest failures in a row; statistics.

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
    def described(self, tasks: Collection[str]) -> Sequence[DescribedEntry]:
        """The sums of statistics of some tasks; they are never erased."""

    @abstractmethod
    def describe(self, entry: DescribedEntry) -> None:
        """Records an entry durably before this returns; a second time changes nothing. Raises OSError if it cannot."""

    @abstractmethod
    def confirm(self, session: str, members: Sequence[str]) -> None:
        """Records durably that this site confirms V in a session with statistics. Raises OSError if it cannot."""

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
        self._described: dict[str, DescribedEntry] = {}

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

    def described(self, tasks: Collection[str]) -> Sequence[DescribedEntry]:
        """The sums of statistics of some tasks."""
        return [entry for entry in self._described.values() if entry.task in tasks]

    def describe(self, entry: DescribedEntry) -> None:
        """Records an entry; a second time changes nothing."""
        self._described.setdefault(entry.session, entry)

    def confirm(self, session: str, members: Sequence[str]) -> None:
        """Records that V is confirmed in a session with statistics."""
        self._described[session] = replace(self._described[session], confirmed=tuple(members))

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
        algorithms: the names of algorithms that the owner allows by name, known to this worker or not.
        evaluations_ahead: evaluations in a run beyond its sessions of training that count. Only a simulation has any,
            since its ledger ends with its process.
        failures: computations of private sessions that may fail in a row, before the owner has to look. Only a
            simulation has more: it has no owner who looks.
        statistics: the owner's rules of the tasks whose statistics may be told in the open, by task.
        summed: the same of the tasks whose statistics may enter private sums.
        stretch: the length of the vector that this client enters into private rounds; above 1 for an attacker.
    """

    roster: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, SecurePolicy] = field(default_factory=lambda: MappingProxyType({}))
    data_sets: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    ledger: SessionLedger = field(default_factory=MemoryLedger)
    open_reply: Callable[[bytes, Mapping[str, bytes]], PeerReply] = _no_peers
    new_secret: Callable[[str], bytes] | None = None
    algorithms: frozenset[str] = frozenset()
    evaluations_ahead: int = 0
    failures: int = FAILURES
    statistics: Mapping[str, MemberRules] = field(default_factory=lambda: MappingProxyType({}))
    summed: Mapping[str, MemberRules] = field(default_factory=lambda: MappingProxyType({}))
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
