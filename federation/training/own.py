"""A client's own model in a run that does not share every parameter, and the state that a client keeps of a run."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from federation.durable_files import make_directories, rename_durably
from federation.refusals import Refusal
from federation.spec.computation import Computation, Descend, MeasureAlong
from federation.spec.run_sections import ParametersSpec
from federation.spec.sharing import BUFFERS, Sharing, SharingError
from federation.tasks import Task, buffers_of, initial_model
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
                along = np.append(computation.direction, np.zeros(sharing.buffers, dtype=np.float32))
                return replace(computation, direction=sharing.with_shared(np.zeros_like(self.values), along))
            case _:
                return computation


def run_shape(trainer: Trainer, unshared: "ParametersSpec | UnsharedParameters") -> tuple[Shape, Sharing | None]:
    """The shape of a run's model, and the parameters of the task's model that the run shares; None for all.

    Raises:
        SharingError: as of `Sharing.of`.
    """
    shape = trainer.shape
    if not (unshared.personal or unshared.frozen or unshared.buffers or trainer.buffers):
        return shape, None
    sharing = Sharing.of(shape.layout, unshared.personal, unshared.frozen, trainer.buffers, unshared.buffers)
    return replace(shape, layout=sharing.shared, buffers=sharing.buffers), sharing


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
    rows = {name: sharing.shared_of(row) for name, row in result.rows.items()}
    if isinstance(computation, Descend) and sharing.personal_names:
        (row,) = result.rows.values()
        personal = sharing.personal_of(whole - row)
    if isinstance(computation, Descend) and sharing.buffers:
        ((name, row),) = rows.items()
        count = len(row) - sharing.buffers
        rows = {name: row[:count], BUFFERS: base[count:] - row[count:]}
    return replace(result, rows=rows, personal=personal)


def run_model(task: Task, seed: int, parameters: ParametersSpec) -> tuple[Layout, Vector]:
    """The model that a run starts from: the shared parameters of the task's initial model.

    Raises:
        TaskError: as of `initial_model`.
        SharingError: as of `run_sharing`.
    """
    layout, vector = initial_model(task, seed)
    return shared_model(layout, vector, run_sharing(layout, buffers_of(task), parameters))


def shared_model(whole: Layout, vector: Vector, sharing: Sharing | None) -> tuple[Layout, Vector]:
    """The part of a task's whole model (d,) that a run shares."""
    return (whole, vector) if sharing is None else (sharing.shared, sharing.shared_of(vector))


def run_sharing(whole: Layout, buffers: Collection[str], parameters: ParametersSpec) -> Sharing | None:
    """The tensors of the task's model that a run shares; None for all.

    Raises:
        SharingError: as of `Sharing.of`, and if `buffer_names` do not match the averaged buffers.
    """
    if parameters.shares_all and not buffers:
        return None
    sharing = Sharing.of(whole, parameters.personal, parameters.frozen, buffers, parameters.buffers)
    named = {tensor.name for tensor in sharing.shared.tensors[len(parameters.parameters_of(sharing.shared).tensors) :]}
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
