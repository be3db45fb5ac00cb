"""What every kind of work has: a name, terms, a reply with a schema, checks, and what the client does.

A kind is a frozen dataclass derived from `Work`. Its fields are what one client is asked; the coordinator makes one for
each client, signs its message, and the worker makes the same object of the message again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from federation.refusals import Refusal
from federation.vectors import Array, Layout, update_layout
from federation.work.computation import Computation

if TYPE_CHECKING:
    from federation.runs import LimitsSpec, Quorum, RunSpec


class WorkError(ValueError):
    """Work that cannot be done as it is asked for; the message says why."""


class Lane(StrEnum):
    """Where a worker does a kind of work."""

    COMPUTE = "compute"  # one at a time, on the device that trains
    PROTOCOL = "protocol"  # at once, beside the training


@dataclass(frozen=True)
class Terms:
    """The terms of a phase, from the run's specification.

    Attributes:
        deadline_seconds: replies that arrive later are refused.
        quorum: the replies that the round needs; None needs none.
    """

    deadline_seconds: float
    quorum: "Quorum | None"


@dataclass(frozen=True)
class Shape:
    """What both ends know before the work begins.

    Attributes:
        layout: of the model.
        objectives: all of the task's, in its order.
        serves: those that the client works on, in the task's order.
    """

    layout: Layout
    objectives: tuple[str, ...]
    serves: tuple[str, ...]


@dataclass(frozen=True)
class RowSchema:
    """One row of a reply.

    Attributes:
        name: of the row.
        length: in elements.
        dtype: "F32", "BF16", "U32" or "U8", as safetensors names it.
    """

    name: str
    length: int
    dtype: str = "F32"


def payload_layout(rows: tuple[RowSchema, ...]) -> Layout:
    """The layout of the payload that holds these rows."""
    return update_layout([(row.name, row.length, row.dtype) for row in rows])


@dataclass(frozen=True)
class Demand:
    """What work takes of a client, for the bounds that its owner sets.

    Attributes:
        steps: optimiser steps; 0 where none is made.
        samples: training samples that the reply is made of.
        rows: updates of the whole model.
    """

    steps: int
    samples: int
    rows: int = 0


@dataclass(frozen=True, eq=False)
class Result:
    """What a client hands in, or has computed so far.

    Attributes:
        rows: by name. Of a computation: the update w_t - w for each target, or the gradient of each objective, (d,).
        losses: of the base model on the whole training split, by objective; with several objectives also their mean,
            as "loss". Empty where it was not measured.
        metrics: "<split>/loss", "<split>/accuracy", "<split>/samples".
        samples: training samples held.
        seconds: wall time.
    """

    rows: Mapping[str, Array]
    losses: Mapping[str, float]
    metrics: Mapping[str, float]
    samples: int
    seconds: float = 0.0


class Memory(ABC):
    """What a client remembers between the phases of one attempt at a round. It is erased when the round is over."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """What was kept under a name; None when nothing is."""

    @abstractmethod
    def put(self, name: str, value: bytes, *, durable: bool = False) -> None:
        """Keeps a value.

        Args:
            name: of the value.
            value: what to keep.
            durable: keep it on the disk, encrypted, before this returns: it survives a restart of the worker.
        """


@dataclass(frozen=True, eq=False)
class Client:
    """The client that does the work.

    Attributes:
        client_id: its name.
        seed: of the run.
        round: from 0.
        attempt: at the round, from 0.
        shape: of model and task.
        memory: of this attempt at the round.
        inputs: the content of the inputs, by name.
    """

    client_id: str
    seed: int
    round: int
    attempt: int
    shape: Shape
    memory: Memory
    inputs: Mapping[str, bytes | memoryview] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Work(ABC):
    """What one client is asked to do in one phase.

    Attributes:
        name: of the kind, on the wire, in SQL, on the command line and in documents.
        doing: what a worker that does it tells its owner, such as "training".
        lane: where a worker does it.
        decides: whether the round's step depends on the replies.
        needs_samples: whether a reply must claim training samples.
    """

    name: ClassVar[str]
    doing: ClassVar[str]
    lane: ClassVar[Lane] = Lane.COMPUTE
    decides: ClassVar[bool] = True
    needs_samples: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        """Deadline and quorum of a phase of this kind."""

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        """The rows that a reply holds, in this order; none for a reply without payload.

        Raises:
            WorkError: the work does not fit the model or the task.
        """
        return ()

    def input_sizes(self, shape: Shape) -> Mapping[str, int]:
        """The largest size in bytes of each blob that the work needs besides the model, by name.

        Raises:
            WorkError: the work does not fit the model or the task.
        """
        return {}

    def once(self) -> str:
        """The name of a question that a client answers once in an attempt at a round; empty for any number of times.

        A worker records the question before it answers. Asked again, it gives the same answer to the same work, and
        declines other work of the same name, also after a restart.
        """
        return ""

    def demand(self, samples: int) -> Demand | None:
        """What the work takes of a client with this number of training samples; None where no bound applies."""
        return None

    @classmethod
    def problem(cls, norms: Mapping[str, float], limits: "LimitsSpec") -> Refusal | None:
        """What is wrong with a payload whose digest, layout and values are right; None when nothing is.

        Args:
            norms: the Euclidean norm of each row of floating-point numbers, by name.
            limits: of the run.
        """
        return None

    def computation(self, client: Client) -> Computation | None:
        """What the client's model and data are needed for; None where they are not."""
        return None

    def answer(self, client: Client, computed: Result) -> Result:
        """What the client hands in.

        Args:
            client: who works.
            computed: what `computation` came to; nothing but `samples` where there is none.

        Raises:
            WorkError: it cannot be done.
        """
        return computed
