"""The kinds of work by name: those of this package and of other packages.

Another package names its kind as an entry point of the group `fedpareto.work`, whose object is a `Kind`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from google.protobuf.message import DecodeError, Message

from federation.spec.computation import NoisyTraining
from federation.work.base import Shape, Work, WorkError

GROUP = "fedpareto.work"
BUILT_IN = ("train", "evaluate", "statistics", "jacobian", "residual", "search")
SECURE = "secure"
STAGES = tuple(f"{SECURE}-{stage}" for stage in ("ready", "deal", "open", "mask", "confirm", "unmask"))


@dataclass(frozen=True)
class Statements:
    """The statements that clients sign with their replies to a kind of work.

    Attributes:
        message: its type.
        to_proto, from_proto: the statement as a message, and back; `from_proto` may raise ValueError.
        problem: the error of a statement as the answer to a message of work, as text; empty if it is valid.
    """

    message: type[Message]
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any], Any]
    problem: Callable[[Any, Any], str]


def _no_noise(message: Any) -> None:
    """For kinds of work that never ask for training with noise."""


@dataclass(frozen=True)
class Kind:
    """A kind of work and its message.

    Attributes:
        work: the kind.
        message: its type.
        to_proto, from_proto: the work as a message, and back; `from_proto` takes the shape of model and task too, and
            may raise WorkError.
        statements: None if replies have no statement.
        noise: the training with noise that a message asks for; None if it asks for none. The coordinator accepts a
            reply only if it states at least this protection.
    """

    work: type[Work]
    message: type[Message]
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any, Shape], Work]
    statements: Statements | None = None
    noise: Callable[[Any], NoisyTraining | None] = _no_noise


def kind(name: str) -> Kind:
    """The kind of a name. Raises WorkError if there is none."""
    if name in BUILT_IN:
        built_in: Kind = import_module(f"federation.work.{name}.wire").KIND
        return built_in
    if name in STAGES:
        stages: dict[str, Kind] = import_module(f"federation.work.{SECURE}.wire").KINDS
        return stages[name]
    for entry in entry_points(group=GROUP, name=name):
        loaded = entry.load()
        if isinstance(loaded, Kind) and loaded.work.name == name:
            return loaded
        problem = f"is not the Kind {name!r}"
        wire = f"an entry point of {GROUP} {problem}"
        raise WorkError(f"the entry point {entry.value} of {GROUP} {problem}", wire=wire)
    raise WorkError(f"there is no kind of work {name[:40]!r} here: update this software, or install what brings it")


def encode(work: Work) -> bytes:
    """The serialized message of some work."""
    return kind(work.name).to_proto(work).SerializeToString(deterministic=True)


def decode(name: str, data: bytes, shape: Shape) -> Work:
    """The work of a serialized message, by the name of its kind and the shape of model and task.

    Raises:
        WorkError: there is no such kind, or the message is not one of it.
    """
    try:
        work_kind = kind(name)
        return work_kind.from_proto(work_kind.message.FromString(data), shape)
    except DecodeError:
        raise WorkError(f"the message is not one of the kind {name!r}") from None


def encode_statement(name: str, statement: Any) -> bytes:
    """The serialized statement of a client's reply to a kind of work; empty without one."""
    statements = kind(name).statements
    if statement is None or statements is None:
        return b""
    return statements.to_proto(statement).SerializeToString(deterministic=True)


def decode_statement(name: str, data: bytes) -> Any:
    """The statement of a client's reply to a kind of work; None for a kind without statements.

    Raises:
        WorkError: it is not a statement of this kind.
    """
    statements = kind(name).statements
    if statements is None:
        if data:
            raise WorkError(f"replies to work of the kind {name!r} have no statement")
        return None
    try:
        return statements.from_proto(statements.message.FromString(data))
    except (DecodeError, ValueError) as error:
        raise WorkError(f"the statement is not one of the kind {name!r}: {error}") from None


def noise_asked(name: str, work: bytes) -> NoisyTraining | None:
    """The training with noise that a message of work asks for; None if it asks for none."""
    work_kind = kind(name)
    return work_kind.noise(work_kind.message.FromString(work))


def statement_problem(name: str, work: bytes, data: bytes) -> str:
    """The error of a client's statement as the answer to a message of work; empty if it is valid."""
    try:
        statement = decode_statement(name, data)
        work_kind = kind(name)
        if statement is None or work_kind.statements is None:
            return ""
        return work_kind.statements.problem(work_kind.message.FromString(work), statement)
    except (WorkError, DecodeError) as error:
        return str(error)
