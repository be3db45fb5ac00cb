"""Statistics as words of a private sum: exact to the stated error, refused if no data have them, and moved before."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.spec.run_spec import RunSpec, SpecError
from federation.statistics.data_columns import Column, ColumnError, check_summable
from federation.statistics.moved import Landmarks
from federation.statistics.result import summed
from federation.statistics.sums import ColumnSums, sums_of
from federation.statistics.words import MOST_SAMPLES, from_words, to_words, word_count

Numbers = NDArray[np.float64]
AGE = Column(name="age", low=0.0, high=120.0)
FREE, ILL = Column(name="free"), Column(name="ill", classes=3)


def total(parts: list[Numbers], column: Column, bins: int = 4) -> NDArray[np.uint64]:
    made = [to_words(len(part), [sums_of(part, column, bins)], [column]).view(np.uint64) for part in parts]
    words: NDArray[np.uint64] = np.sum(made, axis=0, dtype=np.uint64)
    return words


def moved(values: Numbers, column: Column, bins: int = 4, least: int = 5, parts: int = 1) -> ColumnSums | None:
    marks = Landmarks(column, bins, least)
    for part in np.array_split(values, parts):
        marks.add(part)
    moves = marks.moves()
    return None if moves is None else sum_of([moves.told(part) for part in np.array_split(values, parts)])


def sum_of(told: list[ColumnSums]) -> ColumnSums:
    first, *others = told
    for other in others:
        first = first + other
    return first


@pytest.mark.parametrize(("low", "high"), [(0.0, 120.0), (-1e30, 1e30), (1e6, 1e6 + 0.01), (-3.0, -2.5)])
def test_totals_are_those_of_the_pooled_data_to_the_error_of_one_rounding_for_each_member(
    low: float, high: float
) -> None:
    rng, column = np.random.default_rng(1), Column(name="x", low=low, high=high)
    middle, half = (low + high) / 2, (high - low) / 2
    parts = [middle + half * rng.normal(0, 0.6, 100 + 10 * number) for number in range(8)]
    parts[3][:] = middle + half / 3  # constant
    parts[4][:] = np.nan
    parts[5][:2] = 1e30, -1e30
    samples, (found,) = from_words(total(parts, column), 8, [column], 4)
    pooled = np.concatenate(parts)
    exact = sums_of(pooled, column, 4)
    assert samples == len(pooled)
    assert (found.sums.cells, found.sums.missing, found.sums.outside) == (exact.cells, exact.missing, exact.outside)
    error, around = Fraction(8, 2**33), (Fraction(low) + Fraction(high)) / 2
    unit = (Fraction(high) - Fraction(low)) / 2
    assert abs(found.sums.first - exact.first) <= error * unit
    squares = [one.second - 2 * around * one.first + one.count * around**2 for one in (found.sums, exact)]
    assert abs(squares[0] - squares[1]) <= error * unit**2


def test_a_channel_of_images_has_the_mean_of_its_pixels_if_all_images_have_equally_many() -> None:
    rng, column = np.random.default_rng(2), Column(name="x0", low=0.0, high=16.0)
    parts = [rng.uniform(0, 16, (60 + number, 8, 8)) for number in range(3)]
    _, (found,) = from_words(total(parts, column), 3, [column], 4)
    pooled = np.concatenate([part.reshape(-1) for part in parts])
    assert found.averaged
    assert found.sums.unit == 64
    assert float(found.sums.first / found.sums.count) == pytest.approx(pooled.mean(), abs=8 * 3 * 2.0**-33)
    parts[1] = rng.uniform(0, 16, (60, 4, 4))
    _, (mixed,) = from_words(total(parts, column), 3, [column], 4)
    assert not mixed.averaged
    assert mixed.sums.unit >= 64, "the cell rule counts by the largest image"


def test_totals_that_no_data_have_are_refused() -> None:
    parts = [np.random.default_rng(number).uniform(20, 80, 100) for number in range(5)]
    words = total(parts, AGE).view(np.int64)
    names = ["samples", "values", "unit", "square", "missing", "outside", "first", "second", *"abcd"]
    for name, change in (
        ("samples", -1), ("samples", -400), ("samples", 10**9), ("values", 10**6), ("unit", 1), ("square", -1),
        ("missing", 501), ("outside", -1), ("outside", 2**60), ("first", 600 << 32), ("first", -(600 << 32)),
        ("second", 600 << 32), ("second", -(600 << 32)), ("a", 2**60), ("b", -500),
    ):  # fmt: skip
        changed = words.copy()
        changed[names.index(name)] += change
        with pytest.raises(ColumnError):
            from_words(changed.view(np.uint64), 5, [AGE], 4)
    with pytest.raises(ColumnError, match="are not the numbers"):
        from_words(words[:-1].view(np.uint64), 5, [AGE], 4)
    with pytest.raises(ColumnError, match="fewer than 10 samples"):
        summed(total([np.array([30.0])] * 5, AGE), "abcde", [AGE], 4, ["train"])
    with pytest.raises(ColumnError, match="at most 10000000"):
        to_words(MOST_SAMPLES + 1, [], [])


def test_the_sums_of_the_largest_members_do_not_wrap() -> None:
    whole = ColumnSums(
        values=MOST_SAMPLES, unit=1, missing=0, outside=0, cells=(0, 0, 0, MOST_SAMPLES),
        first=Fraction(120 * MOST_SAMPLES), second=Fraction(120**2 * MOST_SAMPLES),
    )  # fmt: skip
    words = to_words(MOST_SAMPLES, [whole], [AGE]).view(np.uint64) * np.uint64(100)
    samples, (found,) = from_words(words, 100, [AGE], 4)
    assert (samples, found.sums.first) == (100 * MOST_SAMPLES, 100 * whole.first)


def test_a_range_that_is_too_narrow_for_its_place_is_refused_by_name() -> None:
    with pytest.raises(ColumnError, match="column 'x': the range from 1e\\+09"):
        check_summable((Column(name="x", low=1e9, high=1e9 + 1),))
    text = 'name="a"\ntask="digits"\nkind="statistics"\nprivacy.secure="sum"\n[statistics]\ncolumns=["x"]\nranges.x='
    RunSpec.parse(text + "[0.0, 1.0]")
    with pytest.raises(SpecError, match=r"statistics.ranges: column 'x'.*too narrow"):
        RunSpec.parse(text + "[1e9, 1000000001.0]")


def test_a_column_without_a_range_and_classes_have_counts_alone() -> None:
    assert word_count([FREE, ILL, AGE], 4) == 1 + (5 + 4) + (5 + 3) + (5 + 2 + 4)
    _, (found,) = from_words(total([np.linspace(-9, 9, 70)] * 5, FREE), 5, [FREE], 4)
    assert not found.averaged
    document = summed(total([np.linspace(-9, 9, 70)] * 5, FREE), "abcde", [FREE], 4, ["train"]).document
    assert b'"mean":null' in document
    assert b'"private":true' in document


VALUES: dict[str, Callable[[np.random.Generator], Numbers]] = {
    "even": lambda rng: rng.uniform(0, 120, 200),
    "ages": lambda rng: rng.normal(50, 12, 200).round(),
    "flags": lambda rng: (rng.random(200) < 0.02).astype(float),
    "wide": lambda rng: rng.standard_cauchy(200) * 100,
    "missing": lambda rng: np.where(rng.random(200) < 0.97, np.nan, 3.0),
    "some missing": lambda rng: np.where(rng.random(200) < 0.02, np.nan, 30.0),
    "constant": lambda rng: np.full(200, 119.0),
    "coded values": lambda rng: coded(rng, 999.0, 999.0),
    "coded values on both sides": lambda rng: coded(rng, 999.0, -99.0),
}


def coded(rng: np.random.Generator, *codes: float) -> Numbers:
    """200 ages from 20 to 70, of which one is 110 and 0 to 8 are each code in place of an age."""
    ages = rng.integers(20, 71, 200).astype(np.float64)
    ages[0] = 110.0
    for number, code in enumerate(codes):
        ages[10 * number + 1 :][: int(rng.integers(9))] = code
    return ages


@pytest.mark.parametrize("name", VALUES)
def test_no_number_that_enters_a_sum_is_of_one_to_four_samples(name: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        values = VALUES[name](rng)
        for column, bins in ((AGE, 4), (AGE, 20), (FREE, 10), (Column(name="c", classes=2), 2)):
            told = moved(values, column, bins)
            if told is None:
                continue
            for count in (*told.cells, told.outside, told.missing):
                assert count == 0 or count >= 5
            assert told.values == told.missing + told.outside + sum(told.cells), "nothing is left out"
            assert told == moved(values, column, bins, parts=7), "in parts as at once"
            low, high = map(Fraction, column.range)
            if not column.classes:
                assert low * told.count <= told.first <= high * told.count


def test_a_sample_that_no_other_is_like_changes_nothing_but_its_digits() -> None:
    ages = np.random.default_rng(3).normal(50, 10, 200).round()
    for column, bins in (
        (AGE, 4),
        (Column(name="x", low=0.0, high=1e6), 4),
        (Column(name="x", low=40.0, high=1e4), 20),
    ):
        lone = ages.copy()
        lone[7] = 5000.0
        common = ages.copy()
        common[7] = np.sort(ages)[-2]
        assert moved(lone, column, bins) == moved(common, column, bins)
    flags = np.zeros(200)
    one = flags.copy()
    one[3] = 1.0
    for column in (Column(name="f", low=0.0, high=1.0), Column(name="f", classes=2), FREE):
        assert moved(one, column) == moved(flags, column)


@pytest.mark.parametrize("codes", [[999.0], [-1.0], [999.0, -1.0], [7.0, np.nan]])
def test_coded_values_beyond_the_range_uncover_no_sample_that_no_other_is_like(codes: list[float]) -> None:
    ages = np.append(np.tile([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], 20), np.repeat(codes, 5))
    for column, bins in ((Column(name="x", low=8.0, high=100.0), 10), (Column(name="x", low=8.0, high=998.0), 2)):
        common = moved(np.append(ages, 60.0), column, bins)
        assert common is not None
        assert common.outside == 5 * sum(not np.isnan(code) for code in codes)
        for lone in (93.0, 98.0 if bins == 10 else 900.0):
            assert moved(np.append(ages, lone), column, bins) == common
    flags = np.append(np.zeros(100), np.full(5, 9.0))
    for column in (Column(name="f", low=0.0, high=1.0), Column(name="f", classes=2)):
        assert moved(np.append(flags, 1.0), column) == moved(np.append(flags, 0.0), column)


def test_larger_coded_values_in_the_range_uncover_no_value_that_is_far_from_all_others() -> None:
    ages = np.append(np.tile([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], 20), np.full(6, 99999.0))
    for column in (Column(name="x", low=0.0, high=1e5), Column(name="x", low=-1e6, high=1e6), FREE):
        common = moved(np.append(ages, 60.0), column, 2)
        assert common is not None
        assert common.outside == 0
        for lone in (93.0, 900.0, 5000.0):
            assert moved(np.append(ages, lone), column, 2) == common


def test_a_value_beyond_one_end_of_the_range_is_not_told_by_coded_values_beyond_the_other() -> None:
    ages = np.append(np.tile([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], 20), np.full(5, -1.0))
    column = Column(name="x", low=0.0, high=1e6)
    told = moved(np.append(ages, 2e6), column, 2)
    assert told == moved(np.append(ages, 60.0), column, 2)
    assert told is not None
    assert told.outside == 5


def test_a_column_mostly_outside_its_range_or_with_hardly_a_value_is_told_as_empty() -> None:
    assert moved(np.linspace(0, 300, 200), AGE) is None
    assert moved(np.where(np.arange(200) < 4, 1.0, np.nan), AGE) is None
    assert moved(np.full(200, np.nan), AGE) is None
