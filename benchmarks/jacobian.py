"""Sketches of the Jacobian at equal budgets: the errors of the Gram matrix and of the weights, time and floats.

Ten clients, Dirichlet(0.3) over the labels; stochastic Jacobians of the encoder at initialisation and after some steps
of SGD; every draw has its own minibatches and seeds. Two objectives are the two labels of a sample; ten objectives are
the classes of the first label, each against the rest. Samples are synthetic, or those of `multi-mnist` with --data.

nRMSE is ||Ghat - G||_F / ||G||_F. The l1 columns are the distances of the weights from Ghat and from G, computed by
min-norm, and by FindWeights from uniform weights. "excess" is the relative excess length of the direction with the
min-norm weights of Ghat over the shortest direction. Floats are sent by a client, in one or two messages.

--verdict CSV makes no measurements. It compares CountSketch with the paper's two-way SVD, from the files of earlier
calls, and shows which of them estimates G and which estimates the weights λ more accurately.
"""

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from coordinator.aggregation.qp import min_norm
from coordinator.aggregation.rules.find_weights import find_weights
from coordinator.aggregation.streaming import one_thread
from federation.sketches import SKETCHES
from federation.sketches.base import ClientSketch, Sketch, clip_to_psd
from federation.sketches.draws import signs, words
from federation.sketches.linear import CountSketch
from federation.sketches.svd import TwoWaySvd
from federation.spec.objective_names import HEADS
from federation.tasks import DataSource, Part, Pool, Task, task
from federation.tasks.networks import ManyHeads
from federation.tasks.parameters import build
from federation.tasks.partition import deal_all
from federation.tasks.published import Classification

CLIENTS, CLASSES, BATCH = 10, 10, 128
SETTING = ("setting", "M", "d", "stage")
ERRORS = ("nrmse", "l1_exact", "l1_pgd")  # of the Gram matrix; of the weights, min-norm and FindWeights
ADVANTAGE = 1.5  # a ratio of two errors that the choice of draws alone does not explain
COLUMNS = ("nrmse", "l1_exact", "l1_pgd", "excess", "client_ms", "server_ms", "floats")

T = TypeVar("T")
Losses = Callable[[Any, Tensor], list[Tensor]]


class Synthetic(Classification):
    """Two labels, each with a cluster for every class, in one noisy input; an encoder of 26,920 parameters."""

    objectives = ("left", "right")

    def model(self) -> nn.Module:
        encoder = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 40), nn.ReLU())
        return ManyHeads(encoder, {name: nn.Linear(40, CLASSES) for name in self.objectives})

    def pool(self, source: DataSource) -> Pool:
        rng = np.random.default_rng(1)
        y = rng.integers(0, CLASSES, (20_000, 2))
        left, right = rng.standard_normal((2, CLASSES, 64))
        x = left[y[:, 0]] + right[y[:, 1]] + 2 * rng.standard_normal((len(y), 64))
        inputs = torch.from_numpy(x.astype(np.float32))
        return Pool(inputs, torch.from_numpy(y), labels=CLASSES * y[:, 0] + y[:, 1])


@dataclass(frozen=True, kw_only=True)
class IndependentHash(CountSketch):
    """CountSketch with its usual definition: an independent bucket for every coordinate."""

    def message(
        self, A: NDArray[np.floating[Any]], shared_seed: int, own_seed: int
    ) -> dict[str, NDArray[np.floating[Any]]]:
        bits = -(-self.d // 64)
        raw = words(shared_seed, bits + self.d)
        bucket = (raw[bits:] % np.uint64(self.k)).astype(np.int64)
        flips = signs(raw[:bits], self.d)
        return {"sums": np.stack([np.bincount(bucket, weights=row * flips, minlength=self.k) for row in A])}


KINDS: dict[str, type[Sketch]] = {**SKETCHES, "count, independent hash": IndependentHash}


@dataclass(frozen=True)
class Setting:
    """A model, its clients' data, and its objectives."""

    name: str
    model: nn.Module
    clients: list[tuple[Tensor, Tensor]]
    losses: Losses

    def encoder(self) -> list[Tensor]:
        return [p for name, p in self.model.named_parameters() if not name.startswith(HEADS)]

    def batch(self, client: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        x, y = self.clients[client]
        chosen = torch.from_numpy(rng.permutation(len(y))[:BATCH])
        return x[chosen], y[chosen]

    def jacobians(self, seed: int) -> list[NDArray[np.float32]]:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        found = []
        for client in range(len(self.clients)):
            x, y = self.batch(client, rng)
            losses = self.losses(self.model(x), y)
            rows = [torch.autograd.grad(loss, self.encoder(), retain_graph=True) for loss in losses]
            found.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows]).numpy())
        return found

    def train(self, steps: int) -> None:
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for step in range(steps):
            x, y = self.batch(step % len(self.clients), rng)
            optimiser.zero_grad()
            torch.stack(self.losses(self.model(x), y)).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def settings(what: Task, directory: Path | None) -> Iterator[Setting]:
    splits = deal_all(what.pool(DataSource(directory)), Part(0, CLIENTS, "dirichlet:0.3"))
    clients = [(own.train.x, own.train.y) for own in splits]

    def both(output: Any, y: Tensor) -> list[Tensor]:
        return list(what.losses(output, y).values())

    def each_against_the_rest(output: Any, y: Tensor) -> list[Tensor]:
        logits = output[what.objectives[0]]
        return [binary_cross_entropy_with_logits(logits[:, k], (y[:, 0] == k).float()) for k in range(CLASSES)]

    for losses in (both, each_against_the_rest):
        yield Setting(what.name or "synthetic", build(what).train(), clients, losses)


def milliseconds(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    found = work()
    return found, 1e3 * (time.perf_counter() - start)


def measure(kind: Sketch, jacobians: list[NDArray[np.float32]], G: NDArray[np.float64], seed: int) -> dict[str, float]:
    names = kind.objectives
    weights = np.full(len(names), 1 / len(jacobians))
    client = server = 0.0
    sketches = []
    for i, A in enumerate(jacobians):
        rows, spent = milliseconds(partial(kind.compress, A, shared_seed=seed, own_seed=1000 * seed + i))
        client += spent
        sketches.append(ClientSketch(names, weights, rows))
    if isinstance(kind, TwoWaySvd):
        down, spent = milliseconds(partial(kind.reference, sketches, names, shared_seed=seed, own_seed=seed))
        server += spent
        for i, (A, own) in enumerate(zip(jacobians, sketches, strict=True)):
            rows, spent = milliseconds(partial(kind.residual, A, own.rows, down, names))
            client += spent
            sketches[i] = ClientSketch(names, weights, {**own.rows, **rows})
    found, spent = milliseconds(partial(kind.gram, sketches, names, shared_seed=seed))
    server += spent
    uniform = np.full(len(names), 1 / len(names))
    exact, estimated = min_norm(G).weights, min_norm(clip_to_psd(found)).weights
    shortest = float(exact @ G @ exact)
    return {
        "nrmse": float(np.linalg.norm(found - G) / np.linalg.norm(G)),
        "l1_exact": float(np.abs(estimated - exact).sum()),
        "l1_pgd": float(np.abs(find_weights(found, uniform) - find_weights(G, uniform)).sum()),
        "excess": math.sqrt(float(estimated @ G @ estimated) / shortest) - 1,
        "client_ms": client / len(jacobians),
        "server_ms": server,
        "floats": float(sum(len(row) for row in sketches[0].rows.values())),
    }


def compare(setting: Setting, stage: str, budgets: Sequence[float | None], draws: int) -> Iterator[dict[str, Any]]:
    drawn = [setting.jacobians(seed) for seed in range(1, draws + 1)]
    M, d = drawn[0][0].shape
    grams = []
    for jacobians in drawn:
        total = np.mean([A.astype(np.float64) for A in jacobians], axis=0)
        grams.append(total @ total.T)
    for name, kind in KINDS.items():
        for budget in budgets if name not in ("gram", "exact") else [None]:
            made = kind(d=d, objectives=tuple(map(str, range(M))), budget=budget or 1.0)
            cells = [
                measure(made, jacobians, G, seed) for seed, (jacobians, G) in enumerate(zip(drawn, grams, strict=True))
            ]
            means = {column: float(np.mean([cell[column] for cell in cells])) for column in COLUMNS}
            yield {"setting": setting.name, "M": M, "d": d, "stage": stage, "sketch": name, "budget": budget} | means


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| sketch | budget | nRMSE | l1 min-norm | l1 FindWeights | excess | client ms | server ms | floats | of d |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        lines.append(
            f"| {row['sketch']} | {budget} | {row['nrmse']:.3f} | {row['l1_exact']:.3f} | {row['l1_pgd']:.4f} "
            f"| {row['excess']:.1%} | {row['client_ms']:.1f} | {row['server_ms']:.1f} | {row['floats']:,.0f} "
            f"| {row['floats'] / row['d']:.4f} |"
        )
    return "\n".join(lines)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the ratios of the two-way SVD's errors to CountSketch's, and of what each estimates better.

    Args:
        rows: from `compare`, or from the CSV file.
    """
    by_sketch = {(*(row[key] for key in SETTING), row["sketch"], _number(row["budget"])): row for row in rows}
    lines = [
        "| M | d | stage | CountSketch | two-way SVD | G | λ, min-norm | λ, FindWeights | CountSketch is better for "
        "| SVD is better for |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in dict.fromkeys(tuple(row[key] for key in SETTING) for row in rows):
        _, M, d, stage = setting
        for mine, theirs in ((1.0, 1.0), (0.1, 0.1), (0.1, 1.0)):
            count, svd = by_sketch[*setting, "count", mine], by_sketch[*setting, "svd-two-way", theirs]
            ratios = [float(svd[key]) / float(count[key]) for key in ERRORS]
            cells = [M, f"{int(d):,}", stage, f"{mine:g} d", f"{theirs:g} d", *(f"{ratio:.1f}" for ratio in ratios)]
            lines.append(
                "| " + " | ".join(map(str, [*cells, _better_for(ratios), _better_for([1 / x for x in ratios])])) + " |"
            )
    return "\n".join(lines)


def _better_for(ratios: Sequence[float]) -> str:
    """What a sketch estimates more accurately: G, λ (if both of its errors are smaller), both, or nothing.

    Args:
        ratios: the other sketch's errors divided by this one's, in the order of `ERRORS`.
    """
    gram, *weights = ratios
    return " and ".join(["G"] * (gram >= ADVANTAGE) + ["λ"] * (min(weights) >= ADVANTAGE)) or "nothing"


def _number(text: Any) -> float | None:
    return None if text in (None, "") else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two draws, 30 steps")
    parser.add_argument("--smallest", action="store_true", help="one setting, stage, draw and budget")
    parser.add_argument("--data", type=Path, help="directory with MNIST (and CIFAR-10 for --large)")
    parser.add_argument("--large", action="store_true", help="cifar10-mnist, 1.7 million parameters, instead")
    parser.add_argument("--steps", type=int, default=300, help="of SGD, between the two stages")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", type=Path, help="directory for jacobian.md and jacobian.csv")
    parser.add_argument("--verdict", type=Path, nargs="+", metavar="CSV", help="files of earlier calls to judge by")
    options = parser.parse_args()
    if options.verdict:
        print("\n\n".join(verdict(list(csv.DictReader(file.open()))) for file in options.verdict))
        return
    if options.large and not options.data:
        parser.error("--large needs --data")
    if options.quick:
        options.steps, options.draws = 30, 2
    if options.smallest:
        options.draws = 1
    torch.set_num_threads(1)
    what = task("cifar10-mnist" if options.large else "multi-mnist") if options.data else Synthetic()
    stages = [("initial", 0), (f"after {options.steps} steps", options.steps)][: 1 if options.smallest else None]
    budgets = [0.1] if options.smallest else [1.0, 0.1, 0.01]
    results: list[dict[str, Any]] = []
    pages = []
    with one_thread():
        for setting in islice(settings(what, options.data), 1 if options.smallest else None):
            for stage, steps in stages:
                setting.train(steps)
                rows = list(compare(setting, stage, budgets, options.draws))
                results += rows
                pages.append(f"## {setting.name}, M = {rows[0]['M']}, d = {rows[0]['d']:,}, {stage}\n\n{table(rows)}\n")
                if not options.json:
                    print(pages[-1], flush=True)
    if options.json:
        json.dump(results, sys.stdout)
        print()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "jacobian.md").write_text("\n".join(pages))
        with (options.out / "jacobian.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(results[0]))
            writer.writeheader()
            writer.writerows(results)


if __name__ == "__main__":
    main()
