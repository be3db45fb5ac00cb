"""The public face of fedpareto: everything that notebooks, tasks and plug-ins import.

>>> import fedpareto
>>> history = fedpareto.simulate("run.toml", data="data")  # doctest: +SKIP
>>> history.plot()  # doctest: +SKIP
>>> run = fedpareto.connect("admin").submit("run.toml")  # doctest: +SKIP

Names are loaded when they are first used: `import fedpareto` imports neither PyTorch nor NumPy. It raises ImportError
where a `worker.py` or a package `storage/` of yours, say, comes before ours on Python's path.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedpareto.code_path import check_import

check_import()
del check_import

if TYPE_CHECKING:
    from federation.aggregation.base import Rule as Rule
    from federation.aggregation.base import conclude as conclude
    from federation.aggregation.interface import Combination as Combination
    from federation.aggregation.interface import HyperparameterError as HyperparameterError
    from federation.aggregation.interface import Mixture as Mixture
    from federation.aggregation.interface import Reads as Reads
    from federation.aggregation.interface import Rows as Rows
    from federation.aggregation.interface import TooFewUpdatesError as TooFewUpdatesError
    from federation.aggregation.metrics.drawn_round import draw_round as draw_round
    from federation.aggregation.pre import Stage as Stage
    from federation.attacks.base import Attack as Attack
    from federation.attacks.base import AttackError as AttackError
    from federation.errors import Error as Error
    from federation.sketches.base import LinearSketch as LinearSketch
    from federation.sketches.base import Sketch as Sketch
    from federation.sketches.base import SketchError as SketchError
    from federation.spec.options import option as option
    from federation.spec.run_spec import RunSpec as RunSpec
    from federation.spec.task_metrics import Metric as Metric
    from federation.tasks import Column as Column
    from federation.tasks import DataError as DataError
    from federation.tasks import Dataset as Dataset
    from federation.tasks import DataSource as DataSource
    from federation.tasks import Pool as Pool
    from federation.tasks import Splits as Splits
    from federation.tasks import Task as Task
    from federation.tasks import task as task
    from federation.tasks.standardise import Standardise as Standardise
    from federation.training import TrainingDiverged as TrainingDiverged
    from federation.training import TrainingStopped as TrainingStopped
    from federation.training.plans import EvaluationPlan as EvaluationPlan
    from federation.training.plans import TrainingPlan as TrainingPlan
    from federation.training.trainer import Trainer as Trainer
    from fedpareto.face.connection import connect as connect
    from fedpareto.face.local_processes import local as local
    from fedpareto.face.simulated import simulate as simulate
    from fedpareto.offline_aggregation import Aggregate as Aggregate
    from fedpareto.offline_aggregation import aggregate as aggregate
    from fedpareto.simulation.history import History as History
    from fedpareto.sinks.sink import FollowedRun as FollowedRun
    from fedpareto.sinks.sink import RoundNumbers as RoundNumbers
    from fedpareto.sinks.sink import RunEnd as RunEnd
    from fedpareto.sinks.sink import Sink as Sink
    from fedpareto.sinks.sink import SinkError as SinkError

# The module of each name.
_PLACES = {
    name: module
    for module, names in {
        "fedpareto.offline_aggregation": "Aggregate aggregate",
        "federation.aggregation.base": "Rule conclude",
        "federation.aggregation.metrics.drawn_round": "draw_round",
        "federation.aggregation.pre": "Stage",
        "federation.aggregation.interface": "Combination HyperparameterError Mixture Reads Rows TooFewUpdatesError",
        "federation.attacks.base": "Attack AttackError",
        "federation.errors": "Error",
        "federation.spec.task_metrics": "Metric",
        "federation.spec.options": "option",
        "federation.spec.run_spec": "RunSpec",
        "federation.sketches.base": "LinearSketch Sketch SketchError",
        "federation.tasks": "Column DataError DataSource Dataset Pool Splits Task task",
        "federation.tasks.standardise": "Standardise",
        "federation.training": "TrainingDiverged TrainingStopped",
        "federation.training.plans": "EvaluationPlan TrainingPlan",
        "federation.training.trainer": "Trainer",
        "fedpareto.face.connection": "connect",
        "fedpareto.face.local_processes": "local",
        "fedpareto.face.simulated": "simulate",
        "fedpareto.simulation.history": "History",
        "fedpareto.sinks.sink": "FollowedRun RoundNumbers RunEnd Sink SinkError",
    }.items()
    for name in names.split()
}
__all__ = sorted(_PLACES)  # noqa: PLE0605 - the imports above declare the names to type checkers


def __getattr__(name: str) -> Any:
    """The names of `__all__`, and `__version__`: loaded when they are first used."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - nothing here before it is needed

        return version("fedpareto")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names for completion, which reads each. `Standardise` is left out: a class of PyTorch, a slow import."""
    return sorted(
        {*__all__} - {"Standardise"} | {"__version__", *(name for name in globals() if name.startswith("__"))}
    )
