"""Benchmarks run: each in its smallest form, with results for all that is installed; a process that dies ends them."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from harness import Process

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PARTS = {"fedavg", "flower_app", "resident_worker"}  # programs and modules of other benchmarks
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - PARTS)


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON document."""
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def smallest(monkeypatch: pytest.MonkeyPatch, name: str, *options: str) -> None:
    """Runs a benchmark in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smallest", *options])
    monkeypatch.setenv("PYTHONPATH", "")  # a benchmark may set it
    import_module(name).main()


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_in_its_smallest_form(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest(monkeypatch, name, "--json")
    assert numbers(json.loads(capsys.readouterr().out))


def test_make_bench_runs_every_benchmark() -> None:
    makefile = (BENCHMARKS.parent / "Makefile").read_text()
    listed = re.search(r"for name in (.+); do \\\n\t\techo \"== benchmarks/", makefile)
    assert listed
    assert sorted(listed[1].split()) == NAMES


def test_a_worker_that_dies_ends_the_benchmark_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    worker = Process(["-c", "raise SystemExit('this worker cannot start')"], tmp_path / "worker-00.log")
    with pytest.raises(RuntimeError, match=r"worker-00 ended with 1:\nthis worker cannot start"):
        import_module("round").wait_until(lambda: False, [worker])


def test_an_absent_peer_is_shown_as_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "quadprog", None)
    smallest(monkeypatch, "qp")
    assert capsys.readouterr().out.count("not measured") == 5  # one for each kind of matrix
