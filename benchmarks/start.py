"""How long `fedpareto worker run` takes until it attends, beside `import torch` alone.

Both are interpreters of their own, started in turns; CPU-seconds are those of the process. The aim is twice the time of
the import.
"""

import statistics
import subprocess
import sys
import time

import psutil
from measuring import Document, cpu_seconds, progress, temporary_federation

from tests.harness import Federation

FORMS = {"full": {"repeats": 3}, "quick": {"repeats": 1}, "smallest": {"repeats": 1}}
NAME = "member"


def measure(repeats: int) -> Document:
    with temporary_federation() as fed:
        fed.serve()
        fed.join(NAME)
        fed.forks = False
        starts = []
        for number in range(repeats):
            progress(f"start {number + 1} of {repeats}")
            starts.append((*import_torch(), *one_worker(fed)))
    import_wall, import_cpu, wall, cpu = map(statistics.median, zip(*starts, strict=True))
    return {
        "import_torch": {"wall_s": import_wall, "cpu_s": import_cpu},
        "worker_attends": {"wall_s": wall, "cpu_s": cpu},
        "ratio_wall": wall / import_wall,
        "ratio_cpu": cpu / import_cpu,
        "load": psutil.getloadavg()[0],
    }


def import_torch() -> tuple[float, float]:
    """Seconds and CPU-seconds of an interpreter that imports PyTorch."""
    began = time.monotonic()
    program = "import time, torch; print(time.process_time())"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return time.monotonic() - began, float(done.stdout)


def one_worker(fed: Federation) -> tuple[float, float]:
    """Seconds and CPU-seconds of a worker in an interpreter of its own, until it attends."""
    fed.directory.joinpath(f"{NAME}.log").unlink(missing_ok=True)
    began = time.monotonic()
    worker = fed.work(NAME, "--device", "cpu")
    worker.wait_for_text("attending federation")
    seconds, cpu = time.monotonic() - began, cpu_seconds(worker.popen.pid)
    fed.stop(worker)
    return seconds, cpu
