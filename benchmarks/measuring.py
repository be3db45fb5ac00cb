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

from federation.vectors import Layout, Tensor
from tests.harness import Federation, Process, federation
from tests.paths import PROGRAMS

Document: TypeAlias = dict[str, Any]
T = TypeVar("T")

_WORKER = PROGRAMS / "resident_worker.py"
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


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds, or those of another clock."""
    began = clock()
    work()
    return clock() - began


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


def peak_memory(pid: int) -> int:
    """The peak of the resident memory of one process (VmHWM), in bytes; OSError or IndexError if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


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


def idle_worker(fed: Federation, home: Path, parameters: int) -> Process:
    """Starts a worker that does not train. All updates differ: of equal ones, a coordinator stores one, once."""
    return fed.spawn(home.name, [str(_WORKER), str(home), str(parameters), "fresh"])


def submitted(
    fed: Federation, name: str, parameters: int, *, rounds: int = 1, clients: int = 1, mode: str = "off"
) -> tuple[str, int]:
    """Submits a run of workers that do not train; returns its id, and the bytes of its model, which is zero."""
    model, layout = fed.directory / f"{name}.safetensors", Layout((Tensor("weight", (parameters,)),))
    with model.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.file_bytes)  # zeros that take no room
    spec = SPEC.format(rounds=rounds, clients=clients, mode=mode)
    return fed.submit(name, spec, "--model", str(model)), layout.file_bytes
