"""How far a run is, for the line or bar that shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulationProgress:
    """The progress of a simulation, or of a run of real members."""

    done: int  # rounds that are over
    total: int  # rounds of the run
    metrics: Mapping[str, float]  # of the last round
    rate: float  # rounds per second of this call
    undisclosed: Sequence[str] = ()  # the numbers of the last round that privacy hides
