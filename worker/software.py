"""What this worker calls itself to the coordinator."""

from importlib.metadata import version


def software() -> str:
    """Name and version."""
    return f"fedpareto-worker/{version('fedpareto')}"
