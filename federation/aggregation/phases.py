"""Phases: the questions to clients that an algorithm, a generator, yields in a round.

An algorithm's round yields phases, is sent the replies to each, and returns a step:

    def round(self, context):
        replies = yield Training()
        combination = self.combine(replies.rows(context))
        return Step(replies, combination)

The conductor knows phases, not algorithms. After a crash it runs the generator again and feeds it the stored replies,
so a round must depend on nothing but its context and its replies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.gram import gram, squared_norms
from federation.aggregation.interface import LOCAL_RATE, UNREAD, Combination, Reads, Rows, Vector
from federation.aggregation.streaming import Row
from federation.secure.bounds import EVALUATION, Bounds
from federation.secure.thresholds import Mode
from federation.spec.objective_names import JOINT
from federation.vectors import RowFile
from federation.work.base import Origin, Work
from federation.work.secure.terms import SessionTerms

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Asked:
    """A client that a phase asks, the objectives that it serves, in the task's order, and the round, from 0."""

    client_id: str
    objectives: tuple[str, ...]
    spec: "RunSpec"
    round: int


@dataclass(frozen=True)
class Closing:
    """A phase is done when `wanted` replies are accepted. With fewer than `needed`, the round is skipped."""

    wanted: int
    needed: int


@dataclass(frozen=True, kw_only=True)
class AlgorithmPhase(ABC):
    """A question to some clients.

    Attributes:
        kind: the kind of work that clients are asked for.
        clients: ask these clients only; None asks all that were selected.
    """

    kind: ClassVar[type[Work]]

    clients: tuple[str, ...] | None = None

    @abstractmethod
    def work(self, asked: Asked) -> Work:
        """The work that one client is asked for."""

    def inputs(self) -> Mapping[str, bytes]:
        """The content of each input that every client needs besides the model, by name."""
        return {}

    def own_inputs(self, client_id: str) -> Mapping[str, bytes]:
        """The content of each input for one client alone, by name."""
        return {}

    def transfer_seconds(self) -> float:
        """The seconds by which the deadline of the run's specification is extended, for large replies."""
        return 0.0

    def closes(self, asked: int) -> Closing | None:
        """The closing of the phase with this many clients asked; None leaves it to the run's specification."""
        return None


@dataclass(frozen=True, kw_only=True)
class PhaseReply:
    """One client's answer.

    Attributes:
        client_id: the client.
        samples: training samples that it claims.
        losses: losses of the base model on its training split that it claims, by objective; with several objectives
            also their mean, as "loss".
        metrics: further measurements that it claims, "<split>/<name>". An accuracy that is no share, from 0 to 1, is
            left out here, before any of the readers.
        rows: its update, a row (d,) for each target of the phase, or the rows of its sketch; empty for a phase without
            payload.
        names: of the rows.
        buffers: the averaged buffers of its model after training, no row of the update; None where there are none.
        objectives: those that the client worked on.
        envelope: the digest of its signed envelope, by which the record of the step names the reply.
        payload: the digest of the stored update, by which a later round may recall it; empty where it is not stored.
        statement: a further signed statement of the client; None where the kind of work has none.
        signed: the signed envelope itself, which other members verify; empty where the client signs nothing.
        signed_payload: the digest of the payload in the envelope.
    """

    client_id: str
    samples: int
    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    rows: tuple[Row, ...] = ()
    names: tuple[str, ...] = (JOINT,)
    buffers: Row | None = None
    objectives: tuple[str, ...] = (JOINT,)
    envelope: str = ""
    payload: str = ""
    statement: Any = None
    signed: bytes = b""
    signed_payload: str = ""

    def __post_init__(self) -> None:
        shares = {name: value for name, value in self.metrics.items() if 0 <= value <= 1 or not _is_accuracy(name)}
        object.__setattr__(self, "metrics", shares)  # it is frozen

    @property
    def loss(self) -> float:
        """The loss of the base model; NaN where none is reported."""
        return self.losses.get(JOINT, np.nan)

    @property
    def accuracy(self) -> float:
        """The accuracy of the base model on the training split; NaN where none is reported."""
        return self.metrics.get("train/accuracy", np.nan)

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The rows in memory, by name."""
        rows = (row.read() if isinstance(row, RowFile) else np.asarray(row, dtype=np.float32) for row in self.rows)
        return dict(zip(self.names, rows, strict=True))


def _is_accuracy(name: str) -> bool:
    """True for "<split>/accuracy", and for that of an objective, "<split>/accuracy/<objective>"."""
    return name.split("/", 2)[1:2] == ["accuracy"]


@dataclass(frozen=True, kw_only=True)
class Past:
    """An update (d,) of an earlier round that enters a step once more; `envelope` and `payload` as in `PhaseReply`."""

    client_id: str
    round: int
    envelope: str
    payload: str
    row: Row


class Voided(Exception):
    """Ends this attempt at the round; the next attempt repeats it from its beginning. The message says why.

    Attributes:
        named: members that must have cheated, with the reason: they are asked no more in this run.
        blind: True if a check failed that names nobody.
    """

    def __init__(self, message: str, *, named: Mapping[str, str] = MappingProxyType({}), blind: bool = False) -> None:
        super().__init__(message)
        self.named = dict(named)
        self.blind = blind


class Waiting(Exception):
    """No further attempt can succeed before an operator acts: the run is paused. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The coordinator's data for a session of a private round.

    Attributes:
        purpose: its phase, the kind of work that makes the vectors.
        agreed: the terms.
        terms_bytes: as they are sent.
        taus: tau1 and tau2 from the view of MASK, V and the digests of their masked vectors.
        specification: of the run, as it was submitted.
        bounds: the bounds that members put on coefficients.
        effective_members: E*, as of `privacy.effective_members`.
        asked: the coefficients of W with which members have been asked for their masked vectors, in units of 2^-32;
            None where they have not been asked yet. Another processor may round the Gram matrix's solution differently.
    """

    purpose: str
    agreed: SessionTerms
    terms_bytes: bytes
    taus: Callable[[bytes, Sequence[str], Sequence[bytes]], tuple[bytes, bytes]]
    specification: bytes = b""
    bounds: Bounds = EVALUATION
    effective_members: float = 0.0
    asked: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PrivateSetting:
    """The coordinator's data for a private round.

    Attributes:
        spec: of the run, from which the terms and the work of every session follow.
        document: the same as it was submitted, which members read.
        origin: the run and the model.
        keys: the ids of the signing keys of all members that may be asked, 32 bytes each, by client id.
        named: the members that were named as cheaters in this run.
        blind: the number of attempts at this round that ended in a check that names nobody.
        settle: makes the setting of a session from its phase and its terms without a nonce; the same after a restart.
            Phases distinguish the sessions of one attempt at a round.
    """

    spec: "RunSpec"
    document: bytes
    origin: Origin
    keys: Mapping[str, bytes]
    named: frozenset[str]
    blind: int
    settle: Callable[[str, SessionTerms], Setting]

    @property
    def mode(self) -> Mode:
        """The mode of the sessions of training."""
        return Mode(self.spec.privacy.secure)

    @property
    def clip(self) -> float:
        """C of fedavg and of rules over objectives; 0 where vectors are divided by their length."""
        return self.spec.privacy.clip


def _forgotten(payload: str) -> Row:
    raise LookupError(f"update {payload} cannot be recalled: the updates of earlier rounds are not available")


def _no_pool(purpose: str) -> tuple[str, ...]:
    raise LookupError(f"no client can be drawn for {purpose!r}: the pool of clients is not available")


@dataclass(frozen=True)
class Selected:
    """A client before it is asked: the training samples that it claims, and the objectives that it serves."""

    samples: int
    objectives: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """All inputs of a round besides its replies.

    Attributes:
        number: t, from 0.
        attempt: at the round, from 0.
        total: T, the rounds of the run.
        prior: the source of lambda0: uniform, or the samples of the replies.
        state: the algorithm's state after the last step.
        device: for gram and combine, "cpu" or "cuda".
        recall: the row (d,) of an earlier update by the digest of its payload; LookupError where it is not kept.
        objectives: of the run's task, in its order.
        parameters: d; 0 where it is not known.
        encoder: the columns of the encoder; none where they are not known.
        seed: of the run.
        local_rate: eta_l, the clients' learning rate in this round.
        server_rate: eta_t, the server's learning rate in this round.
        selected: the round's clients.
        draw: makes an independent choice of as many clients as the round selected, by a word for its purpose.
        revoked: the clients that have been revoked by now, and those that had left before the round.
        private: for a private round; None where updates are sent in the clear.
        compares_all: True if K is of all rows, whatever the rule reads: the rate is "auto", which reads it, or the
            record of the round has it.
    """

    number: int
    attempt: int = 0
    total: int
    prior: Literal["uniform", "samples"] = "uniform"
    state: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    recall: Callable[[str], Row] = _forgotten
    objectives: tuple[str, ...] = (JOINT,)
    parameters: int = 0
    encoder: tuple[slice, ...] = ()
    seed: int = 0
    local_rate: float = LOCAL_RATE
    server_rate: float = 1.0
    selected: Mapping[str, Selected] = field(default_factory=dict)
    draw: Callable[[str], tuple[str, ...]] = _no_pool
    revoked: Callable[[], frozenset[str]] = frozenset
    private: PrivateSetting | None = None
    compares_all: bool = False


class Replies(Sequence[PhaseReply]):
    """The accepted replies to one phase, ordered by client id; `declines` has each declining client's reason."""

    def __init__(
        self, replies: Sequence[PhaseReply], *, device: str = "cpu", declines: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._replies = tuple(sorted(replies, key=lambda reply: reply.client_id))
        self.declines = declines
        self._device = device
        self._grams: dict[tuple[str, ...], NDArray[np.float64]] = {}

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def updates(self) -> list[Row]:
        """The rows of the update matrix U: client by client, objective by objective."""
        return [row for reply in self._replies for row in reply.rows]

    @property
    def gram(self) -> NDArray[np.float64]:
        """K = U U^T, shape (m, m); computed once, in one pass over the updates."""
        return self.gram_with(())

    @cached_property
    def squares(self) -> Vector:
        """||u_i||^2, shape (m,); computed once, in one pass over the updates."""
        return squared_norms(self.updates)

    def gram_with(self, history: Sequence[Past]) -> NDArray[np.float64]:
        """K of the updates and, after them, h earlier ones, shape (m + h, m + h); computed once for each `history`."""
        key = tuple(past.payload for past in history)
        if key not in self._grams:
            self._grams[key] = gram([*self.updates, *(past.row for past in history)], device=self._device)
        return self._grams[key]

    def gram_of(self, places: Sequence[int]) -> NDArray[np.float64]:
        """K of the updates at these places."""
        updates = self.updates
        return gram([updates[place] for place in places], device=self._device)

    def gram_over(self, columns: Sequence[slice]) -> NDArray[np.float64]:
        """K of these columns of the updates alone, shape (m, m)."""
        parts = (
            [row.columns(part) if isinstance(row, RowFile) else row[part] for row in self.updates] for part in columns
        )
        return sum((gram(part, device=self._device) for part in parts), np.zeros((1, 1)))

    def reporting(self, kind: Literal["loss", "accuracy"]) -> "Replies":
        """The replies that report a finite number of this kind."""
        reporting = [reply for reply in self._replies if np.isfinite(getattr(reply, kind))]
        return self if len(reporting) == len(self) else Replies(reporting, device=self._device)

    def prior(self, kind: Literal["uniform", "samples"]) -> NDArray[np.float64]:
        """lambda0, shape (m,): 1/m, or in proportion to the samples."""
        m = len(self._replies)
        return np.full(m, 1.0 / m) if kind == "uniform" else self._samples / self._samples.sum()

    @property
    def _samples(self) -> NDArray[np.float64]:
        return np.array([reply.samples for reply in self._replies], dtype=np.float64)

    def rows(
        self,
        context: RoundContext,
        gram: NDArray[np.float64] | None = None,
        cap: float | None = None,
        reads: Reads = Reads.GRAM,
    ) -> Rows:
        """The input of a rule over clients. Each client sent one row; `gram` is their Gram matrix, if it is known.

        With less than all in `reads`, no more is computed of the updates.
        """
        if gram is None:
            gram = self.gram if reads is Reads.GRAM else UNREAD
        losses = np.array([reply.loss for reply in self._replies])
        accuracies = np.array([reply.accuracy for reply in self._replies])
        return Rows(
            gram=gram,
            squares=self.squares if reads is Reads.NORMS else np.empty(0),
            prior=self.prior(context.prior),
            samples=self._samples,
            losses=losses if np.isfinite(losses).all() else None,
            accuracies=accuracies if np.isfinite(accuracies).all() else None,
            clients=tuple(reply.client_id for reply in self._replies),
            round=context.number,
            rounds=context.total,
            local_rate=context.local_rate,
            state=context.state,
            cap=cap,
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a session of a private round, for the signed step.

    Attributes:
        session: its digest.
        purpose: its phase.
        agreed: the terms.
        terms: as they were sent.
        ready: U1.
        members: W.
        survivors: V; none where nothing was summed.
        coefficients: of W, in units of 2^-32; none where nothing was summed.
        tau1, tau2: the challenges; empty unless the mode is `verified`.
        alarms: problems that did not void the session, for operators.
    """

    session: bytes
    purpose: str
    agreed: SessionTerms
    terms: bytes
    ready: tuple[str, ...]
    members: tuple[str, ...]
    survivors: tuple[str, ...]
    coefficients: tuple[int, ...]
    tau1: bytes = b""
    tau2: bytes = b""
    alarms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """The end of a round: the direction is sum_i coefficients[i] * rows[i], or follows from `combination.coordinates`.

    A step may be a vector that is combined already, such as a sum that was decoded from masked replies. Then no update
    is known, the one row is that vector, and its coefficient is 1.

    Attributes:
        replies: the replies whose rows are combined.
        combination: their coefficients and weights, the algorithm's next state, diagnostics.
        history: updates of earlier rounds, whose rows follow those of the replies.
        consulted: the replies to the round's earlier phases that the combination was found from.
        forgotten: clients that were revoked or have left, whose updates the algorithm's state no longer refers to.
        combined: the vector that is combined already, (d,); None where the rows of the replies are combined.
        size: the factor of the direction besides the server's learning rate, from a line search.
        sessions: the results of the sessions of a private round, in order; none where updates were sent in the clear.
        named: members that cheated without effect, with the reason: they are asked no more in this run.
        gram_rows: the places of the rows that `gram` is of; none: of all rows.
    """

    replies: Replies
    combination: Combination
    history: tuple[Past, ...] = ()
    consulted: tuple[PhaseReply, ...] = ()
    forgotten: tuple[str, ...] = ()
    combined: NDArray[np.float32] | None = None
    size: float = 1.0
    sessions: tuple[Record, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    gram_rows: tuple[int, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """The rows that are combined: those of the replies, then those of earlier rounds; or the combined vector."""
        if self.combined is not None:
            return [self.combined]
        return [*self.replies.updates, *(past.row for past in self.history)]

    @cached_property
    def gram(self) -> NDArray[np.float64]:
        """K over `rows`, or over those in `gram_rows`."""
        if self.combined is not None:
            return gram([self.combined])
        if self.gram_rows:
            return self.replies.gram_of(self.gram_rows)
        return self.replies.gram_with(self.history)

    @property
    def squares(self) -> Vector:
        """||u_i||^2 over `rows`, shape (m,)."""
        return self.replies.squares if self.gram_rows else np.diagonal(self.gram)


RoundGenerator = Generator[AlgorithmPhase, Replies, Step]
