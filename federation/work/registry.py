"""The kinds of work by name: those of this package, and those that other packages bring.

Another package names its kind as an entry point of the group `fedpareto.work`, whose object is a `Kind`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from google.protobuf.message import DecodeError, Message

from federation.work.base import Shape, Work, WorkError

GROUP = "fedpareto.work"
BUILT_IN = ("train", "evaluate", "jacobian", "residual", "search")


@dataclass(frozen=True)
class Kind:
    """A kind of work and its message. `from_proto` takes the shape of model and task too, and may raise WorkError."""

    work: type[Work]
    message: type[Message]
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any, Shape], Work]


def kind(name: str) -> Kind:
    """The kind of a name. Raises WorkError if there is none."""
    if name in BUILT_IN:
        built_in: Kind = import_module(f"federation.work.{name}.wire").KIND
        return built_in
    for entry in entry_points(group=GROUP, name=name):
        loaded = entry.load()
        if isinstance(loaded, Kind) and loaded.work.name == name:
            return loaded
        raise WorkError(f"the entry point {entry.value} of {GROUP} is not the Kind {name!r}")
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
        found = kind(name)
        return found.from_proto(found.message.FromString(data), shape)
    except DecodeError:
        raise WorkError(f"the message is not one of the kind {name!r}") from None
