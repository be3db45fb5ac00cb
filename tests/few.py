"""Parameters of tests, of which `make test` takes a few and `make test-full` all."""

from collections.abc import Iterable

import pytest

FEW_EXAMPLES = 50  # inputs of a property, where `make test-full` takes hypothesis's hundred


def few_of(values: Iterable[object], *few: object) -> list[object]:
    """The values as parameters; those that are not among the few are marked `full`."""
    return [value if value in few else pytest.param(value, marks=pytest.mark.full) for value in values]
