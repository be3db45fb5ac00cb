"""A round is a conversation, an algorithm is a generator.

An algorithm's round yields phases, is sent the replies to each, and returns a step:

    def round(self, context):
        replies = yield Training()
        combination = self.combine(replies.rows(context))
        return Step(replies, combination)

The conductor knows phases, not algorithms. After a crash it runs the generator again and feeds it the stored replies,
so a round must depend on nothing but its context and its replies.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.gram import gram
from coordinator.aggregation.rules import LOCAL_RATE, Combination, Rows
from coordinator.aggregation.streaming import Row
from federation.objectives import JOINT, Targets, joint_target, separate_targets
from federation.vectors import RowFile, payload_bytes, update_layout
from federation.work.base import Work
from federation.work.computation import LocalSgd
from federation.work.evaluate.work import Evaluate
from federation.work.jacobian.work import Jacobian
from federation.work.residual.work import REFERENCE, Residual
from federation.work.search.work import DIRECTION, Search, direction_layout
from federation.work.train.work import Train

if TYPE_CHECKING:
    from federation.runs import RunSpec

TRAIN_ACCURACY = "train/accuracy"


@dataclass(frozen=True)
class Asked:
    """A client that a phase asks.

    Attributes:
        client_id: its name.
        objectives: those that it serves, in the task's order.
        spec: of the run.
    """

    client_id: str
    objectives: tuple[str, ...]
    spec: "RunSpec"


@dataclass(frozen=True)
class Closing:
    """When a phase is done.

    Attributes:
        wanted: the phase is closed as soon as this many replies are accepted.
        needed: with fewer replies, the round is skipped.
    """

    wanted: int
    needed: int


@dataclass(frozen=True, kw_only=True)
class Phase(ABC):
    """A question to some clients.

    Attributes:
        kind: the kind of work that clients are asked for.
        clients: ask these clients only; None asks all that were selected.
    """

    kind: ClassVar[type[Work]]

    clients: tuple[str, ...] | None = None

    @abstractmethod
    def work(self, asked: Asked) -> Work:
        """What one client is asked to do."""

    def inputs(self) -> Mapping[str, bytes]:
        """The content of what every client needs besides the model, by name."""
        return {}

    def own_inputs(self, client_id: str) -> Mapping[str, bytes]:
        """The content of what one client alone needs, by name."""
        return {}

    def closes(self, asked: int) -> Closing | None:
        """When the phase is done, asked of this many clients; None leaves it to the run's specification."""
        return None


@dataclass(frozen=True, kw_only=True)
class Training(Phase):
    """Ask clients to train from the current model.

    Attributes:
        separate: each client sends a row for each of its objectives, trained for that one alone, and not one row that
            descends them together.
        weights: of the objectives in the loss of that one row; None is the mean of the client's own.
        from_jacobian: the first step is made of the gradients of the round's `Gradients`.
        measure: measure the base model on the training split first.
    """

    kind: ClassVar[type[Work]] = Train

    separate: bool = False
    weights: Mapping[str, float] | None = None
    from_jacobian: bool = False
    measure: bool = True

    def targets(self, objectives: Sequence[str]) -> Targets:
        """What the rows of a client that serves these objectives descend."""
        return separate_targets(objectives) if self.separate else joint_target(objectives, self.weights)

    def work(self, asked: Asked) -> Train:
        """Local SGD as the specification says it."""
        return Train(
            sgd=LocalSgd.of(asked.spec.train),
            targets=self.targets(asked.objectives),
            from_jacobian=self.from_jacobian,
            measure=self.measure and asked.spec.train.measure,
        )


@dataclass(frozen=True, kw_only=True)
class Gradients(Phase):
    """Ask for a sketch of the gradients of each client's objectives at the current model, on one minibatch.

    Attributes:
        sketch: which one, by name; see federation.sketches.
        budget: the floats that it may take, as a share of the columns that count.
        batch_size: samples in the minibatch; 0 is the whole training split, None what the run trains with.
        encoder_only: only the columns of the encoder count.
        measure: measure the base model on the training split, too.
    """

    kind: ClassVar[type[Work]] = Jacobian

    sketch: str
    budget: float
    batch_size: int | None = None
    encoder_only: bool = False
    measure: bool = False

    def work(self, asked: Asked) -> Jacobian:
        """The gradients of all objectives that the client serves."""
        return Jacobian(
            sketch=self.sketch,
            budget=self.budget,
            batch_size=asked.spec.train.batch_size if self.batch_size is None else self.batch_size,
            objectives=asked.objectives,
            encoder_only=self.encoder_only,
            measure=self.measure,
        )


@dataclass(frozen=True, kw_only=True)
class Residuals(Phase):
    """Ask what the sketches of the round's gradients lost, against what they add up to.

    Attributes:
        gradients: the phase that the sketches were made for.
        reference: what they add up to, itself a sketch: rows by name.
        objectives: those of the reference.
    """

    kind: ClassVar[type[Work]] = Residual

    gradients: Gradients
    reference: Mapping[str, NDArray[np.float32]]
    objectives: tuple[str, ...]

    def work(self, asked: Asked) -> Residual:
        """What was lost of the client's own sketch."""
        return Residual(jacobian=self.gradients.work(asked), objectives=self.objectives)

    def inputs(self) -> Mapping[str, bytes]:
        """The reference."""
        layout = update_layout([(name, len(values)) for name, values in self.reference.items()])
        return {REFERENCE: b"".join(payload_bytes(layout, self.reference))}


@dataclass(frozen=True, kw_only=True)
class Evaluation(Phase):
    """Ask clients to evaluate a model on their own splits.

    Attributes:
        splits: of "train", "validation", "test".
    """

    kind: ClassVar[type[Work]] = Evaluate

    splits: tuple[str, ...]

    def work(self, asked: Asked) -> Evaluate:
        """The same for everybody."""
        return Evaluate(splits=self.splits)


@dataclass(frozen=True, kw_only=True)
class LineSearch(Phase):
    """Ask for the losses on the training splits at several steps along one direction.

    Attributes:
        direction: d, (d,).
        steps: the clients measure w_t - s d for each step s.
    """

    kind: ClassVar[type[Work]] = Search

    direction: NDArray[np.float32]
    steps: tuple[float, ...]

    def work(self, asked: Asked) -> Search:
        """The same for everybody."""
        return Search(steps=self.steps)

    def inputs(self) -> Mapping[str, bytes]:
        """The direction."""
        return {DIRECTION: b"".join(payload_bytes(direction_layout(len(self.direction)), {DIRECTION: self.direction}))}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one client answered.

    Attributes:
        client_id: the client.
        samples: training samples that it claims.
        losses: losses of the base model on its training split, by objective, as it claims; with several objectives
            also their mean, as "loss".
        metrics: further measurements, "<split>/<name>".
        rows: its update, a row (d,) for each target of the phase, or the rows of its sketch; empty for a phase without
            payload.
        names: of the rows.
        objectives: those that the client worked on.
        envelope: the digest of its signed envelope, by which the record of the step names the reply.
        payload: the digest of the stored update, by which a later round may recall it; empty where it is not stored.
    """

    client_id: str
    samples: int
    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    rows: tuple[Row, ...] = ()
    names: tuple[str, ...] = (JOINT,)
    objectives: tuple[str, ...] = (JOINT,)
    envelope: str = ""
    payload: str = ""


@dataclass(frozen=True, kw_only=True)
class Past:
    """An update of an earlier round that enters a step once more.

    Attributes:
        client_id: whose it was.
        round: when, from 0.
        envelope: the digest of its signed envelope.
        payload: the digest of the stored update.
        row: the update, (d,).
    """

    client_id: str
    round: int
    envelope: str
    payload: str
    row: Row


class Voided(Exception):
    """An algorithm gives up this attempt at the round, and another one is made; the message says why."""


def _forgotten(payload: str) -> Row:
    raise LookupError(f"update {payload} cannot be recalled: none of the earlier rounds is at hand")


def _nobody(purpose: str) -> tuple[str, ...]:
    raise LookupError(f"nobody can be drawn for {purpose!r}: there is no pool of clients at hand")


@dataclass(frozen=True)
class Selected:
    """What is known of a client before it is asked.

    Attributes:
        samples: training samples that it claims.
        objectives: those that it serves.
    """

    samples: int
    objectives: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What a round may depend on besides its replies.

    Attributes:
        number: t, from 0.
        attempt: at the round, from 0.
        total: T, the rounds of the run.
        prior: how lambda0 is made from the replies, before any rule looks at them.
        state: the algorithm's state after the last step.
        device: where gram and combine run, "cpu" or "cuda".
        recall: the row (d,) of an earlier update by the digest of its payload; LookupError where it is not kept.
        objectives: of the run's task, in its order.
        parameters: d; 0 where it is not known.
        encoder: the columns of the encoder; none where they are not known.
        seed: of the run.
        local_rate: eta_l, the clients' learning rate.
        server_rate: eta_t, the server's learning rate in this round.
        selected: the round's clients.
        draw: an independent choice of as many clients as the round selected, by a word that says what it is for.
        revoked: the clients that have been shut out by now.
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
    selected: Mapping[str, "Selected"] = field(default_factory=dict)
    draw: Callable[[str], tuple[str, ...]] = _nobody
    revoked: Callable[[], frozenset[str]] = frozenset


class Replies(Sequence[Reply]):
    """The accepted replies to one phase, ordered by client id."""

    def __init__(self, replies: Sequence[Reply], *, device: str = "cpu") -> None:
        self._replies = tuple(sorted(replies, key=lambda reply: reply.client_id))
        self._device = device
        self._grams: dict[tuple[str, ...], NDArray[np.float64]] = {}

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    def __len__(self) -> int:
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        return iter(self._replies)

    @property
    def updates(self) -> list[Row]:
        """The rows of the update matrix U: client by client, objective by objective."""
        return [row for reply in self._replies for row in reply.rows]

    @property
    def gram(self) -> NDArray[np.float64]:
        """K = U U^T, shape (m, m); computed once, in one pass over the updates."""
        return self.gram_with(())

    def gram_with(self, history: Sequence[Past]) -> NDArray[np.float64]:
        """K of the updates and, after them, of earlier ones; computed once for each choice of these.

        Args:
            history: h of them.

        Returns:
            Shape (m + h, m + h).
        """
        key = tuple(past.payload for past in history)
        if key not in self._grams:
            self._grams[key] = gram([*self.updates, *(past.row for past in history)], device=self._device)
        return self._grams[key]

    def gram_over(self, columns: Sequence[slice]) -> NDArray[np.float64]:
        """K of these columns of the updates alone, shape (m, m)."""
        parts = ([cut(row, part) for row in self.updates] for part in columns)
        return sum((gram(part, device=self._device) for part in parts), np.zeros((1, 1)))

    def with_losses(self) -> "Replies":
        """Those that report a loss."""
        told = [reply for reply in self._replies if math.isfinite(reply.losses.get(JOINT, math.nan))]
        return self if len(told) == len(self) else Replies(told, device=self._device)

    def with_accuracies(self) -> "Replies":
        """Those that report the accuracy of the base model on their training split: a share, from 0 to 1."""
        told = [reply for reply in self._replies if 0 <= reply.metrics.get(TRAIN_ACCURACY, math.nan) <= 1]
        return self if len(told) == len(self) else Replies(told, device=self._device)

    def prior(self, kind: Literal["uniform", "samples"]) -> NDArray[np.float64]:
        """lambda0, shape (m,): 1/m, or in proportion to the samples."""
        m = len(self._replies)
        if kind == "uniform":
            return np.full(m, 1.0 / m)
        samples = np.array([reply.samples for reply in self._replies], dtype=np.float64)
        shares: NDArray[np.float64] = samples / samples.sum()
        return shares

    def rows(self, context: RoundContext) -> Rows:
        """What a rule over clients sees: K and one scalar of each kind per client, each of whom sent one row."""
        losses = [reply.losses.get(JOINT, np.nan) for reply in self._replies]
        accuracies = [reply.metrics.get(TRAIN_ACCURACY, np.nan) for reply in self._replies]
        return Rows(
            gram=self.gram,
            prior=self.prior(context.prior),
            samples=np.array([reply.samples for reply in self._replies], dtype=np.float64),
            losses=np.array(losses) if np.isfinite(losses).all() else None,
            accuracies=np.array(accuracies) if np.isfinite(accuracies).all() else None,
            clients=tuple(reply.client_id for reply in self._replies),
            round=context.number,
            rounds=context.total,
            local_rate=context.local_rate,
            state=context.state,
        )


@dataclass(frozen=True)
class Step:
    """The end of a round: the direction is sum_i coefficients[i] * rows[i], or what `combination.coordinates` says.

    A step may be a vector that is combined already, such as a sum that was decoded from masked replies. Then no update
    is known, the one row is that vector, and its coefficient is 1.

    Attributes:
        replies: the replies whose rows are combined.
        combination: their coefficients and weights, the algorithm's next state, diagnostics.
        history: updates of earlier rounds, whose rows follow those of the replies.
        consulted: the replies to the round's earlier phases that the combination was found from.
        forgotten: revoked clients, whose updates the algorithm's state no longer refers to.
        combined: the vector that is combined already, (d,); None where the rows of the replies are combined.
        size: what the direction is multiplied by besides the server's learning rate: what a line search chose.
    """

    replies: Replies
    combination: Combination
    history: tuple[Past, ...] = ()
    consulted: tuple[Reply, ...] = ()
    forgotten: tuple[str, ...] = ()
    combined: NDArray[np.float32] | None = None
    size: float = 1.0

    @property
    def rows(self) -> list[Row]:
        """The rows that are combined: those of the replies, then those of earlier rounds; or the combined vector."""
        if self.combined is not None:
            return [self.combined]
        return [*self.replies.updates, *(past.row for past in self.history)]

    @cached_property
    def gram(self) -> NDArray[np.float64]:
        """K over `rows`."""
        return gram([self.combined]) if self.combined is not None else self.replies.gram_with(self.history)


def cut(row: Row, columns: slice) -> Row:
    """Some columns of a row."""
    if isinstance(row, RowFile):
        return row.columns(columns)
    return row[columns]


RoundGenerator = Generator[Phase, Replies, Step]
