"""Benchmarks run: each scenario in its smallest form, with results for what is installed; they leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedpareto.processes.forked import completed
from fedpareto.processes.process_federation import ProcessError
from tests.browsers import chromium_path
from tests.few import few_of
from tests.harness import SECONDS, Federation, wait_for
from tests.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
BENCH = str(BENCHMARKS / "bench.py")
# More than 2 CPU-s, or 10 s.
LONG = {
    *("aggregation", "connections", "console", "large", "population", "private"),
    *("round", "scrape", "simulate", "start", "verify", "wan"),
}


def scenarios() -> list[str]:
    """Every file with forms is a scenario."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if "\nFORMS = {" in path.read_text())


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON document."""
    if isinstance(value, dict):
        return numbers(list(value.values()))
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def run(*arguments: str, before: str = "", code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs bench.py in a process of its own, after some lines of Python."""
    program = (
        f"import runpy, sys\n{before}\nsys.argv[:] = {[BENCH, *arguments]!r}\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\nrunpy.run_path({BENCH!r}, run_name='__main__')"
    )
    done = completed(["-c", program], timeout=SECONDS)
    assert done.returncode == code, done.stderr
    return done


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have inherited a variable of this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in scenarios()]
)
@pytest.mark.full
def test_a_scenario_runs_in_its_smallest_form(name: str) -> None:
    if name == "console":
        chromium_path()  # what it measures are pages in a browser
    assert numbers(json.loads(run(name, "--smallest", "--json").stdout))


@pytest.mark.parametrize("name", few_of(sorted(LONG), "aggregation", "console", "private", "verify"))
def test_a_long_scenario_imports_what_it_needs_and_explains_its_options(name: str) -> None:
    told = run(name, "--help").stdout
    assert "--smallest" in told
    assert "(quick:" in told  # the values of its options


def test_the_list_names_every_scenario_and_what_it_measures() -> None:
    listed = run("--list").stdout.splitlines()
    assert sorted(line.split()[0] for line in listed) == scenarios()
    assert all(re.fullmatch(r"\w+ +[A-Z`].+\.", line) for line in listed)
    assert "name a scenario, or give --list" in run(code=2).stderr


def test_make_bench_runs_every_scenario() -> None:
    assert "benchmarks/bench.py all $(ARGS)" in (BENCHMARKS.parent / "Makefile").read_text()


def test_a_worker_that_dies_ends_the_benchmark_with_its_log(tmp_path: Path) -> None:
    fed = Federation(tmp_path)
    worker = fed.spawn("worker-00", ["-c", "raise SystemExit('this worker cannot start')"])
    with pytest.raises(ProcessError, match=r"worker-00 ended with exit code 1:\nthis worker cannot start"):
        fed.wait(lambda: False, "the run", worker)


def test_absent_peers_are_shown_as_not_measured() -> None:
    absent = "sys.modules['quadprog'] = sys.modules['cvxpy'] = None"
    text = run("qp", "--smallest", before=absent).stdout
    assert text.count("not measured") == 2 * 2 * 6  # time and residual of two peers, for each kind of matrix


@pytest.mark.full
def test_without_a_browser_the_console_is_not_measured_and_the_other_scenarios_go_on() -> None:
    told = run("console", "--smallest", before="import shutil\nshutil.which = lambda name: None").stdout
    assert told.endswith("not measured: chromium is not installed: apt-get install chromium\n")


def test_the_coordinators_cpu_includes_that_of_processes_that_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\nsys.stdin.read()"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {program!r}])"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert import_module("measuring").cpu_seconds(parent.pid) > 0.15


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets, which are limited to 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("name", "number", "processes"),
    [
        # the coordinator, its front listener and a worker, with what forks them
        pytest.param("round", signal.SIGTERM, 6, marks=pytest.mark.full),
        ("qp", signal.SIGTERM, 1),
        pytest.param("all", signal.SIGINT, 2, marks=pytest.mark.full),
        *(pytest.param(name, signal.SIGTERM, 1, marks=pytest.mark.full) for name in scenarios() if name != "qp"),
    ],
)
@pytest.mark.full
def test_a_signal_ends_a_scenario_with_every_process_and_file_of_it(
    short_directory: Path, name: str, number: signal.Signals, processes: int
) -> None:
    mark = str(short_directory)
    with subprocess.Popen(
        [sys.executable, BENCH, name, "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "BENCH_MARK": mark, "TMPDIR": mark},
    ) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline()  # it tells what it does
        wait_for(lambda: len(marked(mark)) >= processes or bench.poll() is not None, "processes")
        assert bench.poll() is None, bench.stdout.read()
        bench.send_signal(number)
        bench.stdout.read()  # until the last process has closed it
        assert bench.wait() == 128 + number
    wait_for(lambda: not marked(mark), "the end of every process")
    assert not list(short_directory.glob("tmp*"))
