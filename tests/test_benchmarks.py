"""Benchmarks run: each in its smallest form, with results for all that is installed; a process that dies ends them."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from harness import SECONDS, Process

from fedpareto.processes.forked import completed

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PARTS = {"fedavg", "flower_app", "flower_secagg", "resident_worker"}  # programs and modules of other benchmarks
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - PARTS)
LONG = {  # more than 3 CPU seconds, or 10 seconds of waiting
    *("audit_log", "idle", "jacobian", "large", "private", "round", "simulate", "start", "verify", "wan")
}


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON document."""
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def run(name: str, *options: str, before: str = "") -> str:
    """Runs a benchmark as a program in a process of its own, after some lines of Python; returns what it prints."""
    program = (
        f"import runpy, sys\n{before}\nsys.argv[1:] = {[*options]!r}\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"runpy.run_path({str(BENCHMARKS / name) + '.py'!r}, run_name='__main__')"
    )
    done = completed(["-c", program], timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in NAMES]
)
def test_a_benchmark_runs_in_its_smallest_form(name: str) -> None:
    assert numbers(json.loads(run(name, "--smallest", "--json")))


@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_benchmark_imports_what_it_needs_and_explains_its_options(name: str) -> None:
    assert "--smallest" in run(name, "--help")


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


def test_an_absent_peer_is_shown_as_not_measured() -> None:
    text = run("qp", "--smallest", before="sys.modules['quadprog'] = None")
    assert text.count("not measured") == 6  # one for each kind of matrix
