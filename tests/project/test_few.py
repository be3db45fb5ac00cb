"""Forms of a test that `make test` takes, and those that `make test-full` adds."""

from collections.abc import Callable, Iterable

import pytest

from tests.few import every, few, few_of


def full(values: Iterable[object]) -> list[bool]:
    """Which of the parameters are marked `full`."""
    return [pytest.mark.full in getattr(value, "marks", ()) for value in values]


def marked(*forms: object, names: object = "name", values: Iterable[object], **options: object) -> list[bool]:
    """Which of the forms `few` has marked `full`."""

    def test() -> None: ...

    decorated: Callable[[], None] = few(*forms)(pytest.mark.parametrize(names, values, **options)(test))  # type: ignore[arg-type]
    (mark,) = decorated.pytestmark  # type: ignore[attr-defined]
    return full(mark.args[1])


def test_forms_that_are_not_named_are_marked_full() -> None:
    assert full(few_of(["a", "b", "c"], "b")) == [True, False, True]
    assert marked("b", values={"a": 1, "b": 2}) == [True, False]
    assert marked(int, 3, values=[int, float, 3]) == [False, True, False]


def test_a_form_of_several_values_is_named_by_one_of_them_or_by_its_id() -> None:
    several = [("a", [1]), ("b", [2]), ("c", [3])]
    assert marked("c", names=("name", "numbers"), values=several) == [True, True, False]
    assert marked("first", names="name, numbers", values=several, ids=["first", "second", "third"]) == [
        False,
        True,
        True,
    ]


def test_a_name_that_no_form_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no form of .* is 'd'"):
        marked("a", "d", values=["a", "b"])


def test_every_third_form_is_not_marked() -> None:
    assert full(every(3, [("a", 1), ("b", 2), ("c", 3), ("d", 4)])) == [False, True, True, False]
