"""The largest duration of a transfer: a worker waits so long, and the coordinator adds it for large replies."""

SLOWEST_BYTES_PER_SECOND = 100_000
"""The slowest connection over which a worker can take part."""


def slowest_seconds(size: int) -> float:
    """The seconds that this number of bytes takes over the slowest connection."""
    return size / SLOWEST_BYTES_PER_SECOND
