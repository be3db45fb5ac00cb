"""The time of gram and combine, of the check of an arriving update, and of one aggregation by every algorithm.

`streaming` compares gram and combine, for each of `--sizes` (members x parameters), with the memory-read bandwidth:
that of NumPy's maximum of a large array, on as many threads. `arriving` is the check of one update, and `peak_memory`
that of a process that computes gram and a step over files only.

`algorithms` has three parts for `--m` updates of `--d` parameters: K, which is the same for all and measured once; the
rule; and the step. The step of plain averaging is also measured with every optimiser of the server. The best of
`--repeats` runs counts. Rows and vectors are files in the page cache; the new model is not stored.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from measuring import Document, best, cases, progress
from numpy.typing import NDArray

from federation.aggregation.base import Rule
from federation.aggregation.direction import Direction
from federation.aggregation.gram import apply_step, combine, gram
from federation.aggregation.interface import Matrix, Rows
from federation.aggregation.registry import ALGORITHMS, algorithm
from federation.aggregation.server_optimizers import OPTIMIZERS, Optimizer
from federation.aggregation.streaming import Row, one_thread
from federation.digests import digest
from federation.transport.payload_check import PayloadCheck
from federation.vectors import to_bytes, update_layout, update_rows, write_vectors

FORMS = {
    "full": {"sizes": "10x800000 50x800000 10x11200000 50x11200000", "m": 100, "d": 800_000, "repeats": 5},
    "quick": {"sizes": "10x800000 50x800000", "m": 20, "d": 100_000, "repeats": 3},
    "smallest": {"sizes": "10x1000", "m": 8, "d": 1_000, "repeats": 1},
}
PEAK = """
import sys
from pathlib import Path
import numpy as np
from federation.aggregation.gram import apply_step, combine, gram
from federation.vectors import update_rows

rows = [update_rows(path)["loss"] for path in Path(sys.argv[1]).iterdir()]
gram(rows)
apply_step(rows[0], 1.0, combine(np.ones(len(rows)), rows), len)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def measure(sizes: str, m: int, d: int, repeats: int) -> Document:
    threads = min(8, len(os.sched_getaffinity(0)))
    bandwidth = read_bandwidth(threads, 2 * repeats, 64_000_000 if m * d > 1e6 else 1_000)
    result: Document = {"threads": threads, "read_gb_s": bandwidth / 1e9, "streaming": []}
    for count, length in cases(sizes):
        progress(f"gram and combine of {count} x {length:,}")
        with tempfile.TemporaryDirectory() as directory:
            rows = write_rows(Path(directory), count, length)
            found = streaming(Path(directory), rows, length, bandwidth, repeats)
            result["streaming"].append({"m": count, "d": length, **found})
    result["arriving"] = arriving(cases(sizes)[-1][1], repeats)
    with tempfile.TemporaryDirectory() as directory:
        rows = write_rows(Path(directory), m, d)
        K = gram(rows)
        result |= {"m": m, "d": d, "gram_ms": 1e3 * best(lambda: gram(rows), repeats)}
        progress(f"{len(ALGORITHMS)} algorithms with {m} x {d:,}")
        result["algorithms"] = [by_algorithm(name, rows, K, repeats) for name in ALGORITHMS]
        vector = written(Path(directory) / "vector", np.random.default_rng(2).random(d, dtype=np.float32))
        steps = {name: by_optimizer(kind(), rows, vector, repeats) for name, kind in OPTIMIZERS.items()}
    return result | {"optimisers, step_ms": steps}


def read_bandwidth(threads: int, repeats: int, count: int) -> float:
    """Bytes per second of reading `count` float32 numbers."""
    pieces = np.array_split(np.ones(count, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return 4 * count / best(lambda: list(pool.map(np.max, pieces)), repeats)


def streaming(directory: Path, rows: list[Row], d: int, bandwidth: float, repeats: int) -> Document:
    coefficients = np.random.default_rng(0).standard_normal(len(rows))
    seconds = best(lambda: gram(rows), repeats) + best(lambda: [None for _ in combine(coefficients, rows)], repeats)
    both = 2 * 4.0 * len(rows) * d / seconds
    peak = int(subprocess.check_output([sys.executable, "-c", PEAK, str(directory)])) * 1024
    return {"both_gb_s": both / 1e9, "share_of_read": both / bandwidth, "peak_memory_mb": peak / 1e6}


def arriving(d: int, repeats: int) -> Document:
    """GB/s of all checks of an update in one pass, and of the digest alone."""
    layout = update_layout([("loss", d)])
    payload = to_bytes(layout, np.random.default_rng(0).standard_normal(d, dtype=np.float32))

    def check() -> None:
        payload_check = PayloadCheck(layout)
        payload_check.feed(payload)
        payload_check.finish()

    size = len(payload) / 1e9
    return {"check_gb_s": size / best(check, repeats), "digest_gb_s": size / best(lambda: digest(payload), repeats)}


def write_rows(directory: Path, m: int, d: int) -> list[Row]:
    """Writes correlated updates of different norms."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(d, dtype=np.float32)
    updates = (common + 3 * rng.standard_normal(d, dtype=np.float32) for _ in range(m))
    return [written(directory / f"{i:03}", u * np.float32(rng.uniform(0.5, 2))) for i, u in enumerate(updates)]


def written(path: Path, vector: NDArray[np.float32]) -> Row:
    write_vectors(path, update_layout([("loss", len(vector))]), vector)
    return update_rows(path)["loss"]


def rows_of(K: Matrix) -> Rows:
    """The input of a rule, with clients that differ."""
    m, rng = len(K), np.random.default_rng(1)
    return Rows(
        gram=K,
        prior=np.full(m, 1.0 / m),
        samples=rng.integers(50, 500, m).astype(np.float64),
        losses=rng.uniform(0.1, 2.0, m),
        accuracies=rng.uniform(0.2, 0.9, m),
        clients=tuple(f"client-{i:03}" for i in range(m)),
    )


def by_algorithm(name: str, rows: list[Row], K: Matrix, repeats: int) -> Document:
    # FedMGDA+ without bounds on the weights, as in docs/operate/benchmarks.md.
    rule, rows_seen = algorithm(name, {"epsilon": 1.0} if name == "fedmgda+" else {}), rows_of(K)
    assert isinstance(rule, Rule)
    decision = rule.decide(rows_seen)
    with one_thread():  # as in a run
        rule_ms = 1e3 * best(lambda: rule.decide(rows_seen), repeats)
    step_ms = 1e3 * best(lambda: apply_step(rows[0], 1.0, Direction(decision, rows, K), len), repeats)
    return {"algorithm": name, "rule_ms": rule_ms, "step_ms": step_ms}


def by_optimizer(optimizer: Optimizer, rows: list[Row], vector: Row, repeats: int) -> float:
    c = np.full(len(rows), 1.0 / len(rows))
    before, after = dict.fromkeys(optimizer.slots, vector), dict.fromkeys(optimizer.slots, len)
    options: dict[str, Any] = {"optimizer": optimizer, "before": before, "after": after}
    return 1e3 * best(lambda: apply_step(rows[0], 1.0, combine(c, rows), len, **options), repeats)
