"""The base of every kind of work: a name, terms, the schema of a reply, checks, and the actions of the client.

A kind is a frozen dataclass derived from `Work`, whose fields are the question to one client. The coordinator makes one
for each client and signs its message, from which the worker makes the same object.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from federation.errors import Error
from federation.refusals import Refusal
from federation.spec.accounting import SamplePrivacy
from federation.spec.computation import Computation
from federation.spec.sharing import Unshared
from federation.statistics.held import HeldData
from federation.vectors import Array, Layout, Vector, update_layout
from federation.work.site import Site

if TYPE_CHECKING:
    from federation.spec.run_sections import LimitsSpec, Quorum
    from federation.spec.run_spec import RunSpec


RESIDUAL = "residual/"  # begins the name of the rounding error of a row; no tensor of a model has such a name


class WorkError(Error, ValueError):
    """Work cannot be done as asked; the message says why.

    A message with anything of the owner's (the text of an exception, a path, a name or value that own code gave) has a
    second form for others, `wire`. A message without it is this project's and leaves the site as it is.

    Attributes:
        reason: the stable reason for which a client declines; empty if the kind of work names none.
        wire: the text for others; empty if the message is.
    """

    def __init__(self, message: str, *, reason: str = "", wire: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.wire = wire


class Lane(StrEnum):
    """The place where a worker does a kind of work."""

    COMPUTE = "compute"  # one at a time, on the device that trains
    PROTOCOL = "protocol"  # at once, beside the training


class Shows(StrEnum):
    """The part of the client's data that the reply to a kind of work shows in the clear."""

    UPDATE = "update"  # an update, a gradient, or anything else
    METRICS = "metrics"  # losses and accuracies of one model
    STATISTICS = "statistics"  # counts and sums of columns
    NOTHING = "nothing"  # only the result of a private round


@dataclass(frozen=True)
class Terms:
    """The terms of a phase: replies after `deadline_seconds` are refused; None is no quorum."""

    deadline_seconds: float
    quorum: "Quorum | None"


@dataclass(frozen=True)
class Shape:
    """The layout of the model, the objectives of the task, and those that the client serves, in the same order.

    After the parameters of the model come `buffers` elements of averaged buffers, then `fixed` of fixed tensors.
    """

    layout: Layout
    objectives: tuple[str, ...]
    serves: tuple[str, ...]
    buffers: int = 0
    fixed: int = 0

    @property
    def parameters(self) -> int:
        """The number of elements of the model that are trained parameters."""
        return self.layout.size - self.buffers - self.fixed

    @property
    def trained(self) -> Layout:
        """The tensors of the model that are trained parameters."""
        ends = accumulate(tensor.size for tensor in self.layout.tensors)
        return Layout(
            tuple(tensor for tensor, end in zip(self.layout.tensors, ends, strict=True) if end <= self.parameters)
        )


@dataclass(frozen=True)
class RowSchema:
    """One row of a reply: its length in elements, and its dtype as safetensors names it."""

    name: str
    length: int
    dtype: str = "F32"


def payload_layout(rows: tuple[RowSchema, ...]) -> Layout:
    """The layout of the payload that holds these rows."""
    return update_layout([(row.name, row.length, row.dtype) for row in rows])


@dataclass(frozen=True)
class Demand:
    """The demand of work on a client, for the bounds that its owner sets.

    Attributes:
        steps: optimiser steps; 0 for work without training.
        samples: the fewest training samples that the reply depends on.
        rows: updates of the whole model.
        epochs: passes over the training split.
    """

    steps: int
    samples: int
    rows: int = 0
    epochs: float = 0.0


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a client's work, or of its computation.

    Attributes:
        rows: by name. Of a computation: the update w_t - w for each target, or the gradient of each objective, (d,);
            and the averaged buffers after a training.
        losses: of the base model on the whole training split, by objective; with several objectives also their mean,
            as "loss". Empty if it was not measured.
        metrics: "<split>/loss", "<split>/accuracy", "<split>/samples".
        samples: training samples held.
        seconds: wall time.
        statement: signed with the reply, if the kind of work has statements.
        privacy: the client's statement about noise in its training; None without noise.
        personal: the personal parameters after a training, in the order of the model. They stay with the client. None
            without such parameters.
        residual: the rounding errors of the rows, in the order of `Work.residuals`. It stays with the client. None if
            no row is rounded.
        failure: the error of the computation, for the client's owner alone; empty if it did not fail. Only work that
            conceals has results of failed computations.
    """

    rows: Mapping[str, Array]
    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    samples: int
    seconds: float = 0.0
    statement: Any = None
    privacy: SamplePrivacy | None = None
    personal: Vector | None = None
    residual: Vector | None = None
    failure: str = ""


class Memory(ABC):
    """The memory of a client between the phases of one attempt at a round. It is erased when the round is over."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The value that is kept under a name; None without one."""

    @abstractmethod
    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value. A durable one is encrypted on the disk before this returns: it survives a restart."""


@dataclass(frozen=True)
class Origin:
    """The origin of work: the fields that every assignment of a phase repeats.

    Attributes:
        spec, base_model: digests.
        seed: of the run.
        unshared: the parameters that the run does not share.
    """

    federation_id: str
    run_id: str
    task: str
    spec: str
    base_model: str
    seed: int
    unshared: Unshared


@dataclass(frozen=True, eq=False)
class WorkingClient:
    """The client that does the work, in one attempt at a round; rounds and attempts count from 0.

    Attributes:
        memory: of the attempt.
        inputs: the content of the inputs, by name.
        origin: the run and the model.
        site: the decisions of the client's owner, and the records that outlive a round.
        residual: the rounding errors of its last accepted reply, in the order of `Work.residuals`; None for zeros.
        again: True if this client may have answered the same question before: the question is on record.
        measures: the digests of the models of a run that only measures models, if the owner has approved this run.
        approved: True if the owner has approved the run with this specification.
        data: its samples; None where they are not in this process.
    """

    client_id: str
    round: int
    attempt: int
    shape: Shape
    memory: Memory
    origin: Origin
    site: Site
    inputs: Mapping[str, bytes | memoryview] = field(default_factory=dict)
    residual: Vector | None = None
    again: bool = False
    measures: frozenset[str] = frozenset()
    approved: bool = False
    data: HeldData | None = None


@dataclass(frozen=True, kw_only=True)
class Work(ABC):
    """The work of one client in one phase.

    Attributes:
        name: of the kind, on the wire, in SQL, on the command line and in documents.
        doing: the activity that a worker reports to its owner, such as "training".
        lane: the place where a worker does it.
        decides: True if the round's step depends on the replies.
        needs_samples: True if a reply must claim training samples.
        shows: the data that a reply shows in the clear. An owner who requires private rounds declines kinds that show
            updates.
        sends_update: True if the client computes an update, rather than gradients or measurements.
        keeps_inputs, keeps_payload: True if the coordinator keeps inputs and payloads after the round; False if they
            are of no use for a verification.
        forgets: True if the client erases the values under `kept_under` once the reply is acknowledged.
        ends_after: the time after the client's first reply, by its own clock, after which it erases these values; None
            if only the deadline counts.
        once_ever: True if a question that `once` names is answered once in all, and not once in each attempt.
        conceals: True in a private round: neither a reply nor a decline tells how the computation went. `answer` gets
            the result of a failed one, too; the reply has no computing time, and a decline no text of an exception that
            is not a check of this project.
    """

    name: ClassVar[str]
    doing: ClassVar[str]
    lane: ClassVar[Lane] = Lane.COMPUTE
    decides: ClassVar[bool] = True
    needs_samples: ClassVar[bool] = True
    shows: ClassVar[Shows] = Shows.UPDATE
    sends_update: ClassVar[bool] = False
    keeps_inputs: ClassVar[bool] = True
    keeps_payload: ClassVar[bool] = True
    forgets: ClassVar[bool] = False
    ends_after: ClassVar[timedelta | None] = None
    once_ever: ClassVar[bool] = False
    conceals: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """Deadline and quorum of a phase of this kind."""

    @property
    def from_round_model(self) -> bool:
        """True if the work starts from the model with which its round begins: in round 0, the run's initial model.

        False for an evaluation, of the model that the round has made, and for the later phases of a session, which read
        no model.
        """
        return True

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        """The rows that a reply holds, in this order; none for a reply without payload.

        Raises:
            WorkError: the work does not fit the model or the task.
        """
        return ()

    def residuals(self, shape: Shape) -> tuple[RowSchema, ...]:
        """The rounding errors that the client keeps, to add them to the rows of its next reply. Errors as of `rows`.

        Their names begin with `RESIDUAL`.
        """
        return ()

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        """The largest size in bytes of each input that the work needs, by name. Errors as of `rows`."""
        return {}

    def once(self) -> str:
        """The name of a question that a client answers once in an attempt at a round; empty for any number of times.

        A worker records the question before it answers. Asked again, it gives the same answer to the same work, and
        declines other work of the same name, also after a restart.
        """
        return ""

    def kept_under(self) -> str:
        """The beginning of the names of the values that only this work and its later phases need; empty for none.

        They are erased when the work is cancelled, too.
        """
        return ""

    def session_vector(self) -> tuple[str, str] | None:
        """The session of a private round for which this work computes a vector, and the kind of work of the vectors.

        A process that dies in it counts as a failed computation. None for other work.
        """
        return None

    def demand(self, samples: int) -> Demand | None:
        """The demand on a client with this number of training samples; None if no bound applies."""
        return None

    @classmethod
    def problem(cls, norms: Mapping[str, float], limits: "LimitsSpec") -> Refusal | None:
        """The problem of a payload whose digest, layout and values are right; None if there is none.

        `norms` are the Euclidean norms of the rows of floating-point numbers, by name; `limits` are those of the run.
        """
        return None

    def computation(self, client: WorkingClient) -> Computation | None:
        """The computation that needs the client's model and data; None if the work needs none.

        Raises:
            WorkError: an input does not fit the work.
        """
        return None

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        """The client's result, from the result of `computation`, which has only `samples` if there is no computation.

        Raises:
            WorkError: it cannot be done.
        """
        return computed
