"""Sections of a document, and the text of a validation error, with its key."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from federation.text import did_you_mean

MAX_KEY = 200
MAX_CHARACTERS = 400


class Section(BaseModel):
    """A section of a document. An unknown key, or a value of another type, is refused.

    Attributes:
        takers: keys that need certain values of another key: that key, and these values. With another value they
            would have no effect, and are refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    takers: ClassVar[Mapping[str, tuple[str, tuple[str, ...]]]] = {}

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

    `known` names the list of existing keys, of which that of `document` nearest to an unknown one is named; the values
    of `secret` keys are not repeated.
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
    return (message if has_value or key in secret else f"{message}; got {value!r}")[:MAX_CHARACTERS]
