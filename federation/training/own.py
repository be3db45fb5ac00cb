"""A client's own model in a run that does not share every parameter, and the state that a client keeps of a run."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from federation.durable_files import make_directories, rename_durably
from federation.refusals import Refusal
from federation.spec.computation import Computation, Descend, MeasureAlong
from federation.spec.run_sections import ParametersSpec
from federation.spec.run_spec import with_scale
from federation.spec.sharing import BUFFERS, Chosen, Sharing, SharingError
from federation.statistics.scale import InputScale, ScaleError, ScaleLayer, scale_of
from federation.tasks import Task, buffers_of, initial_model, scale_layer_of
from federation.training.trainer import Trainer
from federation.vectors import Layout, Vector, read_vector, to_bytes
from federation.work.base import Result, RowSchema, Shape, WorkError, payload_layout

if TYPE_CHECKING:
    from federation.v1.common_pb2 import UnsharedParameters

_KEPT = 2  # states, so that a round can be repeated from its beginning
_SUFFIX = ".safetensors"


@dataclass(frozen=True, eq=False)
class Own:
    """The client's addition to the shared parameters: `values` is a whole model (d,), whose shared part is not used."""

    sharing: Sharing
    values: Vector

    def widened(self, computation: Computation) -> Computation:
        """The same computation on the whole model.

        Raises:
            WorkError: a training of several rows: a client has one set of personal parameters.
        """
        sharing = self.sharing
        match computation:
            case Descend() if len(computation.targets) > 1 and (sharing.personal_names or sharing.buffers):
                raise WorkError(
                    "personal parameters and buffers cannot be trained for several rows", reason="parameters"
                )
            case Descend():
                return replace(computation, frozen=sharing.frozen)
            case MeasureAlong():
                still = np.zeros(sharing.buffers + sharing.fixed, dtype=np.float32)
                along = np.append(computation.direction, still)
                return replace(computation, direction=sharing.with_shared(np.zeros_like(self.values), along))
            case _:
                return computation


def run_shape(trainer: Trainer, unshared: "ParametersSpec | UnsharedParameters") -> tuple[Shape, Sharing | None]:
    """The shape of a run's model, and the parameters of the task's model that the run shares; None for all.

    Raises:
        SharingError: as of `Sharing.of` and `check_scaled`.
    """
    shape = trainer.shape
    if not (unshared.personal or unshared.frozen or unshared.buffers or unshared.fixed or trainer.buffers):
        return shape, None
    check_scaled(trainer.scale_layer, unshared)
    sharing = Sharing.of(shape.layout, unshared, trainer.buffers)
    return replace(shape, layout=sharing.shared, buffers=sharing.buffers, fixed=sharing.fixed), sharing


def compute(trainer: Trainer, base: Vector, computation: Computation, own: Own | None, **given: Any) -> Result:
    """As `Trainer.compute`, from the run's model, for rows of its parameters and, where averaged, of its buffers.

    `own` is None for a run that shares all parameters.
    """
    if own is None:
        return trainer.compute(base, computation, **given)
    sharing = own.sharing
    whole = sharing.with_shared(own.values, base)
    result = trainer.compute(whole, own.widened(computation), **given)
    personal = None
    count = sharing.shared.size - sharing.fixed
    rows = {name: sharing.shared_of(row)[:count] for name, row in result.rows.items()}
    if isinstance(computation, Descend) and sharing.personal_names:
        (row,) = result.rows.values()
        personal = sharing.personal_of(whole - row)
    if isinstance(computation, Descend) and sharing.buffers:
        ((name, row),) = rows.items()
        end = len(row) - sharing.buffers
        rows = {name: row[:end], BUFFERS: base[end:count] - row[end:]}
    return replace(result, rows=rows, personal=personal)


def run_model(task: Task, seed: int, parameters: ParametersSpec, statistics: bytes = b"") -> tuple[Layout, Vector]:
    """The model that a run starts from: the shared parameters of the task's initial model.

    `statistics` is the document of the result that `parameters.statistics` names; empty if it names none.

    Raises:
        TaskError: as of `initial_model`.
        SharingError: as of `task_sharing`.
        ScaleError: the model cannot be filled from the result.
    """
    layout, vector = initial_model(task, seed)
    if statistics:
        layer = scale_layer_of(task)
        vector = scaled(layout, vector, layer, scale_of(statistics, layer.columns if layer else ()))
    return shared_model(layout, vector, task_sharing(task, layout, parameters))


def scaled(layout: Layout, vector: Vector, layer: ScaleLayer | None, scale: InputScale) -> Vector:
    """A model (d,) whose layer Standardise has this scale; `vector` stays unchanged.

    Raises:
        ScaleError: the model has no such layer, or one of another size.
    """
    if layer is None:
        raise ScaleError(
            "the task's model has no layer Standardise (fedpareto.Standardise) to be filled with statistics"
        )
    tensors, filled = layout.split(vector), scale.of(layer)
    for name, values in filled.items():
        if name not in tensors or tensors[name].shape != values.shape:
            raise ScaleError(f"the model has no tensor {name!r} of {len(values)} numbers")
    return layout.join({**tensors, **filled})


def scaled_spec(text: bytes, task: Task, result: str, document: bytes) -> bytes:
    """A specification that fills the layer Standardise of its task from a result with this digest and document.

    Raises:
        SpecError: as of `with_scale`.
        ScaleError: the task's model has no such layer, or the result does not suit its columns.
    """
    layer = scale_layer_of(task)
    if layer is None:
        raise ScaleError(
            f"the model of {task.name or type(task).__name__} has no layer Standardise (fedpareto.Standardise) to be "
            "filled with statistics"
        )
    scale_of(document, layer.columns)
    return with_scale(text, result, layer.tensors)


def shared_model(whole: Layout, vector: Vector, sharing: Sharing | None) -> tuple[Layout, Vector]:
    """The part of a task's whole model (d,) that a run shares."""
    return (whole, vector) if sharing is None else (sharing.shared, sharing.shared_of(vector))


def task_sharing(task: Task, whole: Layout, parameters: ParametersSpec) -> Sharing | None:
    """The tensors of the task's model that a run shares; None for all.

    Raises:
        TaskError: as of `buffers_of` and `scale_layer_of`.
        SharingError: as of `run_sharing` and `check_scaled`.
    """
    check_scaled(scale_layer_of(task), parameters)
    return run_sharing(whole, buffers_of(task), parameters)


def assumed_parameters(buffers: Collection[str], layer: ScaleLayer | None) -> ParametersSpec:
    """The treatment of a model's tensors without a specification: buffers are averaged, a scale is fixed."""
    fixed = () if layer is None else layer.tensors
    return ParametersSpec(buffers="averaged" if set(buffers) - {*fixed} else "", fixed=fixed)


def tried_parameters(parameters: ParametersSpec, layer: ScaleLayer | None) -> ParametersSpec:
    """Those of a specification for a trial: a scale is fixed, also if it is not filled yet."""
    fixed = () if layer is None else layer.tensors
    return parameters.model_copy(update={"fixed": (*parameters.fixed, *fixed)})


def check_scaled(layer: ScaleLayer | None, chosen: Chosen) -> None:
    """Raises SharingError if a run would train a model with a layer Standardise without its scale."""
    if layer is None or all(any(fnmatchcase(name, pattern) for pattern in chosen.fixed) for name in layer.tensors):
        return
    raise SharingError(
        f"parameters.fixed: the model has a layer Standardise ({layer.name!r}), and {' and '.join(layer.tensors)} are "
        "not fixed: give the run that described the data (--statistics), which fills them; or name them in fixed, with "
        "a model that has them (--model)"
    )


def run_sharing(whole: Layout, buffers: Collection[str], parameters: ParametersSpec) -> Sharing | None:
    """The tensors of the task's model that a run shares; None for all.

    Raises:
        SharingError: as of `Sharing.of`, and if `buffer_names` do not match the averaged buffers.
    """
    if parameters.shares_all and not buffers:
        return None
    sharing = Sharing.of(whole, parameters, buffers)
    trained = parameters.trained(sharing.shared)
    named = {tensor.name for tensor in trained.tensors[len(parameters.parameters_of(sharing.shared).tensors) :]}
    if unnamed := sorted(sharing.averaged_names ^ named):
        raise SharingError(
            f"parameters.buffer_names: they must match the buffers, and nothing else: see {unnamed[0]!r}"
        )
    return sharing


def state_file(sharing: Sharing | None, result: Result, residuals: tuple[RowSchema, ...]) -> bytes | None:
    """The file with the state that a client keeps once its result is accepted; None without state.

    `sharing` is None for a run that shares all parameters; `residuals` are those of the work.
    """
    kept = []
    if sharing is not None and result.personal is not None:
        kept.append((sharing.personal, result.personal))
    if result.residual is not None:
        kept.append((payload_layout(residuals), result.residual))
    if not kept:
        return None
    layout = Layout(tuple(tensor for part, _ in kept for tensor in part.tensors))
    return to_bytes(layout, np.concatenate([values for _, values in kept]))


class KeptState:
    """The state of one client in one run: a file for each of the last rounds in which it trained.

    It holds personal parameters, under their names, and the rounding errors of its rows.
    """

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        self._directory = directory
        self._durable = durable

    def before(self, round_: int, layout: Layout) -> Vector | None:
        """These tensors after the newest training before a round; None if they are not kept, or damaged.

        Raises:
            OSError: they cannot be read at present. They may be whole, and they exist nowhere else.
        """
        rounds = [number for number in self.rounds() if number < round_]
        if not rounds:
            return None
        path = self.path(rounds[-1])
        try:
            kept, vector = read_vector(path)
        except Refusal:
            return None
        with suppress(OSError):
            os.utime(path)  # the age since the last use decides when the state of a run is erased
        if not set(layout.tensors) <= set(kept.tensors):
            return None
        parts = kept.split(vector)
        return np.concatenate([parts[tensor.name].reshape(-1) for tensor in layout.tensors])

    def keep(self, round_: int, content: bytes) -> None:
        """Keeps the file of the state after the training of a round. Raises OSError."""
        make_directories(self._directory, 0o700)
        temporary = self._directory / "new.tmp"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            if self._durable:
                os.fsync(file.fileno())
        self.take(round_, temporary)

    def take(self, round_: int, file: Path) -> None:
        """Moves a file, which is on the disk, to the path of the state after a round. Raises OSError.

        Older states and those of later rounds, which a restored coordinator has forgotten, are erased.
        """
        make_directories(self._directory, 0o700)
        if self._durable:
            rename_durably(file, self.path(round_))
        else:
            file.rename(self.path(round_))
        rounds = self.rounds()
        kept = [number for number in rounds if number <= round_][-_KEPT:]
        for number in set(rounds) - set(kept):
            self.path(number).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds after which a state is kept, in order. Raises OSError if the directory cannot be read."""
        try:
            files = os.listdir(self._directory)  # glob would take a directory that cannot be read for an empty one
        except FileNotFoundError:
            return []
        names = [name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, round_: int) -> Path:
        """The path of the state after a round."""
        return self._directory / f"{round_}{_SUFFIX}"
