"""Submitting a run: its specification, checked here first, and its initial model, in chunks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from federation.channels import CHUNK_BYTES
from federation.digests import DEFAULT_ALGORITHM, hasher
from federation.plugins import PluginError
from federation.refusals import Refusal
from federation.runs import RunSpec, SpecError
from federation.v1.admin_pb2 import RunHeader, SubmitRunRequest, SubmitRunResponse
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.cli.failure import USAGE, Failure


@dataclass(frozen=True)
class InitialModel:
    """A safetensors file that need not lie on a disk.

    Attributes:
        pieces: makes its bytes, from the start, in pieces of at most 1 MiB.
        size: bytes.
        digest: of all of them.
        objectives: of the task, in its order; none where the task could not be asked.
    """

    pieces: Callable[[], Iterator[bytes]]
    size: int
    digest: str
    objectives: tuple[str, ...] = ()


def read_spec(path: Path) -> tuple[bytes, RunSpec]:
    """A run specification from a file, as bytes and parsed; the algorithm and its hyper-parameters are checked too.

    Raises:
        Failure: it cannot be used; the message names file and key.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}", code=USAGE) from None
    return text, check_spec(text, str(path))


def check_spec(text: bytes, source: str) -> RunSpec:
    """Parses a run specification, and checks the algorithm and its hyper-parameters.

    An algorithm, stage or sketch that is not built in need not be here: it is the coordinator that must have it.

    Raises:
        Failure: it cannot be used; the message names the source and the key.
    """
    from coordinator.rounds.specification import parse_run

    try:
        spec, _ = parse_run(text)
    except SpecError as error:
        if _is_of_a_plugin(error):
            return RunSpec.parse(text)
        raise Failure(f"{source}: {error}", code=USAGE) from None
    return spec


def _is_of_a_plugin(error: BaseException | None) -> bool:
    """Whether an error began with a plug-in that cannot be used on this machine."""
    while error is not None and not isinstance(error, PluginError):
        error = error.__cause__
    return error is not None


def made_model(task_name: str, seed: int) -> InitialModel:
    """The initial model of a task; the same for the same seed.

    Raises:
        Failure: no such task, or no torch to make its model with.
    """
    from federation.tasks import TaskError, initial_model, task

    try:
        found = task(task_name)
        layout, vector = initial_model(found, seed)
    except TaskError as error:
        raise Failure(str(error), code=USAGE) from None
    except ModuleNotFoundError as error:
        raise Failure(
            f"the initial model of {task_name} is made with {error.name}, which is not installed here: "
            "install fedpareto[torch], or give the model with --model FILE"
        ) from None
    header, data = layout.header, vector.data.cast("B")

    def pieces() -> Iterator[bytes]:
        for part in (memoryview(header), data):
            for start in range(0, len(part), CHUNK_BYTES):
                yield bytes(part[start : start + CHUNK_BYTES])

    return _hashed(pieces, len(header) + len(data), tuple(found.objectives))


def model_file(path: Path, task_name: str) -> InitialModel:
    """The initial model of a task in a file.

    Raises:
        Failure: it is not a model file.
    """
    from federation.tasks import TaskError, task
    from federation.vectors import model_layout

    try:
        model_layout(path)
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}", code=USAGE) from None
    except Refusal as refusal:
        raise Failure(f"{path} cannot be the initial model: {refusal.message} [{refusal.reason}]", code=USAGE) from None

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    try:
        objectives = tuple(task(task_name).objectives)
    except (TaskError, ModuleNotFoundError):  # a task of the members' own: the specification may name its objectives
        objectives = ()
    return _hashed(pieces, path.stat().st_size, objectives)


def _hashed(pieces: Callable[[], Iterator[bytes]], size: int, objectives: tuple[str, ...]) -> InitialModel:
    state = hasher()
    for piece in pieces():
        state.update(piece)
    return InitialModel(pieces, size, f"{DEFAULT_ALGORITHM}:{state.hexdigest()}", objectives)


def submit(
    stub: AdminStub,
    spec: bytes,
    model: InitialModel,
    *,
    paused: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> SubmitRunResponse:
    """Submits a run.

    Args:
        stub: the Admin service.
        spec: the TOML document.
        model: what the first round starts from.
        paused: wait for `resume` before the first round.
        dry_run: only ask what would happen; the model stays here.
        progress: called with the number of bytes of each piece that goes out.
    """

    def requests() -> Iterator[SubmitRunRequest]:
        header = RunHeader(
            spec=spec,
            model=model.digest,
            model_bytes=model.size,
            paused=paused,
            objectives=model.objectives,
            dry_run=dry_run,
        )
        yield SubmitRunRequest(header=header)
        if dry_run:
            return
        for piece in model.pieces():
            yield SubmitRunRequest(chunk=piece)
            progress(len(piece))

    return stub.SubmitRun(requests())
