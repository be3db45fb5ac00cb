"""Submits a run: its specification, which is checked here first, and its initial model, in chunks."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from coordinator.rounds.runs.specification import parse_run
from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.line.channels import CHUNK_BYTES
from federation.plugins import PluginError
from federation.refusals import Refusal
from federation.spec.run_sections import ParametersSpec
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import SharingError
from federation.spec.task_metrics import MetricKind
from federation.task_layout import TaskLayout
from federation.tasks import Task, TaskError, buffers_of, initial_model, metrics_of, task
from federation.text import counted
from federation.text_files import EncodingError, read_text
from federation.training.own import shared_model
from federation.v1 import common_pb2
from federation.v1.admin_pb2 import RunHeader, SubmitRunRequest, SubmitRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import Metric
from federation.vectors import Layout, model_layout
from fedpareto.cli.document import dumps
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.formatting import size
from fedpareto.standard_streams import print_document


@dataclass(frozen=True)
class InitialModel:
    """A safetensors file, on a disk or in memory.

    Attributes:
        pieces: yields its bytes, from the start, in pieces of at most 1 MiB.
        size: its size in bytes.
        digest: the digest of all bytes.
        parameters: the number of its elements that are parameters.
        buffers: the number of its elements that are averaged buffers.
        layout: of the task's whole model; None if it is not known here.
        objectives: those of the task, in its order; empty if the task is not installed here.
        metrics: those of the task, likewise.
    """

    pieces: Callable[[], Iterator[bytes]]
    size: int
    digest: str
    parameters: int
    buffers: int
    layout: TaskLayout | None
    objectives: tuple[str, ...] = ()
    metrics: tuple[MetricKind, ...] = ()

    @classmethod
    def of(
        cls,
        pieces: Callable[[], Iterator[bytes]],
        size: int,
        layout: Layout,
        parameters: ParametersSpec,
        task: Task | None,
        whole: TaskLayout | None = None,
    ) -> "InitialModel":
        """Computes the digest of a model of this layout; without a task here, there are no objectives and metrics.

        `parameters` names those that the run does not share, and `whole` is the layout of the task's whole model. If
        that is not known, it is this one, provided that the run shares all parameters.

        Raises:
            TaskError: the task's code raised an exception, or one of its metrics cannot be used.
        """
        state = hasher()
        for piece in pieces():
            state.update(piece)
        try:
            count = parameters.parameters_of(layout).size
        except SharingError:  # the coordinator refuses this model, and says why
            count = layout.size
        if whole is None and parameters.shares_all:
            whole = TaskLayout.of(layout)
        return cls(
            pieces,
            size,
            f"{DEFAULT_ALGORITHM}:{state.hexdigest()}",
            count,
            layout.size - count,
            whole,
            () if task is None else task.objectives,
            () if task is None else metrics_of(task),
        )


def read_spec(path: Path) -> tuple[bytes, RunSpec]:
    """A run specification from a file, as bytes and parsed; the algorithm and its hyper-parameters are checked too.

    An algorithm, stage or sketch that is not built in may be missing here; the coordinator checks it.

    Raises:
        CommandFailure: it cannot be used; the message names file and key.
    """
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read {path}"):
        text = read_text(path).encode()
    try:
        return text, parse_run(text)[0]
    except SpecError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PluginError):
            cause = cause.__cause__
        if cause is None:
            raise CommandFailure(f"{path}: {error}", code=USAGE) from None
        return text, RunSpec.parse(text)


def made_model(task_name: str, seed: int, parameters: ParametersSpec = ParametersSpec()) -> InitialModel:  # noqa: B008
    """The initial model that a task makes; the same for the same seed.

    `parameters` names those that the run does not share.

    Raises:
        CommandFailure: no such task, its model does not suit `parameters`, or PyTorch is missing.
    """
    try:
        with failing(TaskError, SharingError, code=USAGE):
            task_here = task(task_name)
            whole, values = initial_model(task_here, seed)
            layout, vector = shared_model(task_here, whole, values, parameters)
    except ModuleNotFoundError as error:
        raise CommandFailure(
            f"the initial model of {task_name} is made with {error.name}, which is not installed here: "
            "install fedpareto[torch], or give the model with --model FILE"
        ) from None
    header, data = layout.header, vector.data.cast("B")

    def pieces() -> Iterator[bytes]:
        for part in (memoryview(header), data):
            for start in range(0, len(part), CHUNK_BYTES):
                yield bytes(part[start : start + CHUNK_BYTES])

    with failing(TaskError, code=USAGE):
        told = TaskLayout.of(whole, buffers_of(task_here))
        return InitialModel.of(pieces, len(header) + len(data), layout, parameters, task_here, told)


def model_file(path: Path, task_name: str, parameters: ParametersSpec = ParametersSpec()) -> InitialModel:  # noqa: B008
    """The initial model of a task in a file. `parameters` names those that the run does not share.

    Raises:
        CommandFailure: it is not a model file.
    """
    try:
        with failing(OSError, code=USAGE, what=f"cannot read {path}"):
            layout = model_layout(path)
    except Refusal as refusal:
        raise CommandFailure(
            f"{path} cannot be the initial model: {refusal.message} [{refusal.reason}]", code=USAGE
        ) from None

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    size = path.stat().st_size
    try:
        task_here = task(task_name)
    except (TaskError, ModuleNotFoundError):  # a task that only members have: the specification may name its objectives
        return InitialModel.of(pieces, size, layout, parameters, None)
    with suppress(TaskError, ModuleNotFoundError):  # such as PyTorch, with which it makes a model
        whole = TaskLayout.of(initial_model(task_here, 0)[0], buffers_of(task_here))
        return InitialModel.of(pieces, size, layout, parameters, task_here, whole)
    return InitialModel.of(pieces, size, layout, parameters, task_here)


def submit(
    stub: AdminStub,
    spec: bytes,
    model: InitialModel,
    *,
    paused: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> SubmitRunResponse:
    """Submits a run, or with `dry_run` only checks it; `progress` is called with the bytes of each piece sent."""

    def requests() -> Iterator[SubmitRunRequest]:
        header = RunHeader(
            spec=spec,
            model=model.digest,
            model_bytes=model.size,
            paused=paused,
            objectives=model.objectives,
            dry_run=dry_run,
            metrics=[Metric(**asdict(kind)) for kind in model.metrics],
            layout=None if model.layout is None else common_pb2.TaskLayout(**asdict(model.layout)),
            parameters=model.parameters,
            buffers=model.buffers,
        )
        yield SubmitRunRequest(header=header)
        for piece in () if dry_run else model.pieces():
            yield SubmitRunRequest(chunk=piece)
            progress(len(piece))

    return stub.SubmitRun(requests())


def show_prospects(response: SubmitRunResponse, as_json: bool) -> None:
    """Prints the members of a dry run and the disk space; a CommandFailure if the run could not begin or go on."""
    reasons = {other.client_id: other.reason for other in response.others}
    if as_json:
        print_document(dumps(response))
    else:
        for warning in response.warnings:
            typer.echo(f"warning: {warning}", err=True)
        willing = [name for name in response.members if name not in reasons]
        typer.echo(
            f"members that would take part now: {len(willing)} ({', '.join(willing) or 'none'}); "
            f"a round asks {response.asked}, and needs {counted(response.needed, 'reply', 'replies')}"
        )
        if reasons:
            others = (f"{name} ({reason})" for name, reason in reasons.items())
            typer.echo(f"members that offer the task and would not: {len(reasons)}: {', '.join(others)}")
        free = f"; {size(max(response.disk_free, 0))} are free for it" if response.HasField("disk_free") else ""
        typer.echo(f"disk: about {size(response.disk_needed)} for all rounds{free}")
    if response.obstacle:
        raise CommandFailure(response.obstacle)
    if response.HasField("disk_free") and response.disk_needed > response.disk_free:
        raise CommandFailure("the coordinator's disk has too little space for the run")
    if not as_json:
        typer.echo("nothing was submitted; the run could begin now")
