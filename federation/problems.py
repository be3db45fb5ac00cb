"""Sections of a document, and what is wrong with one that was not accepted, in words, with the key."""

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict

MAX_KEY = 200
MAX_CHARACTERS = 400


class Section(BaseModel):
    """A section of a document. An unknown key, or a value of another type, is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def explain(problem: Any, known: str, *, secret: Collection[str] = ()) -> str:
    """One problem of a `pydantic.ValidationError.errors()` as a line.

    `known` says where the existing keys are listed; the values of `secret` keys are not repeated.
    """
    key = ".".join(str(part) for part in problem["loc"])[:MAX_KEY] or "(the document)"
    if problem["type"] == "extra_forbidden":
        return f"{key}: no such key; {known}"
    if problem["type"] == "missing":
        return f"{key}: missing; it has no default"
    if not problem["loc"] and problem["type"] == "value_error":  # of several keys, which the message names
        return str(problem["msg"]).removeprefix("Value error, ")[:MAX_CHARACTERS]
    message, value = f"{key}: {problem['msg'].removeprefix('Value error, ')}", problem["input"]
    # Our own validators of a whole section name what is wrong in it, and others often repeat the text that was given.
    told = problem["type"] == "value_error" and (isinstance(value, dict) or repr(value) in message)
    return (message if told or key in secret else f"{message}; got {value!r}")[:MAX_CHARACTERS]
