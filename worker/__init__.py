"""The worker: attendance at the coordinator, local training, spool. It opens connections and accepts none."""

from functools import cache
from importlib.metadata import version


@cache
def software() -> str:
    """The name and version that this worker tells the coordinator."""
    return f"fedpareto-worker/{version('fedpareto')}"
