"""What a caller gives for a run specification and for a task, as the TOML document and the name that a run has."""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from federation.errors import ArgumentError, ArgumentTypeError
from federation.spec.run_spec import RunSpec, SpecError
from federation.text_files import EncodingError, read_text

if TYPE_CHECKING:
    from federation.tasks import Task

Spec = str | bytes | Path | Mapping[str, Any] | RunSpec


def document(spec: Spec, task: str = "") -> bytes:
    """A run specification as a TOML document; `task` replaces its task, if it is not empty.

    A document that is given as such keeps its bytes, which name the run, unless the task is replaced.

    Raises:
        ArgumentTypeError: it is of another type, or a value in it is.
        SpecError: its file is no text, or TOML cannot read it.
        OSError: there is no such file.
    """
    values: dict[str, Any]
    if isinstance(spec, RunSpec):
        values = spec.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    elif isinstance(spec, Mapping):
        values = dict(spec)
    elif isinstance(spec, str | bytes | Path):
        text = _text(spec)
        if not task:
            return text
        try:
            values = tomllib.loads(text.decode())
        except ValueError as error:
            raise SpecError(f"not TOML: {error}") from None
    else:
        raise ArgumentTypeError(
            f"spec: a TOML text or the path of one is needed, or a dict or RunSpec, not {type(spec).__name__}"
        )
    if task:
        values["task"] = task
    _check(values, "")
    return tomli_w.dumps(values).encode()


def _text(spec: str | bytes | Path) -> bytes:
    if isinstance(spec, str) and spec.endswith(".toml"):
        spec = Path(spec)
    if isinstance(spec, Path):
        try:
            spec = read_text(spec)
        except EncodingError as error:
            raise SpecError(f"cannot read {spec}: {error}") from error
    return spec.encode() if isinstance(spec, str) else spec


def _check(value: Any, where: str) -> None:
    """Raises ArgumentTypeError for a value that TOML does not have; `where` is its place in the specification."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ArgumentTypeError(f"spec: the key {key!r}{f' in {where}' if where else ''} is no text")
            _check(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, where)
    elif not isinstance(value, str | bool | int | float):
        raise ArgumentTypeError(
            f"spec: {where} is {value!r}, of the type {type(value).__name__}; a specification has texts, numbers, "
            "True and False, and lists and dicts of them. Leave a key out for its default"
        )


def check_task(task: object) -> "type[Task]":
    """Returns the class of a task. Raises ArgumentTypeError for anything else."""
    from federation.tasks import Task  # noqa: PLC0415 - not before a task is given

    if not (isinstance(task, type) and issubclass(task, Task)):
        given = task.__name__ if isinstance(task, type) else repr(task)
        raise ArgumentTypeError(f"task: a class that inherits from fedpareto.Task is needed, not {given}")
    return task


def task_name(task: object) -> str:
    """The name under which this process finds the class of a task: `module:Class`.

    Raises:
        ArgumentTypeError: it is no class of a task.
        ArgumentError: its module does not have it under its name, as of a class in a function.
    """
    kind = check_task(task)
    if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
        raise ArgumentError(
            f"task: {kind.__module__} has no {kind.__qualname__} that is this class: define it at the top of a cell or "
            "module, not in a function, and give it again once you have changed it"
        )
    return f"{kind.__module__}:{kind.__qualname__}"
