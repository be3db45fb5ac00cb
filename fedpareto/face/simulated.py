"""`fedpareto.simulate`: a run on simulated clients, in this process."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from federation.errors import ArgumentError
from fedpareto.face.given_spec import Spec, document, paths_of, task_name
from fedpareto.face.quiet import without_log_lines
from fedpareto.missing_packages import need
from fedpareto.progress_line import shown
from fedpareto.sinks.targets import SinkTarget, targets_of

if TYPE_CHECKING:
    from federation.tasks import Task
    from fedpareto.simulation.history import History
    from fedpareto.simulation.simulate import Simulation
    from fedpareto.simulation.simulation_progress import SimulationProgress


def simulate(
    spec: Spec,
    *,
    task: "type[Task] | None" = None,
    data: str | Path | None = None,
    members: Mapping[str, str | Path] | None = None,
    home: str | Path | None = None,
    model: str | Path | Sequence[str | Path] | None = None,
    statistics: "History | Mapping[str, Any] | str | Path | None" = None,
    device: str = "auto",
    backend: str = "auto",
    trainer: str = "",
    ray_address: str | None = None,
    threads: int | None = None,
    resume: bool = False,
    download: bool = False,
    to: str | Sequence[str] = (),
    progress: "Callable[[SimulationProgress], object] | None" = None,
) -> "History":
    """Runs a specification on simulated clients.

    It may run on several threads at a time: their clients then train in turn. What the caller has set in PyTorch and
    NumPy (no_grad, autocast, default types and devices, ...) has no effect on it, and is the same afterwards.

    Args:
        spec: a run specification: a TOML document, the path of one (a `Path`, or a text that ends in ".toml"), a dict
            with the same keys, or a `RunSpec`.
        task: the class of the task, such as one of a notebook's cell, in place of the specification's `task`.
        data: the directory of the task's data.
        members: the directory of each client's own data, by name, in place of `data` and [simulation].clients.
        home: directory of the record; without it, the record is deleted at the end.
        model: a safetensors file with the initial model, as `fedpareto admin submit --model` takes it; without it, the
            task makes one from the seed. Of a run that evaluates: a file or several, whose models it measures.
            `warnings` of the run say what was converted, added or left out.
        statistics: fills the layer `Standardise` of the task's model: the `History` of a run that has described the
            data of these clients, its `statistics`, or a JSON file, as `fedpareto admin statistics --json` writes it.
        device: the device on which clients train: "auto", "cpu", "cuda" or "cuda:N".
        backend: the method of training them: "auto", "stacked", "loop", "compiled" or "ray".
        trainer: replaces the task's own: "torch", or "module:Class".
        ray_address: of a Ray cluster, for the backend "ray".
        threads: CPU threads of torch while clients train; small models are faster with 1.
        resume: continue the simulation in `home`.
        download: True lets the task fetch a public data set into `data`.
        to: a target of each round's numbers, such as "tensorboard:runs", or several, as `fedpareto simulate --to` takes
            them. `warnings` of the run say what a target lacks in the end.
        progress: is called after every round. Default: a line in a notebook, a bar on a terminal. To show nothing, give
            `lambda progress: None`.

    Returns:
        The run: `rounds`, `clients` and `updates` as tables of pandas, and the `model`.

    Raises:
        PackagesMissing: PyTorch or pandas is not installed, or what a target needs.
        SpecError, TaskError, DataError, PartError, AttackError, PluginError: the specification cannot be used.
        GivenModelError: `model` cannot be the initial model.
        ScaleError: the model cannot be filled from `statistics`.
        SinkError: a target of `to` cannot be used as it is named.
        SimulationError: there is nothing to resume, `home` holds something else, or own code raised an exception in a
            round: the message names the client, the round, and the line.
        ValueError: `resume` without `home`, both `data` and `members`, or `threads` below 1.
        TypeError: `spec` is none of these, `task` is no class of a task, or `model` is no path.
        PluginError: in a round, code of a rule or stage raised an exception, or its answer cannot be used. After this
            or a SimulationError in a round the simulation is paused: with a `home` it can be resumed.
    """
    need("fedpareto.simulate needs", "torch", "pandas", extra="torch,experiments")
    without_log_lines()
    from fedpareto.simulation.given_statistics import statistics_of  # noqa: PLC0415 - it imports NumPy
    from fedpareto.simulation.simulate import Simulation  # noqa: PLC0415 - it imports PyTorch

    text = document(spec, "" if task is None else task_name(task))
    if resume and home is None:
        raise ArgumentError("resume: which simulation? Give its home")
    if data is not None and members:
        raise ArgumentError("data or members: the data of all clients, or of each; not both")
    if threads is not None and threads < 1:
        raise ArgumentError(f"threads: at least 1; got {threads}")
    targets = targets_of([to] if isinstance(to, str) else to)
    with ExitStack() as stack:
        directory = Path(home or Path(stack.enter_context(tempfile.TemporaryDirectory()), "home"))
        simulation = Simulation(
            text,
            directory.absolute(),  # own code may change the current directory
            data=Path(data).absolute() if data is not None else None,
            members={name: Path(own).absolute() for name, own in members.items()} if members else None,
            device=device,
            backend=backend,
            trainer=trainer,
            ray_address=ray_address,
            threads=threads,
            resume=resume,
            download=download,
            given=paths_of(model),
            statistics=statistics_of(statistics),
        )
        with simulation:
            show = progress if progress is not None else stack.enter_context(shown())
            history = _sent(simulation, targets, show) if targets else simulation.run(show)
            return replace(history, task=task)


def _sent(
    simulation: "Simulation", targets: Sequence[SinkTarget], show: "Callable[[SimulationProgress], object]"
) -> "History":
    """Runs a simulation whose rounds go to targets; a warning of the run says what one of them lacks in the end."""
    from fedpareto.cli.research.simulation_targets import SimulationTargets  # noqa: PLC0415 - few runs need it

    sending = SimulationTargets(simulation, targets, lambda text: None)

    def advance(now: "SimulationProgress") -> None:
        sending.send()
        show(now)

    try:
        history = simulation.run(advance)
    except BaseException:
        sending.leave()
        raise
    lacking = [f"{each.target} lacks something: {each.problem}" for each in sending.finish(history) if each.problem]
    return replace(history, warnings=(*history.warnings, *lacking))
