"""Compresses the stochastic Jacobians of clients, and compares what a server estimates from them with the truth.

Every run of a seed has the same data, model and minibatches, so that sketches are compared on the same Jacobians.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from compressors.specification import CompressorSpecification
from federation.aggregation.qp import min_norm
from federation.aggregation.rules.find_weights import find_weights
from federation.sketches import sketch
from federation.sketches.base import ClientSketch, Sketch, clip_to_psd
from federation.sketches.draws import own_seed, shared_seed
from federation.sketches.svd import TwoWaySvd
from federation.spec.objective_names import HEADS
from federation.spec.part import Part
from federation.tasks import DataSource, task
from federation.tasks.parameters import build
from federation.tasks.partition import deal_all
from fedpareto.experiments.result_store import Measures

Jacobian = NDArray[np.float32]
_CLASSES = 10


@dataclass(frozen=True)
class _Federation:
    """A model with its objectives, and its clients' training data."""

    model: nn.Module
    objectives: tuple[str, ...]
    losses: Callable[[Any, Tensor], list[Tensor]]
    data: list[tuple[Tensor, Tensor]]
    batch: int

    @property
    def encoder(self) -> list[Tensor]:
        return [values for name, values in self.model.named_parameters() if not name.startswith(HEADS)]

    def minibatch(self, client: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        x, y = self.data[client]
        chosen = torch.from_numpy(random.permutation(len(y))[: self.batch])
        return x[chosen], y[chosen]

    def jacobians(self, seed: int) -> list[Jacobian]:
        """The stochastic Jacobian of each client, (M, d) over the encoder: one minibatch for all objectives."""
        random, found = np.random.default_rng(seed), []
        torch.manual_seed(seed)
        for client in range(len(self.data)):
            x, y = self.minibatch(client, random)
            rows = [
                torch.autograd.grad(loss, self.encoder, retain_graph=True) for loss in self.losses(self.model(x), y)
            ]
            found.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows]).numpy())
        return found

    def train(self, steps: int, rate: float, seed: int) -> None:
        """Minibatches of the clients in turn, on the mean of the objectives."""
        random, optimiser = np.random.default_rng(seed), torch.optim.SGD(self.model.parameters(), lr=rate)
        for step in range(steps):
            x, y = self.minibatch(step % len(self.data), random)
            optimiser.zero_grad()
            torch.stack(self.losses(self.model(x), y)).mean().backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def measure(specification: CompressorSpecification, data: Path | None) -> tuple[Measures, list[Measures]]:
    """The errors of a sketch, means over the draws, and a row for each draw (`round`, from 1).

    Returns:
        `nrmse`, ||Ghat - G|| / ||G|| (Frobenius), with G of the uncompressed Jacobians (FedCMOO, table 3);
        `weights/min-norm` and `weights/findweights`, the l1 distance of the weights from Ghat to those from G;
        `excess`, by how much the direction with the min-norm weights of Ghat is longer than the shortest one (%);
        `upload/d`, floats that a client sends, in both legs, for each column of the Jacobian; `d`; `client_ms`, the
        processor time of a client for a sketch; `seconds`.

    Raises:
        ValueError: the task has one objective only.
    """
    began = time.perf_counter()
    federation = _federation(specification, data)
    torch.manual_seed(specification.seed)
    federation.train(specification.steps, specification.learning_rate, specification.seed)
    rows = list[Measures]()
    for draw in range(specification.rounds):
        jacobians = federation.jacobians(shared_seed(specification.seed, draw) % 2**31)
        kind = sketch(
            specification.sketch,
            d=jacobians[0].shape[1],
            objectives=federation.objectives,
            budget=specification.budget,
        )
        rows.append({"round": draw + 1.0, **_errors(kind, jacobians, specification.seed, draw)})
    final = {name: float(np.mean([row[name] for row in rows])) for name in rows[0] if name != "round"}
    return {**final, "seconds": time.perf_counter() - began}, rows


def _federation(specification: CompressorSpecification, data: Path | None) -> _Federation:
    what = task(specification.task)
    if len(what.objectives) < 2:
        raise ValueError(f"task {what.name} has one objective: a Gram matrix needs several")
    part = Part(0, specification.clients, specification.partition, specification.seed)
    clients = [(own.train.x, own.train.y) for own in deal_all(what.pool(DataSource(data)), part)]
    torch.manual_seed(specification.seed)
    model = build(what).train()
    if not specification.classes:
        names = tuple(what.objectives)
        return _Federation(
            model, names, lambda output, y: list(what.losses(output, y).values()), clients, specification.batch
        )

    def each_against_the_rest(output: Any, y: Tensor) -> list[Tensor]:
        logits = output[what.objectives[0]]
        return [binary_cross_entropy_with_logits(logits[:, k], (y[:, 0] == k).float()) for k in range(_CLASSES)]

    names = tuple(f"class-{k}" for k in range(_CLASSES))
    return _Federation(model, names, each_against_the_rest, clients, specification.batch)


def _errors(kind: Sketch, jacobians: list[Jacobian], seed: int, draw: int) -> Measures:
    names, shared = kind.objectives, shared_seed(seed, draw)
    weights = np.full(len(names), 1 / len(jacobians))
    mean = np.mean([A.astype(np.float64) for A in jacobians], axis=0)
    G = mean @ mean.T
    began = time.process_time()
    sketches = [
        ClientSketch(names, weights, kind.compress(A, shared_seed=shared, own_seed=own_seed(seed, draw, str(client))))
        for client, A in enumerate(jacobians)
    ]
    spent = time.process_time() - began
    if isinstance(kind, TwoWaySvd):
        reference = kind.reference(sketches, names, shared_seed=shared, own_seed=own_seed(seed, draw, ""))
        began = time.process_time()
        sketches = [
            ClientSketch(names, weights, {**own.rows, **kind.residual(A, own.rows, reference, names)})
            for A, own in zip(jacobians, sketches, strict=True)
        ]
        spent += time.process_time() - began
    found = kind.gram(sketches, names, shared_seed=shared)
    exact, estimated = min_norm(G).weights, min_norm(clip_to_psd(found)).weights
    uniform = np.full(len(names), 1 / len(names))
    return {
        "nrmse": float(np.linalg.norm(found - G) / np.linalg.norm(G)),
        "weights/min-norm": float(np.abs(estimated - exact).sum()),
        "weights/findweights": float(np.abs(find_weights(found, uniform) - find_weights(G, uniform)).sum()),
        "excess": 100 * (float(np.sqrt((estimated @ G @ estimated) / (exact @ G @ exact))) - 1),
        "upload/d": sum(len(row) for row in sketches[0].rows.values()) / jacobians[0].shape[1],
        "d": float(jacobians[0].shape[1]),
        "client_ms": 1e3 * spent / len(jacobians),
    }
