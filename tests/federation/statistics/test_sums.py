"""Statistics: what members tell adds up to what NumPy says of the data of all; text and other names are refused."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.statistics.data_columns import Column, ColumnError, check_columns
from federation.statistics.held import chosen, held, numbers
from federation.statistics.result import result
from federation.statistics.shown import described
from federation.statistics.sums import ColumnSums, decoded, encoded, sums_of, total, width
from tests.paths import ROOT

BINS = 20
NUMBER = Column(name="x0")
RANGED = Column(name="age", low=0.0, high=120.0)
CLASSES = Column(name="y", classes=3)

Numbers = NDArray[np.float64]


def over_the_wire(parts: list[Numbers], column: Column) -> ColumnSums:
    """The total of several members, each of which has told its numbers."""
    told = [encoded(len(part), [sums_of(part, column, BINS)], [column]) for part in parts]
    return total(decoded(one, [column], BINS)[1][0] for one in told)


def check_equals_numpy(parts: list[Numbers], column: Column) -> None:
    pooled = np.concatenate(parts)
    there = pooled[np.isfinite(pooled)]
    found = described(over_the_wire(parts, column), column, BINS, fewest=0)
    assert (found.values, found.missing, found.count) == (len(pooled), len(pooled) - len(there), len(there))
    clipped = np.clip(there, *column.range)
    if not len(there):
        assert found.mean is None
        assert found.deviation is None
        return
    assert found.mean == pytest.approx(clipped.mean(), rel=1e-9, abs=1e-9 * abs(clipped).max())
    # NumPy's own deviation of equal numbers is rounding: not more than the last place of the largest.
    assert found.deviation == pytest.approx(clipped.std(), rel=1e-9, abs=1e-15 * abs(clipped).max())
    if column.low is not None:
        assert list(found.cells) == np.histogram(there, bins=BINS, range=column.range)[0].tolist()
        assert found.edges == pytest.approx(np.linspace(*column.range, BINS + 1)[1:-1])
    assert isinstance(found.outside, int)
    assert sum(map(int, found.cells)) + found.outside == len(there)


def columns_of_bars() -> dict[str, list[Numbers]]:
    random = np.random.default_rng(7)
    return {
        "unequal sizes": [random.normal(50, 12, size) for size in (1000, 60, 333)],
        "float32": [random.normal(1e6, 1e-1, 400).astype(np.float32).astype(np.float64) for _ in range(2)],
        "constant": [np.full(70, 0.1), np.full(90, 0.1)],
        "all missing": [np.full(60, np.nan), np.full(50, np.nan)],
        "some missing": [np.where(random.random(200) < 0.2, np.nan, random.random(200)) for _ in range(2)],
        "1e30": [np.array([1e30, -1e30, 3.0, 1e30]), np.array([1.0, 1e30])],
        "infinite": [np.array([np.inf, 1.0, 2.0]), np.array([-np.inf, 5.0])],
        "far from zero": [1e9 + random.normal(0, 1e-3, 500), 1e9 + random.normal(1, 1e-3, 500)],
        "nothing at one": [np.array([]), np.array([1.0, 2.0])],
        "tiny": [np.array([1e-300, 2e-300]), np.array([-3e-300])],
    }


@pytest.mark.parametrize("column", [NUMBER, RANGED], ids=["without range", "with a range"])
def test_the_statistics_of_members_are_those_that_numpy_computes_of_the_data_of_all(column: Column) -> None:
    for parts in columns_of_bars().values():
        check_equals_numpy(parts, column)


def test_the_order_in_which_members_are_added_changes_no_bit() -> None:
    random = np.random.default_rng(3)
    parts = [random.normal(0, 10.0**power, 50) for power in range(-8, 9, 2)]
    assert over_the_wire(parts, NUMBER) == over_the_wire(parts[::-1], NUMBER)


def test_sums_on_the_wire_are_exact_to_a_hundred_binary_places() -> None:
    values = np.random.default_rng(1).normal(1.0, 1e3, 500)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    found = over_the_wire([values], NUMBER)
    assert abs(found.second - exact) <= exact / 2**100
    assert abs(found.first - sum(map(Fraction, values.tolist()))) <= Fraction(1, 2**90)


def test_a_thousand_columns_of_a_table_are_described_in_one_vector() -> None:
    data = np.random.default_rng(2).normal(0, 1, (60, 1000)).astype(np.float32)
    columns = tuple(Column(name=f"x{number}") for number in range(1000))
    check_columns(columns, BINS)
    told = encoded(
        60, [sums_of(values, column, BINS) for column, values in chosen(columns, held(data, data[:, 0]))], columns
    )
    assert told.shape == (width(columns, BINS),)
    _, found = decoded(told, columns, BINS)
    means = [float(one.first / one.count) for one in found]
    assert means == pytest.approx(data.astype(np.float64).mean(axis=0), rel=1e-9, abs=1e-12)


def test_classes_are_counted_also_where_a_member_has_one_alone() -> None:
    found = over_the_wire([np.zeros(80), np.array([0, 1, 2, 2, 3, -1, 0.5, np.nan])], CLASSES)
    assert (found.cells, found.outside, found.missing) == ((81, 1, 2), 3, 1)


def test_a_channel_of_images_has_the_values_of_all_pixels() -> None:
    images = np.random.default_rng(4).random((30, 2, 4, 4))
    data = held(images, np.arange(30))
    assert [*data] == ["x0", "x1", "y"]
    found = sums_of(numbers("x1", data["x1"]), Column(name="x1"), BINS)
    assert (found.values, found.unit) == (480, 16)
    assert float(found.first / found.count) == pytest.approx(images[:, 1].mean(), rel=1e-12)


def test_text_and_names_that_differ_are_refused_by_name() -> None:
    with pytest.raises(ColumnError, match="column 'city' is"):
        numbers("city", np.array(["Bonn", "Kiel"]))
    with pytest.raises(ColumnError, match="column 'z' is"):
        numbers("z", np.array([1j]))
    data = held(np.zeros((3, 2)), np.zeros(3))
    with pytest.raises(ColumnError, match="no column 'age'; the data have 3: x0, x1, y"):
        list(chosen([Column(name="x0"), RANGED], data))
    with pytest.raises(ColumnError, match="names 1 columns, and the data have 2 of x and 1 of y"):
        held(np.zeros((3, 2)), np.zeros(3), [RANGED])


def test_a_table_of_pandas_has_its_own_names_and_missing_values() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": pandas.array([30, None], dtype="Int64"), "city": ["Bonn", "Kiel"]})
    data = held(table, pandas.Series([0, 1], name="ill"))
    assert [*data] == ["age", "city", "ill"]
    assert numbers("age", data["age"]).tolist()[0] == 30
    assert math.isnan(numbers("age", data["age"])[1])
    with pytest.raises(ColumnError, match="column 'city'"):
        numbers("city", data["city"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({0: np.nan}, "the data set has a count"),
        ({1: 2.5}, "'age' has a count that is no whole number"),
        ({3: -1.0}, "'age' has a count"),
        ({3: 1e300}, "'age' has a count"),
        ({3: 70.0}, "counts 130 values of 60"),
        ({1: 61.0}, "values of 61 in 60 samples"),
        ({5: np.inf}, "a sum that is not finite"),
        ({5: 1e6}, "sums that no 60 values in its range have"),
        ({8: 0.0}, "sums that no 60 values in its range have"),
    ],
)
def test_impossible_numbers_are_refused_by_the_name_of_the_column(change: dict[int, float], why: str) -> None:
    told = encoded(60, [sums_of(np.linspace(10, 90, 60), RANGED, BINS)], [RANGED])
    for at, value in change.items():
        told[at] = value
    with pytest.raises(ColumnError, match=why):
        decoded(told, [RANGED], BINS)


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": "a\nb"}, {"low": 1.0}, {"low": 1.0, "high": 1.0}])
def test_a_column_that_makes_no_sense_cannot_be_made(bad: dict[str, float]) -> None:
    with pytest.raises(ColumnError):
        Column(**{"name": "age", **bad})  # type: ignore[arg-type]


def test_the_numbers_of_the_documents_example_are_those_on_the_wire() -> None:
    page = (ROOT / "docs/research/statistics.md").read_text()
    expected = json.loads(page.partition("<!-- vector -->\n```json\n")[2].partition("```")[0])
    ages = np.array([10.0, 20.0, 30.0, 40.0, 90.0, 120.0, np.nan])
    column = Column(name="age", low=0.0, high=100.0)
    assert encoded(7, [sums_of(ages, column, 4)], [column]).tolist() == expected


def test_a_result_leaves_out_who_tells_bytes_that_are_no_numbers_of_these_columns() -> None:
    good = encoded(60, [sums_of(np.linspace(10, 90, 60), RANGED, BINS)], [RANGED]).astype("<f8").tobytes()
    found = result({"ada": good, "ben": good[:-1], "cleo": b"", "dan": good + good}, [RANGED], BINS, ["train"])
    assert (found.used, [*found.left_out]) == (("ada",), ["ben", "cleo", "dan"])
    with pytest.raises(ColumnError, match="no member's numbers can be used: 0 bytes are not"):
        result({"cleo": b""}, [RANGED], BINS, ["train"])
    few = encoded(4, [sums_of(np.linspace(10, 90, 4), RANGED, BINS)], [RANGED]).astype("<f8").tobytes()
    with pytest.raises(ColumnError, match="fewer than 10 samples"):
        result({"ada": few, "ben": few}, [RANGED], BINS, ["train"])
