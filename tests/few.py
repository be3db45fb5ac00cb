"""Forms of tests, of which `make test` takes a few and `make test-full` all."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import pytest

FEW_EXAMPLES = 30  # inputs of a property, where `make test-full` takes hypothesis's hundred
Test = TypeVar("Test", bound=Callable[..., object])


def few_of(values: Iterable[object], *few: object) -> list[object]:
    """The values as parameters; those that are not among the few are marked `full`."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.full) for value in values]


def every(step: int, values: Iterable[object]) -> list[object]:
    """The values as parameters: all but the first, the one `step` later, and so on are marked `full`."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        if place % step
        else value
        for place, value in enumerate(values)
    ]


def few(*forms: object) -> Callable[[Test], Test]:
    """Marks the forms of a test `full` that are not among these; it stands right above its `parametrize`.

    A form is named by its id, or by one of its values.

    Raises:
        ValueError: no form has this name.
    """

    def decorate(test: Test) -> Test:
        marks: list[pytest.Mark] = test.pytestmark  # type: ignore[attr-defined]
        mark = marks[-1]
        names, given = mark.args
        values = [*given]
        single = isinstance(names, str) and "," not in names
        sets = [(each,) if single else each for each in values]
        told = [_words(name, each) for name, each in zip(mark.kwargs.get("ids") or sets, sets, strict=True)]
        for form in forms:
            if not any(form in words for words in told):
                raise ValueError(f"no form of {test} is {form!r}")
        parameters = [
            value if any(form in words for form in forms) else pytest.param(*each, marks=pytest.mark.full)
            for value, each, words in zip(values, sets, told, strict=True)
        ]
        marks[-1] = pytest.mark.parametrize(names, parameters, **mark.kwargs).mark
        return test

    return decorate


def _words(name: object, values: Sequence[Any]) -> list[object]:
    """What a form may be named by: its id and its values; not by those that contain others, such as arrays."""
    return [word for word in (name, *values) if isinstance(word, str | int | float | Enum) or callable(word)]
