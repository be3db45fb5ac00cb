"""The work itself: an assignment, a model and this client's data become a result, which an attacker distorts."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from federation.sketches.asked import jacobian_of, second_leg, sketch_of
from federation.sketches.base import Message
from federation.sketches.seeds import own_seed, shared_seed
from federation.training import Trainer, TrainingStopped, TrainResult, TrainWork
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import Vector
from worker.assignments import Allowed, targets_of
from worker.attacker import Attacker


@dataclass(frozen=True, eq=False)
class Offer:
    """A task that the owner allowed, with everything ready to work on it.

    Attributes:
        allowed: what assignments are checked against.
        trainer: holds the model and this client's data.
    """

    allowed: Allowed
    trainer: Trainer


@dataclass(frozen=True, eq=False)
class Execution:
    """Does the work of one client.

    Attributes:
        client_id: who we are.
        attacker: what turns results into an attack; None for an honest member.
        now: the time by the coordinator's clock.
        wait: waits until a condition holds, at most so many seconds; whether it holds.
    """

    client_id: str
    attacker: Attacker | None
    now: Callable[[], datetime]
    wait: Callable[[Callable[[], bool], float], bool]

    def run(
        self,
        manifest: AssignmentManifest,
        offer: Offer,
        base: Vector,
        reference: Message,
        *,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> TrainResult:
        """Trains, evaluates or differentiates.

        Args:
            manifest: a checked assignment.
            offer: the task.
            base: the model to start from, (d,).
            reference: what all clients' sketches add up to; empty for work that does not need it.
            progress: told the share of training that is done.
            stopped: asked before every step; True ends the work.

        Raises:
            TrainingDiverged: a weight or a loss is not finite.
            TrainingStopped: `stopped` said so.
        """
        trainer = offer.trainer
        kind = manifest.WhichOneof("work")
        attacker = self.attacker
        if attacker is not None:
            attacker.see(manifest, base)
        if kind == "evaluate":
            began = time.perf_counter()
            metrics = trainer.evaluate(base, tuple(manifest.evaluate.splits), stopped=stopped)
            return TrainResult({}, {}, metrics, trainer.samples, time.perf_counter() - began)

        if kind in ("jacobian", "residual"):
            return self._gradients(manifest, offer, base, reference, stopped)
        targets = targets_of(manifest.train, offer.allowed.serves)
        if attacker is not None and not attacker.attack.trains:
            idle = trainer.idle(base, rows=tuple(targets), stopped=stopped)
            return self._distort(attacker, manifest, idle, stopped)
        result = trainer.train(
            base,
            TrainWork.of(manifest.train),
            seed=manifest.seed,
            round=manifest.round,
            client_id=self.client_id,
            targets=targets,
            from_jacobian=manifest.train.from_jacobian,
            measure=not manifest.train.unmeasured,
            progress=progress,
            stopped=stopped,
        )
        return result if attacker is None else self._distort(attacker, manifest, result, stopped)

    def _gradients(
        self,
        manifest: AssignmentManifest,
        offer: Offer,
        base: Vector,
        reference: Message,
        stopped: Callable[[], bool],
    ) -> TrainResult:
        """The sketch of the gradients at the base model; or what it lost, where there is a reference."""
        second = manifest.WhichOneof("work") == "residual"
        asked = manifest.residual.jacobian if second else manifest.jacobian
        client, layout = self.client_id, offer.allowed.layout
        result = offer.trainer.jacobian(
            base,
            TrainWork(steps=1, batch_size=asked.batch_size, learning_rate=1.0),
            seed=manifest.seed,
            round=manifest.round,
            client_id=client,
            measure=asked.measure and not second,
            stopped=stopped,
        )
        if self.attacker is not None:
            result = self._distort(self.attacker, manifest, result, stopped)
        made = sketch_of(asked, layout, offer.allowed.objectives)
        A = jacobian_of({name: result.rows[name] for name in asked.objectives}, asked, layout)
        rows = made.compress(
            A,
            shared_seed=shared_seed(manifest.seed, manifest.round),
            own_seed=own_seed(manifest.seed, manifest.round, client),
        )
        if second:
            rows = second_leg(made).residual(A, rows, reference, tuple(manifest.residual.objectives))
        return replace(result, rows=rows)

    def _distort(
        self, attacker: Attacker, manifest: AssignmentManifest, honest: TrainResult, stopped: Callable[[], bool]
    ) -> TrainResult:
        def pause(seconds: float) -> None:
            if self.wait(stopped, seconds):
                raise TrainingStopped

        return attacker.distort(manifest, honest, now=self.now(), pause=pause)
