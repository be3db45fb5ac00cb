"""The answers of rules and stages that are not built in: asked for, checked and converted in this file alone.

A step is verified by asking its rule again, on another machine. So such code is asked twice, each time with copies of
the rows: it answers by the rows alone, or the answer is refused.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import (
    Combination,
    Coordinates,
    HyperparameterError,
    Matrix,
    Mixture,
    Rows,
    TooFewUpdatesError,
    Vector,
)
from federation.aggregation.qp import UnsolvedError
from federation.arrays import numbers, vector
from federation.plugins import PluginError, plugin_code
from federation.process.shared_state import ordinary
from federation.record.metric_definitions import DEFINITIONS, pattern
from federation.sketches.base import SketchError
from federation.value_words import in_words

T = TypeVar("T")

_ALIKE = 1e-9  # the largest difference of two answers, as a share of the largest number; `verify` allows as much
_OF_ONE = 1e-6  # the largest difference of a sum of shares from 1: float32 is enough
_NAME = 64  # characters of the name of a diagnostic
# The metrics of a round that a rule measures.
_OF_RULES = frozenset({*describe(np.eye(1), np.zeros(1), np.ones(1)), "stationary", "iterations", "residual"})
_OWN = (TooFewUpdatesError, HyperparameterError, UnsolvedError, SketchError)  # what the code may raise on purpose


def asked(whose: str, method: str, ask: Callable[[], Any], read: Callable[[Any], T], *, twice: bool = True) -> T:
    """The answer of code that is not built in, with the process in its ordinary state.

    Args:
        whose: the plug-in in words, such as "algorithm 'mine'".
        method: the name of its method, for messages.
        ask: calls it.
        read: checks and converts its answer, or raises ValueError.
        twice: False for code that is asked as a part of other code, which is asked twice.

    Raises:
        PluginError: the code raised an exception, or its answer cannot be used, or the second one differs.
        TooFewUpdatesError, HyperparameterError, UnsolvedError, SketchError: of the code.
    """
    answers = [_answer(whose, method, ask, read) for _ in range(1 + twice)]
    if difference := _difference(answers[0], answers[-1], ""):
        raise PluginError(
            f"{whose}: {method} was asked the same twice, and answered differently: {difference}. A step is verified "
            "by asking again: seed random numbers with the round, and remember things in the `state` of a rule alone"
        )
    return answers[0]


def copied(rows: Rows) -> Rows:
    """Rows with memory of their own, so that nothing that own code does to them is seen elsewhere."""
    values: dict[str, Any] = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    copies = {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}
    return Rows(**{**values, **copies, "state": plain(rows.state, "state")})


def _answer(whose: str, method: str, ask: Callable[[], Any], read: Callable[[Any], T]) -> T:
    with ordinary():
        with plugin_code(whose, method, *_OWN):
            answer = ask()
        try:
            with plugin_code(whose, f"reading the answer of {method}", ValueError):
                return read(answer)
        except PluginError:
            raise
        except ValueError as error:
            raise PluginError(f"{whose}: the answer of {method} cannot be used: {error}") from error


def combination(answer: Any, rows: Rows) -> Combination:
    """The answer of a rule, checked and converted. Raises ValueError."""
    if not isinstance(answer, Combination):
        raise ValueError(f"it is {in_words(answer)}; return conclude(rows.gram, coefficients, weights)")
    coordinates = answer.coordinates
    if coordinates is not None:
        matrix = _matrix("coordinates.matrix", coordinates.matrix, len(rows.prior))
        coordinates = Coordinates(matrix, int(coordinates.trim))
    coefficients = vector("coefficients", answer.coefficients, len(rows.prior) if coordinates is None else 0)
    weights = vector("weights", answer.weights, rows.current)
    _check_finite("coefficients", coefficients)
    _check_shares("weights", weights[None])
    measurable = coordinates is None and rows.gram.size
    described = describe(rows.gram, coefficients, weights) if measurable else {}
    return dataclasses.replace(
        answer,
        coefficients=coefficients.copy(),  # the code may go on with its own
        weights=weights.copy(),
        state=_state(answer.state),
        diagnostics=_diagnostics(answer.diagnostics) | described,  # of K, not of another matrix that the rule took
        coordinates=coordinates,
    )


def mixture(answer: Any, rows: Rows) -> Mixture:
    """The answer of a stage, checked and converted. Raises ValueError."""
    if not isinstance(answer, Mixture):
        raise ValueError(f"it is {in_words(answer)}; return Mixture(W), or Mixture.scaled(factors)")
    m = len(rows.prior)
    matrix = _matrix("W", answer.matrix, m)
    count = len(matrix)
    shares, prior, samples = answer.shares, answer.prior, answer.samples
    if shares is not None:
        shares = _matrix("shares", shares, m)
        if len(shares) != count:
            raise ValueError(f"shares has shape {shares.shape}; W has shape {matrix.shape}")
        _check_shares("each row of shares", shares)
    else:
        _check_shares("each row of W, in a Mixture without `shares` (see Mixture.scaled),", matrix)
    if count != m and (prior is None or samples is None):
        raise ValueError(f"W makes {count} rows of {m}, which need a `prior` and `samples` of their own")
    if prior is not None:
        prior = vector("prior", prior, count)
        _check_shares("prior", prior[None])
        if (prior < 0).any():
            raise ValueError(f"prior must not be negative; got {prior.tolist()}"[:300])
        prior = prior / prior.sum()
    if samples is not None:
        samples = vector("samples", samples, count)
        _check_finite("samples", samples)
        samples = samples.copy()
    return Mixture(matrix, shares, prior, samples)


def gram_matrix(answer: Any, count: int) -> Matrix:
    """The answer of a sketch, the Gram matrix of `count` objectives, checked and converted. Raises ValueError."""
    matrix: Matrix = numbers(answer).astype(np.float64, copy=False)
    if matrix.shape != (count, count):
        raise ValueError(f"it has shape {matrix.shape}; {(count, count)} is needed")
    _check_finite("the Gram matrix", matrix)
    return matrix.copy()


def plain(value: Any, where: str) -> Any:
    """A value as JSON has it, with sorted keys: dicts, lists, text, Python's numbers, true, false and None.

    A record may keep the keys in another order, and a rule must not see which.

    Raises:
        ValueError: it is none of these, and no numbers of NumPy or PyTorch, or not finite; the message says `where`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {float(value)!r}, which JSON cannot hold")
        return float(value)
    if isinstance(value, Mapping):
        return {key: plain(value[key], f"{where}.{key}") for key in sorted(_key(key, where) for key in value)}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not hasattr(value, "__array__"):
        raise ValueError(f"{where} is {in_words(value)}, which JSON cannot hold")
    try:
        listed = numbers(value).tolist()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return plain(listed, where)


def _state(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"state: a dict is needed; got {in_words(state)}")
    converted: dict[str, Any] = plain(state, "state")
    return converted


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where}: keys must be text; got {key!r}")
    return str(key)


def _diagnostics(values: Any) -> dict[str, float]:
    """Measurements of a rule by name; they may be NaN or infinite."""
    if not isinstance(values, Mapping):
        raise ValueError(f"diagnostics: numbers by name are needed; got {in_words(values)}")
    converted = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME:
            raise ValueError(f"diagnostics: a name has 1 to {_NAME} characters that can be printed; got {name!r}"[:300])
        if pattern(name) in DEFINITIONS and name not in _OF_RULES:
            raise ValueError(f"diagnostics.{name}: rounds have a metric of this name already; choose another one")
        try:
            converted[name] = float(numbers(value).reshape(()))
        except ValueError as error:
            raise ValueError(f"diagnostics.{name}: a number is needed; got {value!r}"[:300]) from error
    return converted


def _matrix(name: str, values: Any, columns: int) -> Matrix:
    """Numbers as a matrix with this many columns, and at least one row."""
    try:
        array: Matrix = numbers(values).astype(np.float64, copy=False)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if array.ndim != 2 or array.shape[1] != columns or not len(array):
        raise ValueError(f"{name} has shape {array.shape}; a matrix with {columns} columns is needed")
    _check_finite(name, array)
    return array.copy()


def _check_finite(name: str, array: Vector | Matrix) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite; got {array.tolist()}"[:300])


def _check_shares(name: str, array: Matrix) -> None:
    """Checks that the sum of each row is 1."""
    for row, total in zip(array, array.sum(axis=1), strict=True):
        if not abs(total - 1) <= _OF_ONE:  # NaN, too
            raise ValueError(f"{name} must have the sum 1; got {total:.6g}, of {row.tolist()}"[:300])


def _difference(first: Any, second: Any, where: str) -> str:
    """How two answers differ, in words; empty if they do not."""
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        first, second = vars(first), vars(second)
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys():
        parts = ((first[key], second[key], f"{where}.{key}" if where else str(key)) for key in first)
    elif isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.shape == second.shape:
        if np.allclose(first, second, rtol=_ALIKE, atol=_ALIKE * abs(first).max(initial=0.0)):
            return ""
        at = np.unravel_index(np.argmax(abs(first - second)), first.shape)
        return f"{where}[{', '.join(map(str, at))}] is {float(first[at])!r}, then {float(second[at])!r}"
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        parts = ((*pair, f"{where}[{index}]") for index, pair in enumerate(zip(first, second, strict=True)))
    elif isinstance(first, float) and isinstance(second, float):
        same = math.isclose(first, second, rel_tol=_ALIKE, abs_tol=_ALIKE) or (math.isnan(first) and math.isnan(second))
        return "" if same else f"{where} is {first!r}, then {second!r}"
    else:
        return "" if first == second else f"{where} is {first!r}, then {second!r}"[:300]
    return next(filter(None, (_difference(*part) for part in parts)), "")
