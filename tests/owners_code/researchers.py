"""Rules, stages and sketches as researchers write them: what can be read without doubt, and what cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedpareto import Combination, LinearSketch, Mixture, Rows, Rule, Stage, conclude

REMEMBERED: list[float] = []


def even(rows: Rows) -> np.ndarray:
    return np.full(len(rows.prior), 1 / len(rows.prior))


@dataclass(frozen=True, kw_only=True)
class Free(Rule):
    """Reads tensors and lists, remembers numbers of NumPy, and descends with autograd."""

    def combine(self, rows: Rows) -> Combination:
        weights = torch.zeros(len(rows.prior), requires_grad=True)
        lengths = torch.tensor(rows.norms, dtype=torch.float32)
        (gradient,) = torch.autograd.grad(torch.softmax(weights, 0) @ lengths, weights)
        shares = torch.softmax(-1e-3 * gradient, 0)
        draws = np.random.default_rng(rows.round).random(len(rows.prior))
        # The last key is the first one by name, which a record may put first.
        order = list(rows.state.get("clients", rows.clients))
        state = {
            "mean": np.float32(draws.mean()),
            "all": torch.tensor(draws),
            "clients": {name: np.int64(at) for at, name in enumerate(reversed(order))},
            "count": np.arange(3),
        }
        answer = conclude(rows.gram + 0.1 * np.eye(len(draws)), shares.tolist(), shares, draw=draws[0])
        return Combination(answer.coefficients, answer.weights, state, answer.diagnostics)


@dataclass(frozen=True, kw_only=True)
class Scale(Stage):
    """Doubles the first update, and writes into its copy of K although K is read-only."""

    def mix(self, rows: Rows) -> Mixture:
        assert rows.gram.base is not None
        rows.gram.base[:] = 0.0
        return Mixture.scaled([2.0] + [1.0] * (len(rows.prior) - 1))


@dataclass(frozen=True, kw_only=True)
class WarmUp(Rule):
    """Averages in the first round, and draws numbers without a seed later."""

    def combine(self, rows: Rows) -> Combination:
        coefficients = even(rows) if rows.round == 0 else np.random.default_rng().random(len(rows.prior))
        return conclude(rows.gram, coefficients, even(rows))


def _writes(rows: Rows) -> Combination:
    rows.gram[0, 0] = 5
    return conclude(rows.gram, even(rows), even(rows))


def _writes_state(rows: Rows) -> Combination:
    rows.state["count"] = 1  # type: ignore[index]
    return conclude(rows.gram, even(rows), even(rows))


def _remembers(rows: Rows) -> Combination:
    REMEMBERED.append(1.0)
    return conclude(rows.gram, even(rows) * len(REMEMBERED), even(rows))


RULES: dict[str, Callable[[Rows], Any]] = {
    "array": even,
    "nothing": lambda rows: None,
    "short": lambda rows: conclude(rows.gram, even(rows)[:-1], even(rows)),
    "short-weights": lambda rows: Combination(even(rows), even(rows)[:-1], {}, {}),
    "column": lambda rows: conclude(rows.gram, even(rows)[:, None], even(rows)),
    "text": lambda rows: conclude(rows.gram, ["a"] * len(rows.prior), even(rows)),
    "sum": lambda rows: conclude(rows.gram, even(rows), 2 * even(rows)),
    "not-finite": lambda rows: conclude(rows.gram, np.nan * even(rows), even(rows)),
    "writes": _writes,
    "writes-state": _writes_state,
    "chance": lambda rows: conclude(rows.gram, np.random.default_rng().random(len(rows.prior)), even(rows)),
    "remembers": _remembers,
    "nan-state": lambda rows: Combination(even(rows), even(rows), {"x": [np.float32("nan")]}, {}),
    "set-state": lambda rows: Combination(even(rows), even(rows), {"x": {1}}, {}),
    "integer-keys": lambda rows: Combination(even(rows), even(rows), {"x": {1: 2}}, {}),
    "list-state": lambda rows: Combination(even(rows), even(rows), [1], {}),  # type: ignore[arg-type]
    "accuracy": lambda rows: conclude(rows.gram, even(rows), even(rows), **{"accuracy/mean": 1.0}),
    "escape": lambda rows: conclude(rows.gram, even(rows), even(rows), **{"\x1b[31m": 1.0}),
    "note": lambda rows: conclude(rows.gram, even(rows), even(rows), note="good"),  # type: ignore[arg-type]
}


@dataclass(frozen=True, kw_only=True)
class One(Rule):
    """One of `RULES`."""

    which: str

    def combine(self, rows: Rows) -> Combination:
        answer: Combination = RULES[self.which](rows)
        return answer


def _stage_writes(rows: Rows) -> Mixture:
    rows.prior[0] = 1.0
    return Mixture(np.eye(len(rows.prior)))


STAGES: dict[str, Callable[[Rows], Any]] = {
    "array": lambda rows: np.eye(len(rows.prior)),
    "nothing": lambda rows: None,
    "wide": lambda rows: Mixture(np.eye(len(rows.prior) + 1)),
    "bare": lambda rows: Mixture(2 * np.eye(len(rows.prior))),
    "shares": lambda rows: Mixture(np.eye(len(rows.prior)), 2 * np.eye(len(rows.prior))),
    "fewer": lambda rows: Mixture(np.full((1, len(rows.prior)), 1 / len(rows.prior))),
    "prior": lambda rows: Mixture(np.eye(len(rows.prior)), prior=rows.prior * 2),
    "column": lambda rows: Mixture.scaled(even(rows)[:, None]),
    "not-finite": lambda rows: Mixture.scaled(np.inf * even(rows)),
    "writes": _stage_writes,
    "chance": lambda rows: Mixture.scaled(np.random.default_rng().random(len(rows.prior))),
}


@dataclass(frozen=True, kw_only=True)
class OneStage(Stage):
    """One of `STAGES`."""

    which: str

    def mix(self, rows: Rows) -> Mixture:
        answer: Mixture = STAGES[self.which](rows)
        return answer


@dataclass(frozen=True, kw_only=True)
class Sums(LinearSketch):
    """The sums of the columns, with one of several mistakes."""

    mistake = ""

    def layout(self, served: int) -> Any:
        return {"no-layout": None, "twice": [("sums", 1), ("sums", 1)]}.get(self.mistake, [("sums", np.int64(served))])

    def message(self, A: Any, shared_seed: int, own_seed: int) -> Any:
        rows: Any = {"sums": torch.tensor(A.sum(axis=1), requires_grad=True)}
        return {"no-message": None, "name": {"sum": rows["sums"]}, "long": {"sums": A}}.get(self.mistake, rows)

    def vectors(self, message: Any, served: int, *, shared_seed: int) -> Any:
        vectors = message["sums"].reshape(served, 1)
        chance = np.random.default_rng().random()
        return {"no-vectors": None, "flat": message["sums"], "chance": vectors * chance}.get(self.mistake, vectors)
