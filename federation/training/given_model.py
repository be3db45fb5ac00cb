"""The model that a run starts from, taken from a file as people have it: of PyTorch, of another library, or exported.

Tensors are taken by name and brought into the order of the task's model, since libraries sort them. What is sent and
signed is float32 in our own format.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from federation.spec.run_sections import ParametersSpec
from federation.spec.sharing import Sharing
from federation.statistics.scale import scale_of
from federation.task_layout import TaskLayout
from federation.tasks import Task, buffers_of, initial_model, scale_layer_of
from federation.tensor_names import listed
from federation.text import counted
from federation.training.model_file import ModelFile
from federation.training.own import scaled, task_sharing
from federation.vectors import FOREIGN_DTYPES, Array, Layout, Vector

_EXACT = {"F16": "float16", "BF16": "bfloat16"}  # float32 has all of their values
_FLOATS = ("F32", *_EXACT, "F64")
_SHOWN = 3  # names in a remark
_INTEGERS = tuple(name for name in FOREIGN_DTYPES if name[0] in "IU" or name == "BOOL")


@dataclass(frozen=True)
class GivenModel:
    """The model of a file, as a run begins with it.

    Attributes:
        layout: of the run's model.
        vector: its values, (d,).
        whole: the layout of the task's whole model.
        remarks: what was converted, added or left out, for the person who named the file.
    """

    layout: Layout
    vector: Vector
    whole: TaskLayout
    remarks: tuple[str, ...]


def given_model(path: Path, task: Task, seed: int, parameters: ParametersSpec, statistics: bytes = b"") -> GivenModel:
    """Reads the initial model of a run from a safetensors file.

    Each parameter that the run shares must be there, under its name in the task's model. A buffer may be missing. What
    the run does not share is left out. `statistics` is the document of the result that `parameters.statistics` names;
    the scale in it replaces that of the file.

    Raises:
        GivenModelError: the file is of another kind, or holds another model.
        TaskError, SharingError, ScaleError: as of `run_model`.
    """
    file = ModelFile(path)
    layout, vector = initial_model(task, seed)
    buffers = frozenset(buffers_of(task))
    sharing = task_sharing(task, layout, parameters)
    filled: dict[str, Array] = {}
    if statistics:
        layer = scale_layer_of(task)
        vector = scaled(layout, vector, layer, scale_of(statistics, layer.columns if layer else ()))
        filled = {name: layout.split(vector)[name] for name in (layer.tensors if layer else ())}
    # What is fixed is not made by training: a file without it, and no result, leave nothing to take it from.
    optional = buffers - (frozenset() if sharing is None else sharing.fixed_names) | filled.keys()
    shared = layout if sharing is None else sharing.shared
    ties, untrained = _other_tensors(task, layout)
    own = untrained | layout.split(vector)
    sources = _sources(file, ties)
    if difference := _difference(file, shared, optional, sources, own):
        raise file.unfit(f"{difference}. The task is {task.name}")
    parts = {
        name: _values(file, sources[name], buffer=name in buffers)
        if name in sources and name not in filled
        else own[name]
        for name in shared.shapes
    }
    taken = {name: source for name, source in sources.items() if name in parts and name not in filled}
    left_out = {name: source for name, source in sources.items() if name not in parts}
    remarks = [
        *_conversions(file, taken, parts),
        *_additions([name for name in parts if name not in taken and name not in filled]),
        *_omissions(file, left_out, own, buffers, sharing),
    ]
    told = TaskLayout.of(layout, buffers)
    return GivenModel(shared, shared.join(parts), told, tuple(f"{path}: {remark}" for remark in remarks))


def model_in_order(path: Path, absent: str, parameters: ParametersSpec) -> tuple[Layout, Vector]:
    """The initial model in a file whose task cannot be used on this machine, for which `absent` gives the reason.

    The file has the run's tensors in the order of the task's model. The vector (d,) is mapped.

    Raises:
        GivenModelError: the file is of another kind, the run does not share all of its tensors, or it needs the task:
            it holds other types than float32, or its tensors are sorted by name.
    """
    file = ModelFile(path)
    why = ""
    if other := next((tensor for tensor in file.tensors.values() if tensor.dtype != "F32"), None):
        why = f"tensor {other.name[:120]!r} is {other.dtype}, not F32"
    elif _sorted_by_name(list(file.tensors)):
        why = "its tensors are sorted by name, as libraries write them, and not in the order of a model"
    if why:
        raise file.unfit(f"{why}. The task would say their order, but it is not here: {absent}")
    try:
        layout = Layout(tuple(file.tensors.values()))
        parameters.check_suits(layout)
    except ValueError as error:
        raise file.unfit(str(error)) from None
    return layout, file.vector


def _sorted_by_name(names: list[str]) -> bool:
    """True if the order of tensors is that of their names, and no model's: with 10 before 2, or a bias first."""
    if names != sorted(names):
        return False
    biases = {name for name in names if name.endswith("bias")}
    numbered = sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(20), name))
    return names != numbered or any(f"{name[:-6]}bias" in biases for name in names if name[-6:] == "weight")


def _other_tensors(task: Task, layout: Layout) -> tuple[dict[str, str], dict[str, Array]]:
    """Further names of tied parameters, each with the first; and the tensors of the task's model that no run shares."""
    if type(task).initial is not Task.initial:
        return {}, {}
    from federation.tasks.parameters import build, further_names, untrained  # noqa: PLC0415 - they need PyTorch

    model = build(task)
    ties = further_names(model)
    return ties, untrained(model, {*layout.shapes, *ties})


def _sources(file: ModelFile, ties: Mapping[str, str]) -> dict[str, str]:
    """The name in the file of each tensor, by its name in the model. Raises GivenModelError for ties that differ."""
    sources: dict[str, str] = {}
    for name in file.tensors:
        source = sources.setdefault(ties.get(name, name), name)
        if source != name and not np.array_equal(file.array(source), file.array(name)):
            raise file.unfit(f"{source!r} and {name!r} are one tensor of the task's model, and differ in the file")
    return sources


def _difference(
    file: ModelFile, shared: Layout, buffers: Collection[str], sources: Mapping[str, str], known: Collection[str]
) -> str:
    """The first tensor, in the order of the model, that differs from the run's model, as text; empty if none does."""
    unknown = next((file.tensors[source] for name, source in sources.items() if name not in known), None)
    surplus = f"it has {unknown.name[:120]!r}, {list(unknown.shape)}, and the task's model has not" if unknown else ""
    for tensor in shared.tensors:
        expected = f"{tensor.name!r} is {list(tensor.shape)} in the task's model, and"
        if tensor.name in sources:
            shape = file.tensors[sources[tensor.name]].shape
            if shape != tensor.shape:
                return f"{expected} {list(shape)} in the file"
        elif tensor.name not in buffers:
            return "; ".join(filter(None, (f"{expected} missing in the file", surplus, _prefix(file, shared))))
    return surplus


def _prefix(file: ModelFile, shared: Layout) -> str:
    """Advice where all names of a file have one word in front, as those of a parallel or compiled model."""
    prefix = f"{next(iter(file.tensors)).partition('.')[0]}."
    names = {name.removeprefix(prefix) for name in file.tensors if name.startswith(prefix)}
    if len(names) < len(file.tensors) or names.isdisjoint(shared.shapes):
        return ""
    return f"all of its names begin with {prefix[:120]!r}: save the tensors under their names without it"


def _values(file: ModelFile, name: str, *, buffer: bool) -> Vector:
    """A tensor as float32. Raises GivenModelError if it cannot be a parameter or a buffer."""
    accepted = (*_FLOATS, *_INTEGERS) if buffer else _FLOATS
    if (dtype := file.tensors[name].dtype) not in accepted:
        raise file.unfit(f"{name!r} is {dtype}; a {'buffer' if buffer else 'parameter'} is {', '.join(accepted)}")
    with np.errstate(over="ignore"):
        values: Vector = file.array(name).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise file.unfit(f"{name!r} has values that are not finite in float32")
    return values


def _conversions(file: ModelFile, sources: Mapping[str, str], parts: Mapping[str, Vector]) -> Iterator[str]:
    """Remarks on tensors that were not float32."""
    dtypes = {name: file.tensors[source].dtype for name, source in sources.items()}
    for dtype, word in _EXACT.items():
        if count := [*dtypes.values()].count(dtype):
            yield f"{counted(count, 'tensor')} of {word} became float32, which has the same values"
    others = [name for name, dtype in dtypes.items() if dtype not in ("F32", *_EXACT)]
    rounded = [name for name in others if not np.array_equal(file.array(sources[name]), parts[name].astype(float))]
    if rounded:
        yield f"{counted(len(rounded), 'tensor')} rounded to float32: {listed(rounded, _SHOWN)}"


def _additions(names: Collection[str]) -> Iterator[str]:
    """A remark on buffers that the file lacks."""
    if names:
        count, some = counted(len(names), "buffer"), listed(names, _SHOWN)
        yield f"{count} not in the file are those of a new model of the task: {some}"


def _omissions(
    file: ModelFile,
    left_out: Mapping[str, str],
    own: Mapping[str, Array],
    buffers: Collection[str],
    sharing: Sharing | None,
) -> Iterator[str]:
    """A remark on each kind of tensors that the run does not share."""
    kinds: dict[str, list[str]] = {}
    for name in left_out:
        kinds.setdefault(_kind(name, buffers, sharing), []).append(name)
    for kind, names in kinds.items():
        equal = all(np.array_equal(file.array(left_out[name]), own[name]) for name in names)
        values = "which are the same here" if equal else "which differ from the file's"
        count, some = counted(len(names), kind), listed(names, _SHOWN)
        yield (
            f"{count} left out, as the run does not share them: {some}. Members use the initial values of the task, "
            f"{values}"
        )


def _kind(name: str, buffers: Collection[str], sharing: Sharing | None) -> str:
    """The kind of a tensor that a run does not share."""
    if name in buffers:
        return "buffer"
    if sharing is not None and name in sharing.personal_names:
        return "personal parameter"
    return "frozen parameter" if sharing is not None and name in sharing.frozen_names else "untrained tensor"
