"""One aggregation of updates that are at hand, without a federation: `fedpareto.aggregate`, `fedpareto aggregate`.

>>> import numpy as np
>>> result = aggregate("fedmgda+", np.array([[3.0, 0.0], [0.0, 0.5]]))
>>> result.weights.tolist(), result.direction.tolist()
([0.5, 0.5], [0.5, 0.5])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.direction import Direction
from federation.aggregation.gram import gram, squared_norms
from federation.aggregation.interface import UNREAD, HyperparameterError, Reads, Rows, TooFewUpdatesError
from federation.aggregation.registry import algorithm
from federation.aggregation.streaming import Row, Source, one_thread
from federation.arrays import Numbers, detached, numbers
from federation.errors import ArgumentError
from federation.process.shared_state import ordinary_numpy
from federation.vectors import RowFile

__all__ = ["Aggregate", "HyperparameterError", "TooFewUpdatesError", "aggregate"]


@dataclass(frozen=True)
class Aggregate:
    """The outcome of one aggregation.

    Attributes:
        coefficients: c, shape (m,); the direction is c U. 0 for a row that was dropped. None for a coordinate-wise
            algorithm, such as "median".
        weights: lambda, shape (m,), sum 1; 0 for a row that was dropped.
        direction: shape (d,), float64; the step is against it: w - rate * direction.
        state: for the next call of an algorithm that keeps one.
        diagnostics: measurements by name; `dropped` is the number of dropped rows. Those that compare the rows are
            there if the algorithm reads K, or with `measure`.
        dropped: the indices of the dropped rows.
    """

    coefficients: NDArray[np.float64] | None
    weights: NDArray[np.float64]
    direction: NDArray[np.float64]
    state: dict[str, Any]
    diagnostics: dict[str, float]
    dropped: tuple[int, ...]


@ordinary_numpy()
def aggregate(
    name: str,
    updates: Numbers,
    *,
    losses: Numbers | None = None,
    accuracies: Numbers | None = None,
    samples: Numbers | None = None,
    prior: Numbers | None = None,
    ages: Numbers | None = None,
    clients: Sequence[str] | None = None,
    state: Mapping[str, Any] | None = None,
    measure: bool = False,
    **hyperparameters: Any,
) -> Aggregate:
    """Combines updates into one direction.

    A row with a value that is not finite (or too large to be squared), or with a loss or an accuracy that is not finite
    where the algorithm reads it, is dropped, and the prior of the others renormalised. Without any row of this round
    left the direction is zero.

    Rows and numbers may be lists, arrays of NumPy without masked elements, or tensors of PyTorch: on any device, of any
    precision, with or without gradients.

    Args:
        name: the algorithm, such as "fedmgda+".
        updates: U, shape (m, d), or a sequence of rows of d elements each; rows in files are streamed.
        losses: of the base model at each row's client, shape (m,).
        accuracies: of the base model on each row's client's training split, shape (m,).
        samples: training samples of each row's client, shape (m,).
        prior: lambda0, shape (m,), in any proportion. Without it: in proportion to the samples, or else uniform.
        ages: rounds since each row was sent, shape (m,), for algorithms that read updates of earlier rounds (`tau`).
            Rows of earlier rounds come last; their losses, accuracies and prior are ignored.
        clients: the name of each row's client, for algorithms with a memory of each client; else "0", "1", ...
        state: the `state` that the last call returned.
        measure: compare the rows with each other and with the direction, such as `conflicts` and `descent_min`. This
            takes K, m^2 d multiplications, which an algorithm such as "fedavg" or "median" does without.
        hyperparameters: of the algorithm and of the stages in `pre`.

    Raises:
        HyperparameterError: see `registry.algorithm`; or an algorithm that is not a rule.
        TooFewUpdatesError: there are too few rows for the algorithm.
        PluginError: the algorithm is not built in; its code raised an exception, or its answer cannot be used.
        ValueError: shapes that do not fit, values that are no numbers, masked elements, or a prior that is negative,
            not finite or all zero.
    """
    of_numpy = (np.generic, np.ndarray)
    rule = algorithm(
        name, {key: value.tolist() if isinstance(value, of_numpy) else value for key, value in hyperparameters.items()}
    )
    if not isinstance(rule, Rule):
        raise HyperparameterError(f"name: {name} asks clients several times: it needs a run")
    rows = _rows(updates)
    m = len(rows)
    if m == 0:
        raise ArgumentError("updates has no rows: there is nothing to aggregate")
    counts = np.ones(m) if samples is None else _weights("samples", samples, m)
    lambda0 = counts if prior is None else _weights("prior", prior, m)
    elapsed = np.zeros(m, dtype=np.int64) if ages is None else _per_row("ages", ages, m).astype(np.int64)
    names = [str(i) for i in range(m)] if clients is None else list(clients)
    if len(names) != m:
        raise ArgumentError(f"clients has {len(names)} names; one for each of the {m} rows is needed")
    reads = Reads.GRAM if measure else rule.needs_of_updates
    K, squares = UNREAD, np.zeros(m)
    with np.errstate(over="ignore", invalid="ignore"):
        if reads is Reads.GRAM:
            K = gram(rows)
            squares = np.diagonal(K)
        elif reads is Reads.NORMS:
            squares = squared_norms(rows)
    usable = np.isfinite(squares)
    present = elapsed == 0
    reports: dict[str, Any] = {}
    for label, values_given, read in (
        ("losses", losses, rule.reads_losses),
        ("accuracies", accuracies, rule.reads_accuracies),
    ):
        if values_given is not None:
            reports[label] = _per_row(label, values_given, m)
            reports[label][~present] = 0.0
            usable &= np.isfinite(reports[label]) | (not read)
        elif read:
            raise ArgumentError(f"{name} needs {label}, one per row")
    coefficients, weights = np.zeros(m), np.zeros(m)
    while (usable & present).any():
        shares = (lambda0 * present)[usable]
        known = K[np.ix_(usable, usable)] if K.size else UNREAD
        with one_thread():
            answer = rule.decide(
                Rows(
                    gram=known,
                    squares=np.zeros(0) if reads is Reads.NOTHING else squares[usable],
                    prior=shares / shares.sum() if shares.sum() > 0 else present[usable] / present[usable].sum(),
                    samples=counts[usable],
                    clients=tuple(client for client, use in zip(names, usable, strict=True) if use),
                    ages=None if ages is None else elapsed[usable],
                    state=dict(state or {}),
                    **{label: values[usable] for label, values in reports.items() if np.isfinite(values[usable]).all()},
                )
            )
        used = np.flatnonzero(usable)
        streamed = Direction(answer, [rows[i] for i in used], known)
        with np.errstate(over="ignore", invalid="ignore"):
            direction = np.concatenate(list(streamed))
        if streamed.stationary:
            direction = np.zeros(len(direction))
        finite = np.isfinite(streamed.squares)
        if not finite.all():  # of an algorithm that reads nothing of the updates, this is known only now
            usable[used[~finite]] = False
            continue
        weights[used[: len(answer.weights)]] = answer.weights
        if answer.coordinates is None:
            coefficients[used] = answer.coefficients * (not streamed.stationary)
        dropped = tuple(np.flatnonzero(~usable).tolist())
        return Aggregate(
            coefficients=coefficients if answer.coordinates is None else None,
            weights=weights,
            direction=direction,
            state=answer.state,
            diagnostics=streamed.diagnostics | {"dropped": float(len(dropped))},
            dropped=dropped,
        )
    still = {"direction_norm": 0.0, "stationary": 1.0, "dropped": float((~usable).sum())}
    nothing = np.zeros(Source(rows).length)
    return Aggregate(coefficients, weights, nothing, dict(state or {}), still, tuple(np.flatnonzero(~usable).tolist()))


def _rows(updates: Numbers) -> list[Row]:
    if not isinstance(updates, Sequence):
        try:
            updates = numbers(updates)
        except ValueError as error:
            raise ArgumentError(f"updates: {error}") from error
        if updates.ndim != 2:
            raise ArgumentError(f"updates has shape {updates.shape}; (m, d) is needed, one row per client")
    return [row if isinstance(row, RowFile) else _row(f"updates[{at}]", row) for at, row in enumerate(updates)]


def _row(name: str, values: Any) -> Row:
    try:
        row = numbers(values)
    except ValueError as error:
        hint = ""
        if isinstance(values, Mapping | list | tuple):  # as of state_dict() and autograd.grad()
            hint = "; join the parts of an update into one vector, in the same order for all"
        raise ArgumentError(f"{name}: an update must be a vector of numbers; {error}{hint}") from error
    if row.ndim != 1 or row.dtype.kind not in "fiu":
        raise ArgumentError(f"{name}: an update must be a vector of numbers; got {row.dtype} of shape {row.shape}")
    if not len(row):
        raise ArgumentError(f"{name}: an update must have at least one element")
    return row if row.dtype == np.float32 else row.astype(np.float64, copy=False)


def _weights(name: str, values: Numbers, m: int) -> NDArray[np.float64]:
    array = _per_row(name, values, m)
    if not (np.isfinite(array) & (array >= 0)).all() or array.sum() <= 0:
        raise ArgumentError(f"{name} must be finite, not negative, and not all zero; got {array.tolist()}"[:300])
    return array


def _per_row(name: str, values: Numbers, m: int) -> NDArray[np.float64]:
    try:
        array = np.array(detached(values), dtype=np.float64)  # None is NaN
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{name}: {m} numbers are needed, one per row: {str(error).partition('.')[0]}") from error
    if array.shape != (m,):
        raise ArgumentError(f"{name} has shape {array.shape}; one for each of the {m} rows is needed: {(m,)}")
    return array
