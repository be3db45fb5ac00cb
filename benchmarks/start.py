"""How long `fedpareto worker run` takes until it attends, beside `import torch` alone; and forks beside new processes.

    python benchmarks/start.py [--workers 10] [--repeat 3] [--quick] [--json]

Both are interpreters of their own, started in turns; CPU-seconds are those of the process. The aim is twice the time of
the import. Then all workers start as forks of a server that has imported everything, as in `fedpareto demo`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import Federation, federation

ATTENDS = "attending federation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="3 workers, once")
    parser.add_argument("--smallest", action="store_true", help="1 worker, once")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.repeat = 3, 1
    if arguments.smallest:
        arguments.workers, arguments.repeat = 1, 1
    with tempfile.TemporaryDirectory() as directory, federation(Path(directory)) as fed:
        fed.serve()
        names = [f"member-{number}" for number in range(arguments.workers)]
        for name in names:
            fed.join(name)
        imports, alone = [], []
        for _ in range(arguments.repeat):
            imports.append(import_torch())
            alone.append(one_worker(fed, names[0]))
        forked = all_workers(fed, names)
    result = {
        "import_torch": {"wall_s": median(imports, 0), "cpu_s": median(imports, 1)},
        "worker_attends": {"wall_s": median(alone, 0), "cpu_s": median(alone, 1), "bytes": median(alone, 2)},
        "ratio_wall": median(alone, 0) / median(imports, 0),
        "ratio_cpu": median(alone, 1) / median(imports, 1),
        "forked_workers_attend": {"workers": len(names), "wall_s": forked},
        "load": psutil.getloadavg()[0],
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {json.dumps(value)}")


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
    seconds, process = time.monotonic() - began, psutil.Process(worker.popen.pid)
    times, memory = process.cpu_times(), process.memory_info().rss
    fed.forks = True
    fed.stop(worker)
    return seconds, times.user + times.system, float(memory)


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


if __name__ == "__main__":
    main()
