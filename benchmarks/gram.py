"""gram and combine compared with the memory-read bandwidth; the check of an arriving update; peak memory.

One process measures everything in turn and takes the best of several times. The bandwidth is that of NumPy's maximum of
a large array, on the same number of threads as gram. The rows are files in the page cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.aggregation.gram import combine, gram
from coordinator.aggregation.streaming import Row
from federation.digests import hasher
from federation.line.payload_check import PayloadCheck
from federation.vectors import to_bytes, update_layout, update_rows, write_vectors

CHUNK = 1 << 20
PEAK = """
import sys
from pathlib import Path
import numpy as np
from coordinator.aggregation.gram import apply_step, combine, gram
from federation.vectors import update_rows

rows = [update_rows(path)["loss"] for path in sorted(Path(sys.argv[1]).iterdir())[: int(sys.argv[2])]]
gram(rows)
apply_step(rows[0], 1.0, combine(np.ones(len(rows)), rows), len)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(threads: int, repeats: int, count: int) -> float:
    """Bytes per second of reading `count` float32 numbers."""
    pieces = np.array_split(np.ones(count, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return 4 * count / best(lambda: list(pool.map(np.max, pieces)), repeats)


def streaming(directory: Path, m: int, d: int, bandwidth: float, repeats: int) -> dict[str, Any]:
    rows: list[Row] = [update_rows(path)["loss"] for path in sorted(directory.iterdir())[:m]]
    coefficients = np.random.default_rng(0).standard_normal(m)

    def direction() -> None:
        for _ in combine(coefficients, rows):
            pass

    size = 4.0 * m * d
    gram_seconds, combine_seconds = best(lambda: gram(rows), repeats), best(direction, repeats)
    both = 2 * size / (gram_seconds + combine_seconds)
    return {
        "m": m,
        "d": d,
        "gram_gb_s": size / gram_seconds / 1e9,
        "combine_gb_s": size / combine_seconds / 1e9,
        "both_gb_s": both / 1e9,
        "share_of_bandwidth": both / bandwidth,
        "gram_seconds": gram_seconds,
        "combine_seconds": combine_seconds,
    }


def arriving(d: int, repeats: int) -> dict[str, float]:
    """GB/s of all checks of an update in one pass, and of the digest alone."""
    layout = update_layout([("loss", d)])
    payload = to_bytes(layout, np.random.default_rng(0).standard_normal(d, dtype=np.float32))
    chunks = [payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK)]

    def check() -> None:
        payload_check = PayloadCheck(layout)
        for chunk in chunks:
            payload_check.feed(chunk)
        payload_check.finish()

    def digest_alone() -> None:
        state = hasher()
        for chunk in chunks:
            state.update(chunk)
        state.hexdigest()

    size = len(payload) / 1e9
    return {"check_gb_s": size / best(check, repeats), "digest_gb_s": size / best(digest_alone, repeats)}


def write_rows(directory: Path, m: int, d: int) -> None:
    directory.mkdir()
    layout = update_layout([("loss", d)])
    rng = np.random.default_rng(0)
    for i in range(m):
        write_vectors(directory / f"{i:03}", layout, rng.standard_normal(d, dtype=np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="d = 0.8 million only")
    parser.add_argument("--smallest", action="store_true", help="d = 1000 only, once")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    repeats = 1 if options.smallest else 3 if options.quick else 5
    threads = min(8, len(os.sched_getaffinity(0)))
    bandwidth = read_bandwidth(threads, 2 * repeats, 1_000 if options.smallest else 64_000_000)
    lengths = (1_000,) if options.smallest else (800_000,) if options.quick else (800_000, 11_200_000)
    table, peaks = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        for d in lengths:
            directory = Path(temporary) / str(d)
            write_rows(directory, 50, d)
            table += [streaming(directory, m, d, bandwidth, repeats) for m in (10, 50)]
            for m in (10, 50):
                command = [sys.executable, "-c", PEAK, str(directory), str(m)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                peaks[m] = int(done.stdout) * 1024 / 1e6
    document = {
        "threads": threads,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "streaming": table,
        "arriving": arriving(lengths[-1], repeats),
        "peak_memory_mb": {"d": lengths[-1]} | {f"m={m}": peak for m, peak in peaks.items()},
    }
    if options.json:
        json.dump(document, sys.stdout)
        print()
        return
    print(f"memory read, {threads} threads: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'m':>4} {'d':>11}  {'gram GB/s':>9}  {'combine GB/s':>12}  {'both GB/s':>9}  {'of bandwidth':>12}")
    for row in table:
        print(
            f"{row['m']:>4} {row['d']:>11,}  {row['gram_gb_s']:>9.1f}  {row['combine_gb_s']:>12.1f}"
            f"  {row['both_gb_s']:>9.1f}  {row['share_of_bandwidth']:>12.0%}"
        )
    check = arriving(lengths[-1], repeats)
    print(f"arriving update: digest and checks {check['check_gb_s']:.1f} GB/s, digest alone {check['digest_gb_s']:.1f}")
    print(
        f"peak memory of gram and step, d = {lengths[-1]:,}: {peaks[10]:.0f} MB (m = 10), {peaks[50]:.0f} MB (m = 50)"
    )


if __name__ == "__main__":
    main()
