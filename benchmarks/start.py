"""How long `fedpareto worker run` takes until it attends, beside `import torch` alone; and forks beside new processes.

Both are interpreters of their own, started in turns; CPU-seconds are those of the process. The aim is twice the time of
the import. Then all workers start as forks of a server that has imported everything, as in `fedpareto demo`.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
from measuring import Document, cpu_seconds, progress, temporary_federation

from tests.harness import Federation

FORMS = {
    "full": {"workers": 10, "repeats": 3},
    "quick": {"workers": 3, "repeats": 1},
    "smallest": {"workers": 1, "repeats": 1},
}
ATTENDS = "attending federation"


def measure(workers: int, repeats: int) -> Document:
    with temporary_federation() as fed:
        fed.serve()
        names = [f"member-{number}" for number in range(workers)]
        for name in names:
            fed.join(name)
        imports, alone = [], []
        for number in range(repeats):
            progress(f"start {number + 1} of {repeats}")
            imports.append(import_torch())
            alone.append(one_worker(fed, names[0]))
        forked = all_workers(fed, names)
    return {
        "import_torch": {"wall_s": median(imports, 0), "cpu_s": median(imports, 1)},
        "worker_attends": {"wall_s": median(alone, 0), "cpu_s": median(alone, 1), "bytes": median(alone, 2)},
        "ratio_wall": median(alone, 0) / median(imports, 0),
        "ratio_cpu": median(alone, 1) / median(imports, 1),
        "forked_workers_attend": {"workers": workers, "wall_s": forked},
        "load": psutil.getloadavg()[0],
    }


def import_torch() -> tuple[float, float, float]:
    """Seconds, CPU-seconds and bytes of an interpreter that imports PyTorch."""
    began = time.monotonic()
    program = "import time, torch; print(time.process_time())"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return time.monotonic() - began, float(done.stdout), 0.0


def one_worker(fed: Federation, name: str) -> tuple[float, float, float]:
    """Seconds, CPU-seconds and bytes of a worker in an interpreter of its own, until it attends."""
    fed.forks = False
    fed.directory.joinpath(f"{name}.log").unlink(missing_ok=True)
    began = time.monotonic()
    worker = fed.work(name, "--device", "cpu")
    worker.wait_for_text(ATTENDS)
    seconds, cpu = time.monotonic() - began, cpu_seconds(worker.popen.pid)
    memory = psutil.Process(worker.popen.pid).memory_info().rss
    fed.forks = True
    fed.stop(worker)
    return seconds, cpu, float(memory)


def all_workers(fed: Federation, names: Sequence[str]) -> float:
    """Seconds until forked workers attend, all at once."""
    for name in names:
        fed.directory.joinpath(f"{name}.log").unlink(missing_ok=True)
    began = time.monotonic()
    workers = [fed.work(name, "--device", "cpu") for name in names]
    for worker in workers:
        worker.wait_for_text(ATTENDS)
    seconds = time.monotonic() - began
    fed.stop(*workers)
    return seconds


def median(rows: Sequence[tuple[float, float, float]], column: int) -> float:
    return statistics.median(row[column] for row in rows)
