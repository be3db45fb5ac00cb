"""The CPU time of one aggregation off line, `fedpareto.aggregate`, beside other libraries that are installed.

For each of `--sizes` (updates x parameters, float32 in memory), each rule and each library: the CPU time, the best of
`--repeats` runs; `ratio`, that of ours over it; and `difference`, the largest one of its direction from ours, relative
to the largest element of ours. A tenth of the updates is left out at each end, or counts as attackers. Other libraries
compute in float32, but for the mean in float64; ours in float64.

`make test-peers` makes an environment with the libraries, `.venv-peers`.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from measuring import Document, cases, progress, timed
from numpy.typing import NDArray
from scipy.stats import trim_mean

from fedpareto.offline_aggregation import aggregate

RULES = "fedavg median trimmed-mean geometric-median krum"
FORMS = {
    "full": {"sizes": "10x100000 100x100000 1000x100000 10x1000000 100x1000000", "rules": RULES, "repeats": 3},
    "quick": {"sizes": "10x100000 100x100000", "repeats": 2},
    "smallest": {"sizes": "8x1000", "repeats": 1},
}
Updates = NDArray[np.float32]
Peers = Mapping[str, Callable[[], Any]]


def measure(sizes: str, rules: str, repeats: int) -> Document:
    result: Document = {"load": os.getloadavg()[0], "cases": []}
    for m, d in cases(sizes):
        U = updates(m, d)
        f = max(1, m // 10)
        options: Mapping[str, Mapping[str, int]] = {"trimmed-mean": {"byzantine": f}, "krum": {"byzantine": f}}
        peers = by_rule(U, f)
        for name in rules.split():
            progress(f"{name} of {m} x {d:,}")
            rows = compared(partial(ours, name, U, options.get(name, {})), peers[name], repeats)
            result["cases"] += [{"m": m, "d": d, "rule": name, **row} for row in rows]
    return result


def updates(m: int, d: int) -> Updates:
    """Correlated updates of different norms."""
    rng = np.random.default_rng(0)
    U = rng.standard_normal((m, d), dtype=np.float32)
    U += rng.standard_normal(d, dtype=np.float32) / 3
    U *= rng.uniform(0.5, 2, (m, 1)).astype(np.float32)
    return U


def by_rule(U: Updates, f: int) -> Mapping[str, Peers]:
    """The peers of each rule, by name."""
    peers: dict[str, dict[str, Callable[[], Any]]] = {
        "fedavg": {"numpy": lambda: U.mean(axis=0), "numpy, float64": lambda: U.mean(axis=0, dtype=np.float64)},
        "median": {"numpy": lambda: np.median(U, axis=0)},
        "trimmed-mean": {"scipy": lambda: trim_mean(U, (f + 0.5) / len(U), axis=0)},
        "geometric-median": {},
        "krum": {},
    }
    if find_spec("byzfl"):
        import byzfl

        rules = {
            "fedavg": byzfl.Average(),
            "median": byzfl.Median(),
            "trimmed-mean": byzfl.TrMean(f=f),
            "geometric-median": byzfl.GeometricMedian(nu=1e-3, T=20),  # its 3 steps by default are far from the median
            "krum": byzfl.Krum(f=f + 1),  # its f is not the number of attackers: see tests/peers
        }
        for name, rule in rules.items():
            peers[name]["byzfl, torch"] = partial(in_torch, rule, U)
            peers[name]["byzfl, numpy"] = partial(rule, U)
    if find_spec("torchjd"):
        from torchjd import aggregation

        rules = {
            "fedavg": aggregation.Mean(),
            "trimmed-mean": aggregation.TrimmedMean(trim_number=f),
            "krum": aggregation.Krum(n_byzantine=f),
        }
        for name, rule in rules.items():
            peers[name]["torchjd"] = partial(in_torch, rule, U)
    return peers


def in_torch(rule: Callable[[Any], Any], U: Updates) -> Updates:
    import torch

    direction: Updates = rule(torch.from_numpy(U)).numpy()
    return direction


def ours(name: str, U: Updates, options: Mapping[str, Any]) -> NDArray[np.float64]:
    return aggregate(name, U, **options).direction


def compared(our_rule: Callable[[], Any], peers: Peers, repeats: int) -> list[Document]:
    """One rule by each library, ours first."""
    our_seconds, direction = best(our_rule, repeats)
    rows: list[Document] = [{"library": "ours", "cpu_ms": 1e3 * our_seconds}]
    progress(f"  ours: {our_seconds:.4f} CPU-s")
    for library, work in peers.items():
        seconds, theirs = best(work, repeats)
        progress(f"  {library}: {seconds:.4f} CPU-s")
        difference = float(np.abs(theirs - direction).max() / np.abs(direction).max())
        rows.append(
            {"library": library, "cpu_ms": 1e3 * seconds, "ratio": our_seconds / seconds, "difference": difference}
        )
    return rows


def best(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """CPU-seconds of the fastest of several runs, and the result of the last."""
    results: list[Any] = []
    seconds = [timed(lambda: results.append(work()), time.process_time) for _ in range(repeats)]
    return min(seconds), results[-1]
