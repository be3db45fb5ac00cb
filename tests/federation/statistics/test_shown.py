"""Statistics: the members' rules, and that a hidden count is not given back by what is shown."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from federation.statistics.data_columns import Column
from federation.statistics.rules import MemberRules
from federation.statistics.shown import FEWER, FEWEST, WITHHELD, Shown, described
from federation.statistics.sums import sums_of

AGE = Column(name="age", low=0.0, high=100.0)
RULES = MemberRules()


def test_a_member_with_few_samples_or_many_bins_tells_nothing() -> None:
    assert RULES.problem(49, 2) == ("statistics:samples", "statistics are told of at least 50 samples")
    assert RULES.problem(199, 20) == ("statistics:bins", "20 bins are asked for; there is at most one for 10 samples")
    assert RULES.problem(200, 20) is None
    with pytest.raises(ValueError, match="samples = 0"):
        MemberRules(samples=0)


def test_a_count_of_one_to_four_is_told_as_none() -> None:
    ages = np.repeat([5.0, 15.0, 25.0, 35.0, -1.0], [4, 5, 60, 1, 3])
    told = RULES.told(sums_of(ages, AGE, 10))
    assert (told.outside, told.cells[:4]) == (0, (0, 5, 60, 0))
    assert told.values == len(ages)  # which tells nothing of them


def test_the_counts_of_a_channel_are_those_of_samples() -> None:
    pixels = np.full((60, 4), 15.0)
    pixels[:4] = 95.0  # four samples, sixteen values
    assert RULES.told(sums_of(pixels, AGE, 2)).cells == (224, 0)


def test_a_column_that_is_mostly_outside_its_range_is_told_as_empty() -> None:
    incomes = np.linspace(0, 1000, 100)
    told = RULES.told(sums_of(incomes, Column(name="income", low=990.0, high=1000.0), 2))
    nothing = RULES.told(sums_of(np.full(100, np.nan), Column(name="income", low=990.0, high=1000.0), 2))
    assert told == nothing


def possible(shown: tuple[Shown, ...], values: int) -> list[set[int]]:
    """Which counts below 10 each hidden count can be, for somebody who knows the rule and all that is shown."""
    rest = values - sum(count for count in shown if isinstance(count, int))
    small = [at for at, count in enumerate(shown) if count == FEWER]
    withheld = sum(count == WITHHELD for count in shown)
    largest = min((count for count in shown[2:] if isinstance(count, int)), default=values)
    found: list[set[int]] = [set() for _ in small]
    for guess in product(range(FEWEST), repeat=len(small)):
        left = rest - sum(guess)
        if withheld * FEWEST <= left <= withheld * largest:
            for at, value in enumerate(guess):
                found[at].add(value)
    return found


@pytest.mark.parametrize(
    "counts",
    [
        [100, 50, 30, 0],
        [100, 50, 30, 7],
        [100, 12, 30, 9],
        [500, 9, 9, 9],
        [500, 11, 200, 12],
        [50, 0, 0, 0],
        [40, 40, 1, 40],
    ],
)
@pytest.mark.parametrize("missing", [0, 3, 10, 60])
def test_what_is_shown_leaves_each_hidden_count_between_none_and_nine(counts: list[int], missing: int) -> None:
    ages = np.concatenate([np.repeat([12.0, 37.0, 62.0, 87.0], counts), np.full(missing, np.nan)])
    found = described(sums_of(ages, AGE, 4), AGE, 4)
    shown = (found.missing, found.outside, *found.cells)
    assert all(not isinstance(count, int) or count >= FEWEST for count in shown)
    if FEWER in shown:
        assert possible(shown, len(ages)) == [set(range(FEWEST))] * shown.count(FEWER)
    assert isinstance(found.count, int) == isinstance(found.missing, int)


def test_a_column_of_which_nothing_can_be_shown_shows_nothing() -> None:
    found = described(sums_of(np.array([1.0, 60.0] * 3), AGE, 2), AGE, 2)
    assert {found.missing, found.outside, found.count, *found.cells} == {WITHHELD}
    assert found.mean is found.deviation is None
    assert not found.quantiles


def test_the_mean_tells_of_a_rare_value_no_more_than_its_count() -> None:
    rare = np.repeat([0.0, 1.0], [993, 7])
    column = Column(name="rare", low=0.0, high=1.0)
    assert described(sums_of(rare, column, 2), column, 2).mean is None
    three = np.repeat([0.0, 1.0, 2.0], [500, 493, 7])
    column = Column(name="grade", low=0.0, high=2.0)
    sums = sums_of(three, column, 3)
    found = described(sums, column, 3)
    assert FEWER in found.cells
    assert found.mean is not None
    others = [replace(sums, first=sums.first + Fraction(change)) for change in (-3, 2)]
    assert {described(other, column, 3).mean for other in others} == {found.mean}


def test_quantiles_come_from_the_bins_alone() -> None:
    ages = np.repeat(np.arange(5.0, 100.0, 10.0), 100)
    found = described(sums_of(ages, AGE, 10), AGE, 10, fewest=0)
    assert found.quantiles == pytest.approx({0.05: 5.0, 0.25: 25.0, 0.5: 50.0, 0.75: 75.0, 0.95: 95.0})
    open_ends = Column(name="x0")
    found = described(sums_of(np.full(100, 1e30), open_ends, 20), open_ends, 20, fewest=0)
    assert set(found.quantiles.values()) == {2.0**16}


@pytest.mark.parametrize(
    ("column", "bins", "cells", "edges"),
    [
        ({"classes": 5}, 20, 5, ()),
        ({"low": 0.0, "high": 1.0}, 4, 4, (0.25, 0.5, 0.75)),
        ({}, 2, 2, (0.0,)),
        ({}, 3, 2, (0.0,)),
        ({}, 8, 8, (-(2.0**11), -1.0, -(2.0**-11), 0.0, 2.0**-11, 1.0, 2.0**11)),
    ],
)
def test_the_bins_of_a_column(column: dict[str, Any], bins: int, cells: int, edges: tuple[float, ...]) -> None:
    made = Column(name="a", **column)
    assert made.cells(bins) == cells
    if not made.classes:
        assert made.edges(bins) == edges
