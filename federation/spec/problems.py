"""Sections of a document, how a document is read, and the text of a validation error, with its key."""

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from federation.text import did_you_mean
from federation.text_files import FORMAT, check_format, read_text

MAX_KEY = 200
MAX_CHARACTERS = 400

S = TypeVar("S", bound=BaseModel)

Format = Annotated[
    int, BeforeValidator(check_format), Field(description=f"The format of the file; this version reads {FORMAT}.")
]
"""The key `format` of a file that people write."""


class Section(BaseModel):
    """A section of a document. An unknown key, or a value of another type, is refused.

    Attributes:
        takers: keys that need certain values of another key: that key, and these values. With another value they
            would have no effect, and are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    takers: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The section with the values of a message or of a program. Raises ValueError with the text of each problem."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError("; ".join(explain(problem, "") for problem in error.errors())) from None

    @model_validator(mode="after")
    def _check_taken(self) -> Self:
        for key, (option, values) in self.takers.items():
            if key in self.model_fields_set and (chosen := getattr(self, option)) not in values:
                raise ValueError(f'{key} is for {option} = {" or ".join(values)}, not for "{chosen}"')
        return self


def _keys(section: type[BaseModel], path: Sequence[int | str]) -> Iterator[str]:
    """The keys of the section at a path below another one; none where that has keys of any name."""
    for part in path:
        field = section.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return
        section = field.annotation
    yield from section.model_fields


def explain(problem: Any, known: str, document: type[BaseModel] | None = None, *, secret: Collection[str] = ()) -> str:
    """One problem of a `pydantic.ValidationError.errors()` as a line.

    `known` names the list of existing keys, of which that of `document` nearest to an unknown one is named. No value of
    a `secret` key is repeated, nor one inside it.
    """
    key = ".".join(str(part) for part in problem["loc"])[:MAX_KEY] or "(the document)"
    if problem["type"] == "extra_forbidden":
        *sections, name = problem["loc"]
        near = did_you_mean(str(name), _keys(document, sections)) if document else ""
        return f"{key}: no such key{near or ';'} {known}"
    if problem["type"] == "missing":
        return f"{key}: missing; it has no default"
    if not problem["loc"] and problem["type"] == "value_error":  # of several keys, which the message names
        return str(problem["msg"]).removeprefix("Value error, ")[:MAX_CHARACTERS]
    message, value = f"{key}: {problem['msg'].removeprefix('Value error, ')}", problem["input"]
    # Our own validators of a whole section name the error in it, and others often repeat the given text.
    has_value = problem["type"] == "value_error" and (isinstance(value, dict) or repr(value) in message)
    hidden = not set(secret).isdisjoint(map(str, problem["loc"]))
    return (message if has_value or hidden else f"{message}; got {value!r}")[:MAX_CHARACTERS]


def read_document(
    path: Path, document: type[S], known: str, failure: type[Exception], *, secret: Collection[str] = ()
) -> S:
    """The TOML document in a file that an owner writes by hand.

    `known` and `secret` are as for `explain`.

    Raises:
        FileNotFoundError: there is no such file.
        failure: it cannot be read, is not TOML, or has keys that are unknown or wrong, each named with its line.
    """
    try:
        text = read_text(path)
        values = tomllib.loads(text)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise failure(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and EncodingError are ValueErrors
        raise failure(f"{path} is not a TOML document: {error}") from None
    try:
        return document.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(
            f"{_line(text, problem['loc'])}{explain(problem, known, document, secret=secret)}"
            for problem in error.errors()
        )
        raise failure(f"{path} cannot be used:\n{problems}") from None


def _line(text: str, path: Sequence[int | str]) -> str:
    """Where a key stands in a TOML document, as "line 3: "; empty if it is not found.

    A key inside a value (an inline table, a list) stands where the value begins.
    """
    header, depth, place = tuple[str, ...](), 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            here = header = _path(line)
        else:
            here = (*header, *_path(f"{line.partition('=')[0]}= 0"))
        if depth < len(here) and here == tuple(path[: len(here)]):
            depth, place = len(here), f"line {number}: "
    return place


def _path(text: str) -> tuple[str, ...]:
    """The path of the one key in a line of TOML; empty if it has none."""
    names = list[str]()
    try:
        value: Any = tomllib.loads(text)
    except (ValueError, RecursionError):
        return ()
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        names.append(name)
    return tuple(names)
