"""Submits a run: its specification, which is checked here first, and its models, in chunks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from coordinator.rounds.runs.specification import parse_run
from federation import tasks
from federation.plugins import PluginError
from federation.spec.run_spec import RunSpec, SpecError, with_columns, with_models
from federation.spec.sharing import SharingError
from federation.spec.task_metrics import MetricKind
from federation.statistics.scale import ScaleError
from federation.task_layout import TaskLayout
from federation.tasks import (
    Column,
    Task,
    TaskAbsent,
    TaskError,
    buffers_of,
    cautions_of,
    columns_of,
    metrics_of,
    scale_layer_of,
)
from federation.text import counted
from federation.text_files import EncodingError, read_text
from federation.training.given_model import given_model, model_in_order
from federation.training.model_file import GivenModelError
from federation.training.own import assumed_parameters, run_model, scaled_spec
from federation.transport.channels import CHUNK_BYTES
from federation.transport.payload_check import PayloadCheck
from federation.trust.envelope import envelope_digest
from federation.v1 import common_pb2
from federation.v1.admin_pb2 import (
    BestBy,
    ExportModelRequest,
    GetRoundRequest,
    GetRunRequest,
    MeasuredModel,
    RunChoice,
    RunHeader,
    SubmitRunRequest,
    SubmitRunResponse,
)
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import Metric, RunState
from federation.vectors import Layout, Vector
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
        remarks: what was converted, added or left out of the file that the administrator gave, and the task's cautions.
        stored: True for a model of an earlier run, which the coordinator has: nothing is sent.
    """

    pieces: Callable[[], Iterator[bytes]]
    size: int
    digest: str
    parameters: int
    buffers: int
    layout: TaskLayout | None
    objectives: tuple[str, ...] = ()
    metrics: tuple[MetricKind, ...] = ()
    remarks: tuple[str, ...] = ()
    stored: bool = False

    @classmethod
    def of(
        cls,
        model: tuple[Layout, Vector],
        spec: RunSpec,
        task: Task | None,
        whole: TaskLayout | None,
        remarks: tuple[str, ...] = (),
    ) -> "InitialModel":
        """The file of a model. Without a task here, there are no objectives and metrics.

        `spec` is that of the run, and `whole` is the layout of the task's whole model.

        Raises:
            CommandFailure: the coordinator would refuse this model.
            TaskError: a metric of the task cannot be used.
        """
        layout, vector = model
        parts = memoryview(layout.header), vector.data.cast("B")

        def pieces() -> Iterator[bytes]:
            for part in parts:
                for start in range(0, len(part), CHUNK_BYTES):
                    yield bytes(part[start : start + CHUNK_BYTES])

        check = PayloadCheck(None)
        for part in parts:
            check.feed(part)
        digest = check.finish()
        if check.problem is not None:
            raise CommandFailure(f"the initial model: {check.problem.message} [{check.problem.reason}]", code=USAGE)
        count, trained = (part(layout).size for part in (spec.parameters.parameters_of, spec.parameters.trained))
        metrics: tuple[MetricKind, ...] = ()
        with suppress(ModuleNotFoundError):  # of PyTorch; the specification may name the metrics
            metrics = metrics_of(task) if task is not None else ()
        objectives = task.objectives if task is not None else ()
        remarks += cautions_of(task, spec) if task is not None else ()
        counts = count, trained - count
        return cls(pieces, layout.file_bytes, digest, *counts, whole, objectives, metrics, remarks)


def read_spec(path: Path) -> tuple[bytes, RunSpec]:
    """A run specification from a file, as bytes and parsed; see `checked_spec`.

    Raises:
        CommandFailure: it cannot be used; the message names file and key.
    """
    with failing(OSError, EncodingError, code=USAGE, what=f"cannot read {path}"):
        text = read_text(path).encode()
    with failing(SpecError, code=USAGE, what=str(path)):
        return text, checked_spec(text)


def checked_spec(text: bytes) -> RunSpec:
    """A run specification; the algorithm and its hyper-parameters are checked too.

    An algorithm, stage or sketch that is not built in may be missing here; the coordinator checks it.

    Raises:
        SpecError: it cannot be used; the message names the key.
    """
    try:
        return parse_run(text)[0]
    except SpecError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PluginError):
            cause = cause.__cause__
        if cause is None:
            raise
        return RunSpec.parse(text)


def initial_model(spec: RunSpec, path: Path | None, own: Task | None = None, statistics: bytes = b"") -> InitialModel:
    """The initial model of a run: that of the file, if one is given, else the one that the task makes from the seed.

    Where the task cannot be used on this machine, the tensors of a file are sent in the order that they have. `own` is
    the task; None loads the one that the specification names. `statistics` is the document of the result that
    `spec.parameters.statistics` names.

    Raises:
        CommandFailure: no such task, a task or file that does not suit `spec.parameters`, a result that does not suit
            the task, or PyTorch is missing.
    """
    learned = own
    if spec.parameters.statistics and not statistics:
        raise CommandFailure(
            "parameters.statistics names the result of a run that has described data: give this run, too, with "
            "--statistics RUN",
            code=USAGE,
        )
    with failing(TaskError, SharingError, GivenModelError, ScaleError, code=USAGE):
        try:
            learned = own or tasks.task(spec.task)
            if path is None:
                whole, values = tasks.initial_model(learned, spec.seed)
                shared = whole, values  # of a run that describes data, which takes no model
                if not spec.describes:
                    shared = run_model(learned, spec.seed, spec.parameters, statistics)
                return InitialModel.of(shared, spec, learned, TaskLayout.of(whole, buffers_of(learned)))
            given = given_model(path, learned, spec.seed, spec.parameters, statistics)
            return InitialModel.of((given.layout, given.vector), spec, learned, given.whole, given.remarks)
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
        layout, vector = model_in_order(path, absent, spec.parameters)
        if statistics:
            raise CommandFailure(f"the layer Standardise of {spec.task} cannot be filled here: {absent}", code=USAGE)
        told = TaskLayout.of(layout) if spec.parameters.shares_all else None
        return InitialModel.of((layout, vector), spec, learned, told)


def given_models(
    text: bytes,
    spec: RunSpec,
    files: Sequence[Path],
    run: str,
    best: str,
    own: Task | None = None,
    statistics: bytes = b"",
) -> tuple[bytes, list[InitialModel]]:
    """The specification to submit and the models of files; none if the model is that of a `run`, see `model_of_run`.

    `statistics` is as in `initial_model`.

    Raises:
        CommandFailure: as of `initial_model`; or the sources do not suit each other or the kind of the run.
    """
    _check_sources(not spec.measures, files, run, best)
    if spec.describes:
        text = named_columns(text, spec, own)
        spec = RunSpec.parse(text)
    if not spec.measures:
        return text, [initial_model(spec, files[0] if files else None, own, statistics)]
    return models_of_files(text, files, own) if files else (text, [])


def scaled_by(stub: AdminStub, text: bytes, name: str, own: Task | None = None) -> tuple[bytes, bytes]:
    """The specification with the result of a run that has described data, and the document of this result.

    Args:
        stub: the coordinator.
        text: the specification.
        name: of the run that has described data.
        own: the task; None loads the one that the specification names.

    Raises:
        CommandFailure: the run has no result; the task's model has no layer Standardise; or the specification does not
            suit them.
    """
    response = stub.GetRound(GetRoundRequest(run=name, round=0))
    if not response.document:
        state = RunState.Name(response.run.state).removeprefix("RUN_STATE_")
        raise CommandFailure(
            f"run {response.run.run_id} is {state}, and has no result: it needs to be a run of "
            'kind = "statistics" that has completed',
            code=USAGE,
        )
    return with_result(text, envelope_digest(response.result), response.document, own), response.document


def with_result(text: bytes, result: str, document: bytes, own: Task | None = None) -> bytes:
    """The specification with the result, of this digest, from which the layer Standardise of its task is filled.

    Raises:
        CommandFailure: as of `scaled_by`.
    """
    spec = RunSpec.parse(text)
    with failing(TaskError, SpecError, ScaleError, code=USAGE):
        try:
            return scaled_spec(text, own or tasks.task(spec.task), result, document)
        except ModuleNotFoundError as error:
            raise CommandFailure(
                f"the model of {spec.task} is made with {error.name}, which is not installed here", code=USAGE
            ) from None


def named_columns(text: bytes, spec: RunSpec, own: Task | None = None) -> bytes:
    """The specification of a run that describes data, with the columns that its task names.

    Raises:
        CommandFailure: neither the specification nor the task, as it is here, names any.
    """
    columns: tuple[Column, ...] = ()
    with failing(TaskError, SpecError, code=USAGE):
        with suppress(TaskAbsent, ModuleNotFoundError):
            columns = columns_of(own or tasks.task(spec.task))
        return with_columns(text, columns)


def _check_sources(trains: bool, files: Sequence[Path], run: str, best: str) -> None:
    """Raises CommandFailure for options that do not suit each other or the kind of the run."""
    problem = ""
    if trains and (len(files) > 1 or run or best):
        problem = 'a run that trains begins with one model: several, --model-of and --best are for kind = "evaluate"'
    elif not trains and bool(files) == bool(run):
        problem = 'kind = "evaluate": give the models to measure, each with --model FILE, or --model-of RUN'
    elif best and not run:
        problem = "--best METRIC chooses a model of a run: give --model-of RUN, too"
    if problem:
        raise CommandFailure(problem, code=USAGE)


def models_of_files(text: bytes, files: Sequence[Path], own: Task | None = None) -> tuple[bytes, list[InitialModel]]:
    """The specification of a run that evaluates the models of some files, and these models; errors as `initial_model`.

    The files hold the buffers of the task's model, unless the specification says what becomes of them.
    """
    spec = RunSpec.parse(text)
    with suppress(TaskError, ModuleNotFoundError):
        if spec.parameters.shares_all:
            learned = own or tasks.task(spec.task)
            assumed = assumed_parameters(buffers_of(learned), scale_layer_of(learned))
            spec = spec.model_copy(update={"parameters": assumed})
    models = [initial_model(spec, file, own) for file in files]
    with failing(SpecError, code=USAGE):
        return with_models(text, [model.digest for model in models], spec), models


def model_of_run(stub: AdminStub, text: bytes, name: str, best: str) -> tuple[bytes, list[InitialModel]]:
    """The specification of a run that evaluates a model of another run, and this model, which stays where it is.

    Args:
        stub: the coordinator.
        text: the specification.
        name: of the other run.
        best: a metric, for its best model by the mean on the validation split; empty for its newest model.

    Raises:
        CommandFailure: the specification does not suit this run.
    """
    run = stub.GetRun(GetRunRequest(run=name, choice=RunChoice.RUN_CHOICE_ONLY, brief=True)).run
    by = BestBy(metric=best, of="mean", split="validation") if best else None
    pieces = stub.ExportModel(ExportModelRequest(run=run.run_id, best=by))
    first = next(pieces)
    pieces.cancel()  # its digest is enough
    if not first.origin.HasField("round"):
        raise CommandFailure(f"run {run.run_id} has made no model yet", code=USAGE)
    with failing(SpecError, code=USAGE):
        named = with_models(text, [first.digest], RunSpec.parse(run.spec))
    metrics = tuple(MetricKind(metric.name, metric.better, metric.largest) for metric in run.metrics)
    stored = InitialModel(
        lambda: iter(()), first.size, first.digest, 0, 0, None, tuple(run.objectives), metrics, stored=True
    )
    return named, [stored]


def submit(
    stub: AdminStub,
    spec: bytes,
    models: Sequence[InitialModel],
    *,
    paused: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> SubmitRunResponse:
    """Submits a run, or with `dry_run` only checks it; `progress` is called with the bytes of each piece sent.

    `models` are the one that a run begins with, or those that it evaluates.
    """
    model, measures = models[0], RunSpec.parse(spec).measures

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
            models=[MeasuredModel(digest=m.digest, size=m.size, stored=m.stored) for m in models] if measures else [],
        )
        yield SubmitRunRequest(header=header)
        for sent in () if dry_run else models:
            for piece in () if sent.stored else sent.pieces():
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
