"""Submits a run: its specification, which is checked here first, and its initial model, in chunks."""

from collections.abc import Callable, Iterator
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
from federation.tasks import Task, TaskError, metrics_of, task
from federation.text import counted
from federation.text_files import EncodingError, read_text
from federation.training.own import run_model
from federation.v1.admin_pb2 import RunHeader, SubmitRunRequest, SubmitRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import Metric
from federation.vectors import model_layout
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
        objectives: those of the task, in its order; empty if the task is not installed here.
        metrics: those of the task, likewise.
    """

    pieces: Callable[[], Iterator[bytes]]
    size: int
    digest: str
    objectives: tuple[str, ...] = ()
    metrics: tuple[MetricKind, ...] = ()

    @classmethod
    def of(cls, pieces: Callable[[], Iterator[bytes]], size: int, task: Task | None) -> "InitialModel":
        """Computes the digest; without a task here, there are no objectives and metrics.

        Raises:
            TaskError: the task's code raised an exception, or one of its metrics cannot be used.
        """
        state = hasher()
        for piece in pieces():
            state.update(piece)
        if task is None:
            return cls(pieces, size, f"{DEFAULT_ALGORITHM}:{state.hexdigest()}")
        return cls(pieces, size, f"{DEFAULT_ALGORITHM}:{state.hexdigest()}", task.objectives, metrics_of(task))


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
            layout, vector = run_model(task_here, seed, parameters)
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
        return InitialModel.of(pieces, len(header) + len(data), task_here)


def model_file(path: Path, task_name: str) -> InitialModel:
    """The initial model of a task in a file.

    Raises:
        CommandFailure: it is not a model file.
    """
    try:
        with failing(OSError, code=USAGE, what=f"cannot read {path}"):
            model_layout(path)
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
        return InitialModel.of(pieces, size, task(task_name))
    except (TaskError, ModuleNotFoundError):  # a task that only members have: the specification may name its objectives
        return InitialModel.of(pieces, size, None)


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
        )
        yield SubmitRunRequest(header=header)
        for piece in () if dry_run else model.pieces():
            yield SubmitRunRequest(chunk=piece)
            progress(len(piece))

    return stub.SubmitRun(requests())


def show_prospects(response: SubmitRunResponse, as_json: bool) -> None:
    """Prints the members to ask and the disk space of a dry run; a CommandFailure if the run could not begin."""
    if as_json:
        print_document(dumps(response))
    else:
        for warning in response.warnings:
            typer.echo(f"warning: {warning}", err=True)
        names = ", ".join(response.members) or "none"
        typer.echo(f"members that could be asked now: {len(response.members)} ({names}); a round asks {response.asked}")
        free = f"; {size(max(response.disk_free, 0))} are free for it" if response.HasField("disk_free") else ""
        typer.echo(f"disk: about {size(response.disk_needed)} for all rounds{free}")
    if len(response.members) < response.minimum:
        raise CommandFailure(
            f"the run could not begin: {counted(len(response.members), 'member')} could be asked, and a round needs "
            f"{response.minimum}"
        )
    if response.HasField("disk_free") and response.disk_needed > response.disk_free:
        raise CommandFailure("the coordinator's disk has too little space for the run")
    if not as_json:
        typer.echo("nothing was submitted; the run could begin now")
