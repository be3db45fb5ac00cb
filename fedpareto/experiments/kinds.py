"""The kinds of experiments, by what makes their runs: simulations, which are built in, and those of other packages."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from federation.plugins import Plugins
from federation.spec.run_spec import RunSpec

SIMULATION = "simulation"


class ExperimentKind(ABC):
    """What makes the runs of experiments that are no simulations.

    Attributes:
        specification: the model of the specification of one run, with at least name, seed and rounds.
        data: the directory with the data files, of an instance whose call was given one.
    """

    specification: ClassVar[type[BaseModel]]
    data: Path | None = None

    @abstractmethod
    def measure(self, specification: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Makes a run of a specification: its measures, and rows of measures by round."""


KINDS: Plugins[ExperimentKind] = Plugins(
    "kind of experiment",
    "fedpareto.experiment_kinds",
    ExperimentKind,
    "fedpareto.experiments.kinds.ExperimentKind",
    (SIMULATION,),
)


def specification_of(kind: str) -> type[BaseModel]:
    """The model of the specifications of a kind. Raises PluginError."""
    return RunSpec if kind == SIMULATION else KINDS.find(kind).specification
