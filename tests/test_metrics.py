"""Metrics over clients, against the independent reference vectors where they are at hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds import metrics

REFERENCE = Path(__file__).resolve().parents[2] / "shared/vectors/metrics.json"


def reference(kind: str) -> list[dict[str, object]]:
    if not REFERENCE.exists():
        pytest.skip("the reference vectors are not beside the project")
    return [case for case in json.loads(REFERENCE.read_text())["cases"] if case["kind"] == kind]


def test_accuracies_agree_with_the_reference_vectors() -> None:
    cases = reference("user_accuracy")
    assert cases
    for case in cases:
        found = metrics.accuracies(case["input"])  # type: ignore[arg-type]
        expected: dict[str, float] = case["expected"]  # type: ignore[assignment]
        names = {
            "mean": "mean",
            "std": "std",
            "variance": "variance",
            "worst5": "worst5_tail_mean",
            "best5": "best5_tail_mean",
            "p5": "worst5_percentile",
            "p95": "best5_percentile",
        }
        for ours, theirs in names.items():
            assert found[f"accuracy/{ours}"] == pytest.approx(expected[theirs], abs=1e-9), (case["id"], ours)


def test_improved_participants_agree_with_the_reference_vectors() -> None:
    cases = reference("improved")
    assert cases
    for case in cases:
        given: dict[str, list[float | str]] = case["input"]  # type: ignore[assignment]
        before = {str(i): float(loss) for i, loss in enumerate(given["loss_before"])}
        after = {str(i): float(loss) for i, loss in enumerate(given["loss_after"])}
        share = metrics.improved(before, after, before)
        percent = None if share is None else 100 * share
        assert percent == case["expected"]["percent"], case["id"]  # type: ignore[index]


def test_a_tie_counts_as_improved_and_a_non_finite_loss_does_not() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    after = {"a": 1.0, "b": 0.5, "c": np.nan, "d": 2.0}
    assert metrics.improved(before, after, before) == 0.5


def test_nobody_evaluated_is_no_number() -> None:
    assert metrics.improved({}, {}, []) is None
    assert metrics.accuracies([]) == {}
