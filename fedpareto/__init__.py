"""The face of fedpareto: the `fedpareto` command and the calls for notebooks. Imports the other packages, lazily.

>>> import fedpareto
>>> history = fedpareto.simulate("run.toml", data="data")  # doctest: +SKIP
>>> history.rounds["accuracy/mean"].plot()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.aggregation import aggregate as aggregate
    from federation.runs import RunSpec as RunSpec
    from fedpareto.notebook import simulate as simulate
    from simulation.history import History as History

# Where each name comes from. None of these modules imports PyTorch, so completion by Tab stays quick.
_PLACES = {
    "History": "simulation.history",
    "RunSpec": "federation.runs",
    "aggregate": "coordinator.aggregation",
    "simulate": "fedpareto.notebook",
}

__all__ = ["History", "RunSpec", "aggregate", "simulate"]


def __getattr__(name: str) -> Any:
    """The names of `__all__`, and `__version__`: loaded when they are first used."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - nothing here before it is needed

        return version("fedpareto")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What completion offers."""
    return sorted({*__all__, "__version__", *globals()} - {"Any", "TYPE_CHECKING", "import_module"})
