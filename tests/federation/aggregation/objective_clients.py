"""Clients of rules over several objectives, answered without an engine."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds import signed_results
from federation.aggregation import phases
from federation.aggregation.metrics.step_metrics import of_objectives
from federation.aggregation.phase_kinds import GradientsPhase, ResidualsPhase, TrainingPhase
from federation.sketches import sketch
from federation.sketches.draws import own_seed, shared_seed
from federation.sketches.svd import TwoWaySvd
from federation.spec.objective_names import encoder_columns
from federation.vectors import Layout, Tensor
from storage.records import ObjectivesRecord
from tests.federation.aggregation.scene import last

D = 60
LAYOUT = Layout((Tensor("body.weight", (5, 10)), Tensor("heads.left.bias", (4,)), Tensor("heads.right.bias", (6,))))
TWO = ("left", "right")


def context(
    clients: Mapping[str, tuple[str, ...]], *, objectives: tuple[str, ...] = TWO, **changed: Any
) -> phases.RoundContext:
    facts: dict[str, Any] = {
        "number": 0,
        "total": 10,
        "objectives": objectives,
        "parameters": D,
        "encoder": encoder_columns(LAYOUT),
        "selected": {name: phases.Selected(10 * (at + 1), served) for at, (name, served) in enumerate(clients.items())},
    }
    return phases.RoundContext(**(facts | changed))


def reply(
    client: str, rows: Mapping[str, NDArray[Any]], served: tuple[str, ...] = TWO, **changed: Any
) -> phases.PhaseReply:
    facts: dict[str, Any] = {"samples": 10, "losses": {}, "metrics": {}, "envelope": f"envelope of {client}"}
    return phases.PhaseReply(
        client_id=client, rows=tuple(rows.values()), names=tuple(rows), objectives=served, **(facts | changed)
    )


class Clients:
    """Made-up clients, each with a gradient for each of its objectives, that answer what they are asked."""

    def __init__(self, serves: Mapping[str, tuple[str, ...]], losses: Mapping[str, float] | None = None) -> None:
        rng = np.random.default_rng(len(serves))
        common = rng.standard_normal(D)
        self.serves = serves
        self.losses = losses or {}
        self.gradients = {
            (client, name): (common + 2 * rng.standard_normal(D)).astype(np.float32)
            for client, served in serves.items()
            for name in served
        }

    def answer(self, phase: phases.AlgorithmPhase, number: int = 0, missing: tuple[str, ...] = ()) -> phases.Replies:
        asked = self.serves if phase.clients is None else phase.clients
        return phases.Replies([self._reply(phase, name, number) for name in asked if name not in missing])

    def begin(self, conversation: phases.RoundGenerator) -> TrainingPhase:
        """What they are asked to train, once all of them have answered what was asked before."""
        phase = next(conversation)
        while not isinstance(phase, TrainingPhase):
            phase = conversation.send(self.answer(phase))
        return phase

    def play(self, conversation: phases.RoundGenerator) -> phases.Step:
        """The step of a round in which all of them answer what they are asked."""
        return last(conversation, self.answer(self.begin(conversation)))

    def _reply(self, phase: phases.AlgorithmPhase, client: str, number: int) -> phases.PhaseReply:
        served = self.serves[client]
        if isinstance(phase, TrainingPhase):
            sums = {
                row: sum((value * self.gradients[client, name] for name, value in weights.items()), np.zeros(D))
                for row, weights in phase.targets(served).items()
            }
            rows: Mapping[str, NDArray[np.float32]] = {row: value.astype(np.float32) for row, value in sums.items()}
        else:
            assert isinstance(phase, GradientsPhase | ResidualsPhase)
            asked = phase if isinstance(phase, GradientsPhase) else phase.gradients
            columns = encoder_columns(LAYOUT) if asked.encoder_only else (slice(0, D),)
            A = np.stack([np.concatenate([self.gradients[client, n][c] for c in columns]) for n in served])
            made = sketch(asked.sketch, d=A.shape[1], objectives=TWO, budget=asked.budget)
            rows = made.compress(A, shared_seed=shared_seed(0, number), own_seed=own_seed(0, number, client))
            if isinstance(phase, ResidualsPhase):
                assert isinstance(made, TwoWaySvd)
                rows = made.residual(A, rows, phase.reference, phase.objectives)
        losses = {name: self.losses[name] for name in served if name in self.losses}
        return reply(client, rows, served, losses=losses)

    def mean(self, name: str) -> NDArray[np.float64]:
        own = [self.gradients[client, name] for client, served in self.serves.items() if name in served]
        return np.asarray(np.mean(own, axis=0, dtype=np.float64))


def recorded(step: phases.Step, names: tuple[str, ...]) -> tuple[ObjectivesRecord, dict[str, float]]:
    """What is on record of the objectives of a step, and its metrics."""
    known = signed_results.objectives(step, names)
    assert known is not None
    return known, of_objectives(step.combination.objectives)


ALL = dict.fromkeys(("ann", "ben", "cleo"), TWO)
SOME = {"ann": TWO, "ben": ("left",), "cleo": ("right",), "dan": ("left",)}
