"""What a rule and a stage say that they read of the updates: no more is computed for them, and they see no more."""

import tracemalloc
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from federation.aggregation.base import Rule, conclude
from federation.aggregation.interface import Combination, Mixture, Reads, Rows
from federation.aggregation.pre import Stage, apply
from federation.aggregation.registry import ALGORITHMS, algorithm
from federation.aggregation.rules.fedavg import FedAvg
from fedpareto.offline_aggregation import Aggregate, aggregate

LESS = sorted(
    name
    for name, kind in ALGORITHMS.items()
    if issubclass(kind, Rule) and kind.reads < Reads.GRAM and name != "scalarised"  # it asks clients several times
)
COMPARING = {"conflicts", "conflict_depth", "conflict_mean", "descent_min", "descent_share"}


def case(kind: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    U = np.random.default_rng(5).standard_normal((7, 300))
    match kind:
        case "a zero row":
            U[2] = 0.0
        case "rows that cancel":
            U = np.concatenate([U, -U])
        case "a row that is not finite":
            U[3, 70] = np.nan
        case "a row that is too large to be squared":
            U[4, 5] = 1e200
    return U


def both(name: str, U: np.ndarray[Any, np.dtype[np.float64]], **options: Any) -> tuple[Aggregate, Aggregate]:
    """One aggregation without K, and with it."""
    m = len(U)
    given = {"losses": np.arange(1.0, m + 1), "accuracies": np.full(m, 0.5), "samples": np.ones(m)} | options
    return aggregate(name, U, **given), aggregate(name, U, measure=True, **given)


def test_the_averages_and_the_rules_by_coordinates_do_without_k() -> None:
    assert LESS == ["afl", "fedavg", "fedavg-n", "fedfa", "median", "norm-clipping", "q-fedavg", "trimmed-mean"]


@pytest.mark.parametrize(
    "kind",
    ["plain", "a zero row", "rows that cancel", "a row that is not finite", "a row that is too large to be squared"],
)
@pytest.mark.parametrize("name", LESS)
def test_an_aggregation_without_k_is_that_with_k(name: str, kind: str) -> None:
    for pre in ([], ["clip"], ["bucket"], ["arc", "normalize"]):
        bare, measured = both(name, case(kind), pre=pre)
        assert bare.dropped == measured.dropped
        for part in ("coefficients", "weights", "direction"):
            given, wanted = getattr(bare, part), getattr(measured, part)
            assert (given is None) == (wanted is None)
            if given is not None:
                np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-13)
        assert bare.state == measured.state
        for measurement, value in bare.diagnostics.items():
            if measurement == "clipped" and pre == ["clip"]:
                continue  # the longest rows are as long as the radius: rounding decides which of them are clipped
            assert value == pytest.approx(measured.diagnostics[measurement], rel=1e-12, abs=1e-12)
        needed = algorithm(name, {"pre": pre}).needs_of_updates  # type: ignore[attr-defined] # a rule
        assert measured.diagnostics.keys() - bare.diagnostics.keys() == (set() if needed is Reads.GRAM else COMPARING)


def test_a_row_without_weight_that_is_not_finite_is_dropped_too() -> None:
    assert aggregate("fedavg", case("a row that is not finite"), prior=[1, 1, 1, 0, 1, 1, 1]).dropped == (3,)


def test_rows_that_are_all_dropped_give_no_direction() -> None:
    result = aggregate("median", np.full((3, 4), np.inf))
    assert result.dropped == (0, 1, 2)
    assert not result.direction.any()
    assert result.diagnostics["stationary"] == 1


@pytest.mark.parametrize("name", ["fedavg", "norm-clipping"])
def test_the_memory_of_an_average_grows_with_the_rows_not_with_their_square(name: str) -> None:
    U = np.ones((3000, 4), dtype=np.float32)
    tracemalloc.start()
    try:
        aggregate(name, U)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * 3000**2 / 4  # K has 72 MB


@pytest.mark.parametrize(
    ("name", "pre", "needed"),
    [
        ("fedavg", (), Reads.NOTHING),
        ("fedavg", ("bucket",), Reads.NOTHING),
        ("median", ("clip",), Reads.NORMS),
        ("norm-clipping", ("clip", "normalize"), Reads.NORMS),
        ("norm-clipping", ("bucket",), Reads.GRAM),
        ("fedavg", ("bucket", "clip"), Reads.GRAM),
        ("fedavg", ("nnm",), Reads.GRAM),
        ("krum", (), Reads.GRAM),
    ],
)
def test_k_is_needed_where_it_is_read_or_norms_are_read_of_rows_that_were_mixed(
    name: str, pre: tuple[str, ...], needed: Reads
) -> None:
    rule = algorithm(name, {"pre": list(pre)})
    assert isinstance(rule, Rule)
    assert rule.needs_of_updates is needed


@dataclass(frozen=True, kw_only=True)
class Norms(Rule):
    """An average, which keeps what it has seen of the updates."""

    reads: ClassVar[Reads] = Reads.NORMS

    def combine(self, rows: Rows) -> Combination:
        answer = conclude(rows.gram, rows.prior, rows.prior, longest=float(rows.norms.max()))
        return Combination(answer.coefficients, answer.weights, {"K": list(rows.gram.shape)}, answer.diagnostics)


@dataclass(frozen=True, kw_only=True)
class Nothing(Norms):
    """As `Norms`, which it says that it does not read."""

    reads: ClassVar[Reads] = Reads.NOTHING


@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    """A rule that does not say what its own `combine` reads."""

    def combine(self, rows: Rows) -> Combination:
        return conclude(rows.gram, np.diag(rows.gram), rows.prior)


@dataclass(frozen=True, kw_only=True)
class Blind(Stage):
    """A stage that says that it reads nothing, and reads K."""

    reads: ClassVar[Reads] = Reads.NOTHING

    def mix(self, rows: Rows) -> Mixture:
        return Mixture.scaled(np.diag(rows.gram) + rows.prior * rows.norms)


def known(m: int = 3) -> Rows:
    """The rows of a round, whose K is known."""
    return Rows(gram=np.diag(np.arange(1.0, m + 1)), prior=np.full(m, 1 / m), samples=np.ones(m))


def test_a_rule_sees_no_more_than_it_says_and_its_answer_is_completed_from_k() -> None:
    answer, rows = Norms().decide(known()), known()
    assert answer.state == {"K": [0, 0]}
    assert answer.diagnostics == conclude(rows.gram, rows.prior, rows.prior, longest=3**0.5).diagnostics


def test_a_rule_without_a_word_on_it_reads_k() -> None:
    assert Own.reads is Reads.GRAM
    np.testing.assert_array_equal(Own().decide(known()).coefficients, [1.0, 2.0, 3.0])


def test_norms_that_a_rule_or_a_stage_says_it_does_not_read_are_not_there() -> None:
    for ask in (lambda: Nothing().decide(known()), lambda: apply([Blind()], known())):
        with pytest.raises(ValueError, match=r"for a rule that says `reads = Reads\.NORMS` or Reads\.GRAM"):
            ask()


def test_a_rule_that_says_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Wrong\.reads must be one of Reads\.NOTHING, .*; got 'norms'"):
        type("Wrong", (Rule,), {"reads": "norms", "combine": Norms.combine})
