"""The time of the coordinator, which every part takes as an argument; tests give another one."""

from datetime import UTC, datetime


def utc_now() -> datetime:
    """The time, aware."""
    return datetime.now(UTC)
