"""The scale of a layer Standardise by the result of a described round, and the specification that names it."""

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from federation.digests import digest
from federation.spec.run_spec import RunSpec, SpecError, with_columns, with_scale
from federation.statistics.data_columns import Column
from federation.statistics.result import result
from federation.statistics.rules import MemberRules
from federation.statistics.scale import ScaleError, ScaleLayer, check_scale, scale_of
from federation.statistics.shown import FEWER, WITHHELD
from federation.statistics.sums import encoded, sums_of

NAMES = ("age", "pressure")
RESULT = digest(b"result")
TENSORS = ("0.mean", "0.deviation")
INSIDE = {"values": 100, "missing": FEWER, "outside": FEWER, "counts": [FEWER, WITHHELD, FEWER, FEWER]}  # all alike
HEAD = b'name = "r"\ntask = "t"\nrounds = 1\n'


def column(name: str, mean: float | None = 1.0, deviation: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {"name": name, "bins": 4, "count": 100, "mean": mean, "deviation": deviation, **more}


def document(*columns: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"format": 1, "columns": columns, **more}).encode()


def refused(*columns: dict[str, Any], names: tuple[str, ...] = NAMES) -> str:
    with pytest.raises(ScaleError) as error:
        scale_of(document(*columns), names)
    return str(error.value)


def test_a_scale_has_the_means_and_deviations_of_the_first_columns_in_their_order() -> None:
    target = {"name": "ill", "classes": 2, "count": 100, "mean": None, "deviation": None}
    scale = scale_of(document(column("age", 41.5, 20.25), column("pressure", 128.0, 0.0), target), NAMES)
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([41.5, 128.0], [20.25, 1.0])
    assert scale.mean.dtype == scale.deviation.dtype == np.float32


def test_a_column_that_shows_no_mean_is_scaled_by_its_range_and_one_of_classes_is_left_as_it_is() -> None:
    hidden = column("age", None, None, count="not shown", range=[0, 120], **INSIDE)
    sex = {"name": "pressure", "classes": 2, "count": 100, "mean": None, "deviation": None}
    scale = scale_of(document(hidden, sex), NAMES)
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([60.0, 0.0], [60.0, 1.0])


def described(values: NDArray[np.float64], low: float, high: float, bins: int = 4, rules: bool = True) -> bytes:
    """The result of the values of two members in a column of this range; without `rules`, they tell all counts."""
    columns, told = (Column(name="age", low=low, high=high),), {}
    for name, part in (("ada", values[::2]), ("ben", values[1::2])):
        sums = sums_of(part, columns[0], bins)
        told[name] = encoded(len(part), [MemberRules().told(sums) if rules else sums], columns).astype("<f8").tobytes()
    return result(told, columns, bins, ("train",)).document


DRAWN = np.random.default_rng(0).uniform(0, 1, 60)
NARROW = (1000.0, 1000.0 + 1e-9)


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        (DRAWN, NARROW),
        (np.concatenate([DRAWN, np.full(8, 1000.0)]), NARROW),
        (np.concatenate([DRAWN, np.full(30, 1000.0)]), NARROW),
        (DRAWN[:12], NARROW),
        (np.full(60, np.nan), NARROW),
        (np.full(60, np.nan), (0.0, 1.0)),
    ],
)
def test_the_submitter_cannot_choose_the_scale_of_a_column_by_a_range_that_holds_none_or_few_of_its_values(
    values: NDArray[np.float64], ends: tuple[float, float]
) -> None:
    for rules in (True, False):
        with pytest.raises(
            ScaleError, match=r"column 'age'.*(no values inside its range|more than half of its values)"
        ):
            scale_of(described(values, *ends, rules=rules), ("age",))


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        (np.full(60, 0.25), 4),
        (np.full(19, 0.25), 4),
        (np.concatenate([np.full(60, np.nan), np.full(14, 0.25)]), 4),
        (DRAWN[:40], 64),
        (np.concatenate([DRAWN[:40], np.full(20, np.nan)]), 64),
        (np.concatenate([np.full(60, 0.25), np.full(12, 7.0)]), 4),
    ],
    ids=["all alike", "few", "mostly missing", "spread", "spread, some missing", "some outside"],
)
def test_a_column_that_shows_no_mean_and_has_values_inside_its_range_is_scaled_by_it(
    values: NDArray[np.float64], bins: int
) -> None:
    told = described(values, 0.0, 1.0, bins)
    scale = scale_of(told, ("age",))
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([0.5], [0.5])


@pytest.mark.parametrize("tiny", [0.0, 1e-300, 1e-45])
def test_a_deviation_that_float32_cannot_divide_by_counts_as_none(tiny: float) -> None:
    assert scale_of(document(column("age", 1.0, tiny)), ("age",)).deviation.tolist() == [1.0]


def test_a_result_of_other_columns_or_without_numbers_is_refused_by_the_name_of_the_column() -> None:
    fits = column("age"), column("pressure")
    assert "column 1 of the model is 'age', and that of the result 'pressure'; it has 'age' as column 2" in refused(
        *reversed(fits)
    )
    assert "column 2 of the model is 'pressure', and that of the result 'Pressure'" in refused(
        fits[0], column("Pressure")
    )
    assert "the result has 1 columns, and the model standardises 2" in refused(fits[0])
    hidden = column("pressure", None, None, count="fewer than 10")
    assert "column 'pressure' shows no mean in the result (values: fewer than 10), and has no range" in refused(
        fits[0], hidden
    )
    assert "column 'pressure': mean 1e+39" in refused(fits[0], column("pressure", 1e39))
    wrong: list[tuple[Any, Any, Any]] = [(True, 1.0, 0), ("1", 1.0, 0), (1.0, -1.0, 0), (10**400, 1.0, 0)]
    for mean, deviation, end in [*wrong, (1.0, None, [1, 0])]:
        refused(fits[0], column("pressure", mean, deviation, range=end))
    for text in (b"{", b"[]", b"[1]", b'{"columns": 3}', b'{"columns": [3]}', document(*fits, format=2), b"[" * 10**5):
        with pytest.raises(ScaleError):
            scale_of(text, NAMES)


def test_a_model_that_is_not_filled_from_the_result_is_refused_with_the_number() -> None:
    told = document(column("age", 41.5, 20.25), column("pressure", 128.0, 8.0))
    layer = ScaleLayer("0", NAMES)
    right = scale_of(told, NAMES).of(layer)
    check_scale(right, told, layer)
    check_scale(right, told)  # where the task is not known
    for known in (layer, None):
        other = {**right, "0.mean": right["0.mean"] + np.array([0, 1e-4], dtype=np.float32)}
        with pytest.raises(ScaleError, match=r"number 2 of '0.mean' is 128\.0\d+, and the result gives 128"):
            check_scale(other, told, known)
        with pytest.raises(ScaleError, match=r"number 1 of '0\.deviation' is nan"):
            check_scale({**right, "0.deviation": np.array([np.nan, 8], dtype=np.float32)}, told, known)
        with pytest.raises(ScaleError):
            check_scale({"0.mean": right["0.mean"]}, told, known)
        with pytest.raises(ScaleError):
            check_scale({**right, "0.mean": right["0.mean"][:1]}, told, known)
    with pytest.raises(ScaleError, match="column 1 of the model is 'x'"):
        check_scale(right, told, ScaleLayer("0", ("x", "pressure")))
    with pytest.raises(ScaleError, match="hold 2 pairs"):
        check_scale({**right, "1.mean": right["0.mean"], "1.deviation": right["0.deviation"]}, told)


@pytest.mark.parametrize(
    "more", [b"", b'[parameters]  # ours\nbuffers = "averaged"\n', b'parameters.buffers = "averaged"\n']
)
def test_a_specification_names_the_result_and_the_tensors_that_it_fills(more: bytes) -> None:
    parameters = RunSpec.parse(with_scale(HEAD + more, RESULT, TENSORS)).parameters
    assert (parameters.statistics, parameters.fixed) == (RESULT, TENSORS)
    assert parameters.buffers == ("averaged" if more else "")
    again = with_scale(HEAD + more, RESULT, TENSORS)
    assert with_scale(again, RESULT, TENSORS) == again


def test_a_specification_that_says_otherwise_is_refused() -> None:
    for more, words in (
        (f'parameters.fixed = ["0.*"]\nparameters.statistics = "{digest(b"other")}"', "another result than"),
        ('parameters.fixed = ["1.*"]', "'0.mean' is filled from the result"),
        ('kind = "statistics"\nstatistics.open = true\nstatistics.columns = ["age"]', "takes no model"),
    ):
        head = HEAD.replace(b"rounds = 1\n", b"") if "kind" in more else HEAD
        with pytest.raises(SpecError, match=words):
            with_scale(head + more.encode(), RESULT, TENSORS)
    with pytest.raises(SpecError, match="the tensors that it fills have to be in fixed"):
        RunSpec.parse(HEAD + f'parameters.statistics = "{RESULT}"\n'.encode())
    with pytest.raises(SpecError, match=r"parameters\.statistics"):
        RunSpec.parse(HEAD + b'parameters.fixed = ["0.*"]\nparameters.statistics = "x"\n')


@pytest.mark.parametrize(
    "table", [b'parameters = { buffers = "averaged" }\n', b'["parameters"]\nbuffers = "averaged"\n']
)
def test_a_section_in_a_form_that_takes_no_more_keys_is_refused_with_the_form_that_does(table: bytes) -> None:
    RunSpec.parse(HEAD + table)
    with pytest.raises(
        SpecError, match=r"has to be a section \[parameters\], or keys such as parameters.statistics = "
    ):
        with_scale(HEAD + table, RESULT, TENSORS)
    asked = HEAD.replace(b"rounds = 1\n", b"") + b'kind = "statistics"\nstatistics = { open = true }\n'
    with pytest.raises(SpecError, match=r"has to be a section \[statistics\], or keys such as statistics.columns = "):
        with_columns(asked, [Column(name="age")])
