"""The page of sketches judges them by the error of the weights, and not by that of the Gram matrix alone."""

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results" / "jacobian"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jacobian_benchmark", ROOT / "benchmarks" / "jacobian.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(sketch: str, budget: float, *errors: float) -> dict[str, object]:
    named = dict(zip(("nrmse", "l1_exact", "l1_pgd"), errors, strict=True))
    return {"setting": "made", "M": 2, "d": 1000, "stage": "initial", "sketch": sketch, "budget": budget, **named}


def test_a_sketch_that_is_nearer_to_the_gram_matrix_is_not_said_to_be_nearer_in_the_weights(
    benchmark: ModuleType,
) -> None:
    rows = [
        row("count", 1.0, 0.01, 0.01, 0.01),
        row("count", 0.1, 0.03, 0.04, 0.04),
        row("svd-two-way", 1.0, 0.03, 0.01, 0.02),  # nearer in one kind of weights only
        row("svd-two-way", 0.1, 0.09, 0.02, 0.02),
    ]
    cells = [line.strip("| ").split(" | ") for line in benchmark.verdict(rows).splitlines()[2:]]
    assert [line[5:] for line in cells] == [
        ["3.0", "1.0", "2.0", "G", "nothing"],
        ["3.0", "0.5", "0.5", "G", "λ"],
        ["1.0", "0.2", "0.5", "nothing", "λ"],
    ]


@pytest.mark.parametrize("name", ["multi-mnist", "cifar10-mnist"])
def test_the_page_of_sketches_has_the_verdict_of_its_measurements(benchmark: ModuleType, name: str) -> None:
    with (RESULTS / f"{name}.csv").open() as file:
        assert benchmark.verdict(list(csv.DictReader(file))) in (RESULTS / "table.md").read_text()
