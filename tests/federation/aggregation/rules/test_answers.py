"""Answers of rules, stages and sketches that are not built in: converted, or refused in words that name them."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation.base import Rule
from federation.aggregation.interface import Combination, Matrix, Rows
from federation.aggregation.registry import algorithm
from federation.aggregation.rules.fedcmoo import estimated
from federation.plugins import CODE, PluginError
from federation.sketches.base import ClientSketch, SketchError
from storage.states import RunState
from tests.paths import OWNERS_CODE
from tests.stage import Stage
from tests.verification.scene import NAMES, played, verified


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The directory of `researchers` is one of `--code`."""
    monkeypatch.syspath_prepend(str(OWNERS_CODE))
    monkeypatch.setenv(CODE, str(OWNERS_CODE))
    yield
    sys.modules.pop("researchers", None)


def rows(m: int = 3) -> Rows:
    return Rows(gram=np.diag(np.arange(1.0, m + 1)), prior=np.full(m, 1 / m), samples=np.ones(m), state={"count": 2})


def decided(name: str = "researchers:One", **values: Any) -> Combination:
    rule = algorithm(name, values)
    assert isinstance(rule, Rule)
    return rule.decide(rows())


@pytest.mark.parametrize("values", [rows(), dataclasses.replace(rows(), round=1)])
def test_rows_cannot_be_written_into_and_the_arrays_of_the_caller_still_can(values: Rows) -> None:
    for array in (values.gram, values.prior, values.samples):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        values.state["count"] = 3  # type: ignore[index]
    gram = np.eye(2)
    Rows(gram=gram, prior=np.array([0.5, 0.5]), samples=np.ones(2))
    gram[0, 0] = 2.0


@pytest.mark.parametrize(
    ("which", "says"),
    {
        "array": "the answer of combine cannot be used: it is an array (3,) of float64; return conclude(",
        "nothing": "it is None; return conclude(",
        "short": "combine failed: ValueError: coefficients has shape (2,); 3 numbers, one for each row, are needed\n",
        "short-weights": "weights has shape (2,); 3 numbers",
        "column": "coefficients has shape (3, 1)",
        "text": "coefficients: got list of text, not numbers",
        "sum": "weights must have the sum 1; got 2, of [0.6",
        "not-finite": "coefficients must be finite; got [nan, nan, nan]",
        "writes": "combine failed: ValueError: assignment destination is read-only\n",
        "writes-state": "TypeError: 'mappingproxy' object does not support item assignment",
        "chance": "combine was asked the same twice, and answered differently: coefficients[",
        "remembers": "answered differently: coefficients[0] is 0.3",
        "nan-state": "cannot be used: state.x[0] is nan, which JSON cannot hold",
        "set-state": "state.x is a set, which JSON cannot hold",
        "integer-keys": "state.x: keys must be text; got 1",
        "list-state": "state: a dict is needed; got a list",
        "accuracy": "diagnostics.accuracy/mean: rounds have a metric of this name already",
        "escape": r"diagnostics: a name has 1 to 64 characters that can be printed; got '\x1b[31m'",
        "note": "diagnostics.note: a number is needed; got 'good'",
    }.items(),
)
def test_an_answer_of_a_rule_that_cannot_be_read_without_doubt_is_refused(which: str, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        decided(which=which)
    assert str(caught.value).startswith("algorithm 'researchers:One': ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("which", "says"),
    {
        "array": "the answer of mix cannot be used: it is an array (3, 3) of float64; return Mixture(W), or",
        "nothing": "it is None; return Mixture(W)",
        "wide": "W has shape (4, 4); a matrix with 3 columns is needed",
        "bare": "each row of W, in a Mixture without `shares` (see Mixture.scaled), must have the sum 1; got 2, of [2",
        "shares": "each row of shares must have the sum 1; got 2",
        "fewer": "W makes 1 rows of 3, which need a `prior` and `samples` of their own",
        "prior": "prior must have the sum 1; got 2",
        "column": "mix failed: ValueError: factors has shape (3, 1); a vector is needed\n",
        "not-finite": "W must be finite; got [[inf",
        "writes": "mix failed: ValueError: assignment destination is read-only\n",
        "chance": "mix was asked the same twice, and answered differently: matrix[",
    }.items(),
)
def test_an_answer_of_a_stage_that_cannot_be_read_without_doubt_is_refused(which: str, says: str) -> None:
    with pytest.raises(PluginError) as caught:
        decided("fedavg", pre=["researchers:OneStage"], which=which)
    assert str(caught.value).startswith("stage 'researchers:OneStage': ")
    assert says in str(caught.value)


def test_lists_tensors_and_numbers_of_numpy_are_converted() -> None:
    answer = decided("researchers:Free", pre=["researchers:Scale"])
    assert (str(answer.coefficients.dtype), str(answer.weights.dtype)) == ("float64", "float64")
    assert json.loads(json.dumps(answer.state)) == answer.state
    assert list(answer.state) == ["all", "clients", "count", "mean"]
    assert type(answer.diagnostics["draw"]) is float


@pytest.mark.parametrize(
    ("mistake", "says"),
    {
        "no-layout": "layout failed: TypeError: 'NoneType' object is not iterable",
        "twice": "a layout has rows of one or more values, each with its name; got (('sums', 1), ('sums', 1))",
        "no-message": "message failed: TypeError: 'NoneType' object is not iterable",
        "name": "row 'sums' has 2 values; the message has no such row",
        "long": "row 'sums' has 2 values; the message has shape (16,)",
        "no-vectors": "gram failed: ValueError: got None, not numbers",
        "flat": "vectors has shape (2,); (2, k) is needed",
        "chance": "gram was asked the same twice, and answered differently: [",
    }.items(),
)
def test_an_answer_of_a_sketch_that_cannot_be_used_is_refused(mistake: str, says: str) -> None:
    sums: Any = import_module("researchers").Sums
    names = ("left", "right")
    coder = type("Mine", (sums,), {"mistake": mistake, "name": "mine"})(d=8, objectives=names)

    def estimate() -> Matrix:
        message = coder.compress(np.arange(16.0).reshape(2, 8), shared_seed=0, own_seed=0)
        sketch = ClientSketch(names, np.ones(2), message)
        return estimated(coder, names, lambda: coder.gram([sketch], names, shared_seed=0))

    with pytest.raises((SketchError, PluginError), match="mine") as caught:
        estimate()
    assert says in str(caught.value)


@pytest.mark.full
def test_a_run_of_a_rule_and_a_stage_of_researchers_verifies(stage: Stage, tmp_path: Path) -> None:
    run = played(stage, "researchers:Free", 'algorithm.pre = ["researchers:Scale"]')
    assert len(verified(stage, run, tmp_path)) == 3


@pytest.mark.full
def test_a_rule_that_draws_numbers_without_a_seed_pauses_its_run_before_a_step_that_nobody_could_verify(
    stage: Stage,
) -> None:
    run, players = stage.begin(*NAMES, rounds=2, algorithm="researchers:WarmUp", more="selection.minimum = 5")
    stage.play(run, *players, until=lambda: stage.run(run).state is RunState.PAUSED)
    assert stage.run(run).reason.startswith("error: algorithm 'researchers:WarmUp': combine was asked the same twice")
    assert [round_.stepped is not None for round_ in stage.rounds(run)] == [True, False]
