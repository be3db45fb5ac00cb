"""Search as a SearchWork, and back."""

from federation.v1.common_pb2 import SearchWork
from federation.work.base import Shape
from federation.work.registry import Kind
from federation.work.search.work import Search


def to_proto(work: Search) -> SearchWork:
    """The message."""
    return SearchWork(steps=work.steps)


def from_proto(message: SearchWork, shape: Shape) -> Search:
    """The work of a message."""
    return Search(steps=tuple(message.steps))


KIND = Kind(Search, SearchWork, to_proto, from_proto)
