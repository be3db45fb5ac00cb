"""How long a transfer may take: the time that a worker gives one, and that the coordinator adds for large replies."""

SLOWEST_BYTES_PER_SECOND = 100_000
"""The slowest connection over which a worker can take part."""


def slowest_seconds(size: int) -> float:
    """The time in seconds for this number of bytes over the slowest connection."""
    return size / SLOWEST_BYTES_PER_SECOND
