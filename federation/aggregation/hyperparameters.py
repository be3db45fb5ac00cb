"""Hyper-parameters: the options of a rule, or of a stage before it, and their values in a run specification."""

import dataclasses
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from federation.aggregation.interface import HyperparameterError

_WORDS = {
    float: "a number",
    bool: "true or false",
    int: "an integer",
    str: "text",
    tuple[str, ...]: "a list of texts",
    tuple[float, ...]: "a list of numbers",
}


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """One hyper-parameter.

    Attributes:
        name: its key in `[algorithm]`.
        type: of its values: float, int, bool, str, a Literal, a tuple of texts or numbers, or a union of these.
        default: its value where none is given; `dataclasses.MISSING` where one must be given.
        help: its effect.
        stages: the built-in stages that it is for; empty for a hyper-parameter of a rule.
    """

    name: str
    type: Any
    default: Any
    help: str
    stages: tuple[str, ...] = ()


def hyperparameters(kind: type) -> tuple[Hyperparameter, ...]:
    """The hyper-parameters of a class of rules or stages.

    Raises:
        HyperparameterError: the class has fields but is not a dataclass.
    """
    for name, value in vars(kind).items():
        if isinstance(value, dataclasses.Field):
            raise HyperparameterError(
                f"{name}: {kind.__name__} is not a dataclass: write @dataclass(frozen=True, kw_only=True) above it"
            )
    types = get_type_hints(kind)
    return tuple(
        Hyperparameter(field.name, types[field.name], field.default, field.metadata.get("help", ""))
        for field in dataclasses.fields(kind)
        if field.name != "stages"  # of every algorithm; specifications set it as `pre`
    )


def typed(key: str, value: Any, kind: Any) -> Any:
    """A value of this type; integers are numbers, too. Raises HyperparameterError for another type, with the key."""
    if kind == tuple[float, ...] and isinstance(value, list | tuple):
        return tuple(typed(f"{key}[{at}]", item, float) for at, item in enumerate(value))
    for choice in get_args(kind) if _is_union(kind) else (kind,):
        if _fits(value, choice):
            return tuple(value) if isinstance(value, list) else float(value) if choice is float else value
    raise HyperparameterError(f"{key} must be {_expected(kind)}; got {value!r}")


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == tuple[str, ...]:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return value in get_args(kind) if get_origin(kind) is Literal else type(value) is kind


def _expected(kind: Any) -> str:
    if _is_union(kind):
        return " or ".join(map(_expected, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    return _WORDS.get(kind, str(kind))
