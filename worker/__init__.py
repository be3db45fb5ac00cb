"""The worker: attendance at the coordinator, local training, spool. It opens connections and accepts none."""

from importlib.metadata import version


def software() -> str:
    """The name and version that this worker tells the coordinator."""
    return f"fedpareto-worker/{version('fedpareto')}"
