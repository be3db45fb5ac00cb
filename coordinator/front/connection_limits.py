"""The limits on connections, which depend on the number of file descriptors that the process may open."""

import resource
from typing import NamedTuple, Self

RESERVED_DESCRIPTORS = 256  # for the database, blobs, listeners, log files
DESCRIPTORS_PER_CONNECTION = 3  # two sockets, and a share of the pipes


class ConnectionLimits(NamedTuple):
    """The limits. A connection is unverified until it has shown a certificate of the federation.

    Attributes:
        connections: connections in all.
        unverified: unverified connections in all.
        unverified_per_address: unverified connections of one IPv4 address, or of one IPv6 network of 64 bits.
        per_member: verified connections of one member or administrator.
        first_byte_seconds: from the connection to its first byte.
        verified_seconds: from the connection to its first call with a certificate, on the federation port.
        newcomer_seconds: the longest duration of a connection to the enrollment port.
        idle_seconds: the longest silence of an unverified connection.
        closing_seconds: the time for a connection that gRPC has closed to read the rest.
    """

    connections: int
    unverified: int
    unverified_per_address: int = 64
    per_member: int = 32
    first_byte_seconds: float = 10.0
    verified_seconds: float = 30.0
    newcomer_seconds: float = 120.0
    idle_seconds: float = 20.0
    closing_seconds: float = 10.0

    @classmethod
    def for_descriptors(cls, descriptors: int) -> Self:
        """The limits for a process that may open this number of file descriptors."""
        connections = max(16, (descriptors - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION)
        return cls(connections=connections, unverified=min(512, connections // 2))


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit on file descriptors to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """The number of file descriptors that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
