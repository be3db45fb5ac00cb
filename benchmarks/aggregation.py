"""The time of one aggregation by every algorithm: K, the rule, the direction and the new model.

K is the same for all and measured once. The step of plain averaging is also measured with every optimiser of the
server. The best of several times counts. Rows and vectors are files in the page cache; the new model is not stored.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation.base import Rule
from coordinator.aggregation.direction import Direction
from coordinator.aggregation.gram import apply_step, combine, gram
from coordinator.aggregation.interface import Matrix, Rows
from coordinator.aggregation.registry import ALGORITHMS, algorithm
from coordinator.aggregation.server_optimisers import OPTIMISERS, Optimiser
from coordinator.aggregation.streaming import Row, one_thread
from federation.vectors import update_layout, update_rows, write_vectors


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def write_rows(directory: Path, m: int, d: int) -> list[Row]:
    """Writes correlated updates of different norms."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(d, dtype=np.float32)
    rows: list[Row] = []
    for i in range(m):
        update = (common + 3 * rng.standard_normal(d, dtype=np.float32)) * np.float32(rng.uniform(0.5, 2))
        rows.append(written(directory / f"{i:03}", update))
    return rows


def written(path: Path, vector: NDArray[np.float32]) -> Row:
    write_vectors(path, update_layout([("loss", len(vector))]), vector)
    return update_rows(path)["loss"]


def rows_of(K: Matrix) -> Rows:
    """The input of a rule, with clients that differ."""
    m = len(K)
    rng = np.random.default_rng(1)
    return Rows(
        gram=K,
        prior=np.full(m, 1.0 / m),
        samples=rng.integers(50, 500, m).astype(np.float64),
        losses=rng.uniform(0.1, 2.0, m),
        accuracies=rng.uniform(0.2, 0.9, m),
        clients=tuple(f"client-{i:03}" for i in range(m)),
    )


def by_algorithm(name: str, rows: list[Row], K: Matrix, gram_seconds: float, repeats: int) -> dict[str, Any]:
    # FedMGDA+ without bounds on the weights, as in docs/benchmarks.md.
    rule, rows_seen = algorithm(name, {"epsilon": 1.0} if name == "fedmgda+" else {}), rows_of(K)
    assert isinstance(rule, Rule)
    decision = rule.decide(rows_seen)
    with one_thread():  # as in a run
        rule_seconds = best(lambda: rule.decide(rows_seen), repeats)
    step_seconds = best(lambda: apply_step(rows[0], 1.0, Direction(decision, rows, K), len), repeats)
    return {
        "algorithm": name,
        "rule_seconds": rule_seconds,
        "step_seconds": step_seconds,
        "total_seconds": gram_seconds + rule_seconds + step_seconds,
    }


def by_optimiser(optimiser: Optimiser, rows: list[Row], vector: Row, repeats: int) -> float:
    c = np.full(len(rows), 1.0 / len(rows))
    before = dict.fromkeys(optimiser.slots, vector)
    after: dict[str, Callable[[memoryview], object]] = dict.fromkeys(optimiser.slots, len)
    return best(
        lambda: apply_step(rows[0], 1.0, combine(c, rows), len, optimiser=optimiser, before=before, after=after),
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="m = 20, d = 0.1 million")
    parser.add_argument("--smallest", action="store_true", help="m = 8, d = 1000, once")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    m, d, repeats = (8, 1_000, 1) if options.smallest else (20, 100_000, 3) if options.quick else (100, 800_000, 5)
    with tempfile.TemporaryDirectory() as directory:
        rows = write_rows(Path(directory), m, d)
        K = gram(rows)
        gram_seconds = best(lambda: gram(rows), repeats)
        table = [by_algorithm(name, rows, K, gram_seconds, repeats) for name in ALGORITHMS]
        vector = written(Path(directory) / "vector", np.random.default_rng(2).random(d, dtype=np.float32))
        optimisers = {name: by_optimiser(kind(), rows, vector, repeats) for name, kind in OPTIMISERS.items()}
    if options.json:
        document = {"m": m, "d": d, "gram_seconds": gram_seconds, "algorithms": table, "optimisers": optimisers}
        json.dump(document, sys.stdout)
        print()
        return
    print(f"m = {m}, d = {d:,}; K: {1e3 * gram_seconds:.0f} ms")
    print(f"{'algorithm':<18} {'rule ms':>8} {'step ms':>8} {'with K ms':>10}")
    for row in table:
        times = (1e3 * row[key] for key in ("rule_seconds", "step_seconds", "total_seconds"))
        print("{:<18} {:>8.1f} {:>8.1f} {:>10.1f}".format(row["algorithm"], *times))
    print("step of fedavg, by the server's optimiser:")
    for name, seconds in optimisers.items():
        print(f"{name:<18} {'':>8} {1e3 * seconds:>8.1f}")


if __name__ == "__main__":
    main()
