"""What scenarios have in common: progress, times, the CPU and memory of processes, and a federation."""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import psutil

from tests.harness import Federation, Process, federation
from tests.paths import PROGRAMS

Document: TypeAlias = dict[str, Any]
T = TypeVar("T")

WORKER = PROGRAMS / "resident_worker.py"
SPEC = """
task = "nothing"
rounds = {rounds}
[algorithm]
name = "fedmgda+"
epsilon = 0.5
[selection]
minimum = {clients}
quorum = 1.0
[evaluate]
every = 0
[privacy]
secure = "{mode}"
"""


def progress(text: str) -> None:
    """Tells on standard error what a scenario does now."""
    print(text, file=sys.stderr, flush=True)


def cases(text: str) -> list[tuple[int, ...]]:
    """The numbers of "10x38000 20x38000"."""
    return [tuple(map(int, case.split("x"))) for case in text.split()]


def least(runs: Sequence[Document]) -> Document:
    """The least of each number: of seconds, what the machine allows; of cosines, the worst."""
    return {name: min(run[name] for run in runs) for name in runs[0]}


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    return min(timed(work) for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_a_process(work: Callable[..., T], *arguments: Any) -> T:
    """What a function returns that is called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def cpu_seconds(*pids: int) -> float:
    """The CPU-seconds of processes and all that they have started, such as the coordinator's front listener."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(one.cpu_times()[:4])  # of its own, and of children that have ended
    return total


def peak_memory(pid: int) -> float:
    """The peak of the resident memory of one process (VmHWM), in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


@contextmanager
def temporary_federation() -> Iterator[Federation]:
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
        yield fed


def lone_coordinator(fed: Federation) -> Process:
    """Starts a coordinator that has imported nothing else: its memory counts."""
    fed.forks = False
    try:
        return fed.serve()
    finally:
        fed.forks = True
