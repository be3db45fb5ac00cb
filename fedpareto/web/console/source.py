"""Where the console's data comes from: calls of an administrator, to a coordinator or to what a stopped one left."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from federation.v1.admin_pb2_grpc import AdminStub


class CoordinatorAway(Exception):
    """The coordinator cannot be reached, or does not let this administrator in; the text says why, for people."""


@dataclass(frozen=True)
class OpenedCalls:
    """The calls of an administrator, which any thread may make.

    `live` is False for the record of a stopped coordinator, which has no calls that follow; `outdated` then says
    whether a coordinator serves again.
    """

    stub: AdminStub
    live: bool
    outdated: Callable[[], bool]


Source = Callable[[], AbstractContextManager[OpenedCalls]]  # entering raises CoordinatorAway
