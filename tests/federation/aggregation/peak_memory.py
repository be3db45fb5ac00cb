"""The memory that a computation over m rows of d elements takes, in a process of its own."""

import json
from pathlib import Path

from fedpareto.processes.forked import completed

_MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from federation.aggregation.gram import apply_step, combine, gram, trimmed_mean
from federation.aggregation.server_optimizers import FedAdam
from federation.vectors import RowFile

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

m, d = int(sys.argv[1]), int(sys.argv[2])
rows = [RowFile(Path(sys.argv[3]) / str(i), 0, d) for i in range(m)]
before = peak()
{computation}
print(json.dumps(peak() - before))
"""


def check_bounded(computation: str, directory: Path, longest: int) -> None:
    """Fails if the memory of statements about `rows`, of which there are `m`, grows with m or d.

    50 x 600,000 elements are 120 MB, 96 MB more than 10 rows; what is in use is a few panels of 8 MiB for each thread.
    """
    peaks = {}
    for m, d in ((10, longest), (50, longest)):
        for i in range(m):
            with (directory / str(i)).open("wb") as file:
                file.truncate(4 * d)  # holes read as zeros
        done = completed(["-c", _MEASURE.format(computation=computation), str(m), str(d), str(directory)])
        assert done.returncode == 0, done.stderr
        peaks[m, d] = json.loads(done.stdout)
    assert max(peaks.values()) < 150e6, peaks
    assert abs(peaks[50, longest] - peaks[10, longest]) < 60e6, peaks
