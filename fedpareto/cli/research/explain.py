"""Every key of a run specification, from the models that validate it, as a TOML document with comments."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from federation.aggregation.registry import common_hyperparameters, listed
from federation.spec.problems import Section
from federation.spec.run_spec import RunSpec
from federation.text import comment, without_links

# For the keys without a default: something that a reader can begin with.
_EXAMPLES = {"name": '"my-run"', "task": '"digits"', "rounds": "30"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_NAMES = {"int": "integer", "str": "text", "bool": "true or false", "float": "number"}


@dataclass(frozen=True)
class Key:
    """One key of a run specification.

    Attributes:
        path: with its section in front.
        type: in words, with its bounds.
        default: as TOML; None when the key must be given, empty when it has no value unless it is given.
        meaning: in words.
        algorithm: of which it is a hyper-parameter; empty for other keys.
        taken_by: the values of another key that take it, if not all do.
    """

    path: str
    type: str
    default: str | None
    meaning: str
    algorithm: str = ""
    taken_by: tuple[str, ...] = ()


def every_key() -> list[Key]:
    """Every key, section by section, and every hyper-parameter of every algorithm."""
    keys = list(_keys(RunSpec, ""))
    after = next(i for i, key in enumerate(keys) if key.path == "algorithm.prior") + 1
    return [*keys[:after], *_hyperparameters(), *keys[after:]]


def template(items: Iterable[Key]) -> str:
    """The keys as a complete specification with every default; keys that need a choice are comments."""
    lines = ["# A run specification: every key, with its default."]
    section = ""
    for key in items:
        owner, _, name = key.path.rpartition(".")
        if owner != section:
            section = owner
            lines += ["", f"[{section}]"]
        must = "must be given" if key.default is None else ""
        remarks = "; ".join(filter(None, (key.type, must)))
        lines.append("")
        owners = key.algorithm or ", ".join(key.taken_by)  # others refuse it
        lines += comment(f"{owners + ': ' if owners else ''}{key.meaning} ({remarks})")
        value = _EXAMPLES.get(name, '""') if key.default is None else key.default
        lines.append(f"{'# ' if owners or not value else ''}{name} = {value or '...'}")
    return "\n".join(lines)


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            default = None if field.is_required() else _toml(field.default)
            kind_text = ", ".join([_type(kind), *filter(None, map(_bound, field.metadata))])
            _, takers = model.takers.get(name, ("", ())) if issubclass(model, Section) else ("", ())
            yield Key(f"{prefix}{name}", kind_text, default, without_links(str(field.description)), taken_by=takers)


def _hyperparameters() -> Iterator[Key]:
    own = [(rule.name, hyperparameter) for rule in listed() for hyperparameter in rule.hyperparameters]
    for name, hyperparameter in [
        *own,
        *(("every algorithm", hyperparameter) for hyperparameter in common_hyperparameters()),
    ]:
        default = None if hyperparameter.default is MISSING else _toml(hyperparameter.default)
        yield Key(
            f"algorithm.{hyperparameter.name}", _type(hyperparameter.type), default, hyperparameter.help, algorithm=name
        )


def _bound(constraint: Any) -> str:
    for name, text in _BOUNDS.items():
        if hasattr(constraint, name):
            return f"{text} {getattr(constraint, name)}"
    return ""


def _type(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_type(get_args(kind)[0])}"
    name = getattr(kind, "__name__", str(kind))
    return _NAMES.get(name, name)


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)
