"""CPU-seconds of `fedpareto worker run` until it attends, beside those of `import torch` alone.

Both are interpreters of their own, started in turns, and the medians count. The aim is twice those of the import.
"""

import statistics
import subprocess
import sys

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
            starts.append((import_torch(), one_worker(fed)))
    imported, attends = map(statistics.median, zip(*starts, strict=True))
    return {"import_torch_cpu_s": imported, "worker_attends_cpu_s": attends, "ratio_cpu": attends / imported}


def import_torch() -> float:
    """Of an interpreter that imports PyTorch."""
    program = "import time, torch; print(time.process_time())"
    return float(subprocess.check_output([sys.executable, "-P", "-c", program]))


def one_worker(fed: Federation) -> float:
    """Of a worker in an interpreter of its own, until it attends."""
    fed.directory.joinpath(f"{NAME}.log").unlink(missing_ok=True)
    worker = fed.work(NAME, "--device", "cpu")
    worker.wait_for_text("attending federation")
    cpu = cpu_seconds(worker.popen.pid)
    fed.stop(worker)
    return cpu
