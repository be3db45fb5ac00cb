"""Chooses the backend that trains the simulated clients, by name or automatically."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from federation.errors import ArgumentError
from federation.spec.run_spec import RunSpec
from federation.tasks import Task
from federation.tasks import parameters as flat
from federation.training.dp_sgd import check_suits
from federation.training.generators import generators_kept
from federation.training.precision import check_suits as check_suits_device
from federation.training.torch_trainer import TorchTrainer
from federation.training.trainer import Trainer
from fedpareto.simulation import SimulationError
from fedpareto.simulation.local import LocalWork, Loop
from fedpareto.simulation.population import Population
from fedpareto.simulation.stacked import Stacked, why_not_stacked

BACKENDS = ("auto", "stacked", "loop", "compiled", "ray")


@dataclass(frozen=True)
class Backend:
    """A backend."""

    name: str  # "stacked", "loop", "compiled" or "ray"
    why: str  # the reason why "auto" did not choose "stacked"
    local: LocalWork  # trains and evaluates
    close: Callable[[], object] = lambda: None  # releases its resources


def pick_backend(
    name: str,
    task: Task,
    population: Population,
    spec: RunSpec,
    trainer: type[Trainer] = TorchTrainer,
    *,
    device: str,
    ray_address: str | None = None,
) -> Backend:
    """A backend by name; "auto" is "stacked" where clients can be trained together, else "loop".

    Training with noise, and parameters that the run does not share, need a worker's own code, which is not stacked.
    `trainer` is the class that trains the clients; only the built-in one can be stacked or compiled.

    Raises:
        ValueError: no such backend, or a task that the chosen backend cannot train.
        WorkError: the task's model cannot be trained with noise, or the device lacks the precision.
        SimulationError: "ray" without Ray, a cluster that cannot be used, or "compiled" without a compiler.
        DataError, TaskError, PluginError: as of `Loop.try_out`, of an owner's own trainer.
    """
    splits, serves, sgd = population.splits, population.serves, spec.train

    def loop(why: str = "") -> Backend:
        clients = Loop(task, splits, device, serves, trainer)
        if trainer is not TorchTrainer:  # which was tried on all data before it was dealt
            clients.try_out()
        return Backend("loop", why, clients)

    if name not in BACKENDS:
        raise ArgumentError(f"no backend {name!r}: there are {', '.join(BACKENDS)}")
    if ray_address is not None and name != "ray":
        raise ArgumentError(f"an address of a Ray cluster ({ray_address}) goes with the backend ray, not with {name}")
    if trainer is not TorchTrainer:
        if name not in ("auto", "loop"):
            raise ArgumentError(
                f"{task.name} cannot be trained by the backend {name}: its trainer is {trainer.__name__}"
            )
        return loop(f"its trainer is {trainer.__name__}")
    check_suits_device(sgd.precision, torch.device(device))
    why = _reason_for_loop(name, task, population, spec)
    if name == "ray":
        if find_spec("ray") is None:
            raise SimulationError("the backend ray needs Ray, not installed here: install fedpareto[ray]")
        from fedpareto.simulation.cluster import RayWork  # noqa: PLC0415 - Ray is an extra

        work = RayWork(task.name, splits, device, ray_address, serves)
        return Backend("ray", "", work, work.close)
    if name == "loop":
        return loop()
    if name == "compiled":
        from fedpareto.simulation.compiled import CompiledTrainer, check_compiler, why_not_compiled  # noqa: PLC0415 - seconds

        if why := why_not_compiled(task, sgd):
            raise ArgumentError(f"{task.name} cannot be trained compiled: {why}; use --backend loop")
        check_compiler()
        return Backend("compiled", "", Loop(task, splits, device, serves, CompiledTrainer))
    with generators_kept():
        why = why or why_not_stacked(task, splits, device, sgd, strict=name == "stacked")
    if why:
        if name == "stacked":
            raise ArgumentError(f"{task.name} cannot be trained stacked: {why}; use --backend loop")
        return loop(why)
    return Backend("stacked", "", Stacked(task, splits, device, serves))


def _reason_for_loop(name: str, task: Task, population: Population, spec: RunSpec) -> str:
    """The reason why a run needs a worker's own code, or empty. Raises ValueError if the backend lacks it."""
    reason = ""
    if not spec.parameters.shares_all:
        if name not in ("auto", "loop"):
            raise ArgumentError(
                f"{task.name} cannot be trained by the backend {name} with personal or frozen parameters; use auto or "
                "loop"
            )
        reason = "the run does not share all parameters"
    if spec.privacy.sample_noise:
        if name in ("stacked", "compiled"):
            raise ArgumentError(
                f"{task.name} cannot be trained {name} with noise (privacy.sample_noise); use auto or loop"
            )
        check_suits(flat.build(task), task, next(own.train for own in population.splits.values() if len(own.train)))
        reason = "each sample's gradient gets noise of its own client"
    return reason
