"""Submits a run: its specification, which is checked here first, and its initial model, in chunks."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from coordinator.rounds.runs.specification import parse_run
from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.line.channels import CHUNK_BYTES
from federation.line.payload_check import PayloadCheck
from federation.plugins import PluginError
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import SharingError
from federation.spec.task_metrics import MetricKind
from federation.tasks import Task, TaskAbsent, TaskError, metrics_of, task
from federation.text import counted
from federation.training.given_model import given_model, must_be_in_order
from federation.training.model_file import GivenModelError
from federation.training.own import run_model
from federation.v1.admin_pb2 import RunHeader, SubmitRunRequest, SubmitRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import Metric
from federation.vectors import Layout, Vector
from fedpareto.cli.document import dumps
from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.formatting import size


@dataclass(frozen=True)
class InitialModel:
    """A safetensors file, on a disk or in memory.

    Attributes:
        pieces: yields its bytes, from the start, in pieces of at most 1 MiB.
        size: its size in bytes.
        digest: the digest of all bytes.
        objectives: those of the task, in its order; empty if the task is not installed here.
        metrics: those of the task, likewise.
        remarks: what was converted, added or left out of the file that the administrator gave.
    """

    pieces: Callable[[], Iterator[bytes]]
    size: int
    digest: str
    objectives: tuple[str, ...] = ()
    metrics: tuple[MetricKind, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def of_vector(cls, layout: Layout, vector: Vector, task: Task, remarks: tuple[str, ...] = ()) -> "InitialModel":
        """The model of a task, in memory. Raises CommandFailure for a metric of the task that cannot be used."""
        parts = memoryview(layout.header), vector.data.cast("B")

        def pieces() -> Iterator[bytes]:
            for part in parts:
                for start in range(0, len(part), CHUNK_BYTES):
                    yield bytes(part[start : start + CHUNK_BYTES])

        state = hasher()
        for part in parts:
            state.update(part)
        name = f"{DEFAULT_ALGORITHM}:{state.hexdigest()}"
        with failing(TaskError, code=USAGE):
            return cls(pieces, layout.file_bytes, name, task.objectives, metrics_of(task), remarks)

    @classmethod
    def of_file(cls, path: Path, task: Task | None) -> "InitialModel":
        """A file that is sent as it is. Raises CommandFailure for what the coordinator would refuse."""

        def pieces() -> Iterator[bytes]:
            with path.open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece

        check = PayloadCheck(None)
        for piece in pieces():
            check.feed(piece)
        digest = check.finish()
        if (problem := check.problem) is not None:
            raise CommandFailure(
                f"{path} cannot be the initial model: {problem.message} [{problem.reason}]", code=USAGE
            )
        metrics: tuple[MetricKind, ...] = ()
        with suppress(ModuleNotFoundError):  # of PyTorch; the specification may name the metrics
            metrics = metrics_of(task) if task is not None else ()
        return cls(pieces, path.stat().st_size, digest, task.objectives if task is not None else (), metrics)


def read_spec(path: Path) -> tuple[bytes, RunSpec]:
    """A run specification from a file, as bytes and parsed; the algorithm and its hyper-parameters are checked too.

    An algorithm, stage or sketch that is not built in may be missing here; the coordinator checks it.

    Raises:
        CommandFailure: it cannot be used; the message names file and key.
    """
    with failing(OSError, code=USAGE, what=f"cannot read {path}"):
        text = path.read_bytes()
    try:
        return text, parse_run(text)[0]
    except SpecError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PluginError):
            cause = cause.__cause__
        if cause is None:
            raise CommandFailure(f"{path}: {error}", code=USAGE) from None
        return text, RunSpec.parse(text)


def initial_model(spec: RunSpec, path: Path | None) -> InitialModel:
    """The initial model of a run: that of the file, if one is given, else the one that the task makes from the seed.

    Where the task cannot be used on this machine, a file in the order of the task's model is sent as it is.

    Raises:
        CommandFailure: no such task, a task or file that does not suit `spec.parameters`, or PyTorch is missing.
    """
    learned = None
    with failing(TaskError, SharingError, GivenModelError, code=USAGE):
        try:
            learned = task(spec.task)
            if path is None:
                return InitialModel.of_vector(*run_model(learned, spec.seed, spec.parameters), learned)
            given = given_model(path, learned, spec.seed, spec.parameters)
            return InitialModel.of_vector(given.layout, given.vector, learned, given.remarks)
        except ModuleNotFoundError as error:
            absent = f"the initial model of {spec.task} is made with {error.name}, which is not installed here"
            if path is None:
                raise CommandFailure(
                    f"{absent}: install fedpareto[torch], or give the model with --model FILE"
                ) from None
        except TaskAbsent as error:
            if path is None:
                raise
            absent = str(error)
        must_be_in_order(path, absent, spec.parameters)
        return InitialModel.of_file(path, learned)


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
        typer.echo(dumps(response))
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
