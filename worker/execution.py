"""The work itself: an assignment, a model and this client's data become a result, which an attacker distorts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from federation.training.errors import TrainingStopped
from federation.training.trainer import Trainer
from federation.vectors import Vector
from federation.work.base import Client, Memory, Result
from federation.work.computation import Computation, Descend, Measure
from worker.assignments import Allowed, Order
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

    def client(self, order: Order, inputs: Mapping[str, memoryview], memory: Memory) -> Client:
        """This client, as an assignment's work sees it.

        Args:
            order: the checked assignment.
            inputs: the content of its inputs, by name.
            memory: of the attempt at the round.
        """
        manifest = order.manifest
        return Client(
            client_id=self.client_id,
            seed=manifest.seed,
            round=manifest.round,
            attempt=manifest.attempt,
            shape=order.shape,
            memory=memory,
            inputs=inputs,
        )

    def run(
        self,
        order: Order,
        client: Client,
        trainer: Trainer,
        needed: tuple[Computation, Vector] | None,
        *,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> Result:
        """Does what an assignment asks for.

        Args:
            order: the checked assignment.
            client: this one.
            trainer: of its task.
            needed: what the work computes, and the model that it starts from, (d,); None where it needs neither.
            progress: told the share of the computation that is done.
            stopped: asked before every step; True ends the work.

        Raises:
            WorkError: it cannot be done.
            TrainingDiverged: a weight or a loss is not finite.
            TrainingStopped: `stopped` said so.
        """
        computed = Result({}, {}, {}, trainer.samples)
        if needed is not None:
            computed = self._compute(order, trainer, *needed, progress, stopped)
        return order.work.answer(client, computed)

    def _compute(
        self,
        order: Order,
        trainer: Trainer,
        computation: Computation,
        base: Vector,
        progress: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> Result:
        """What this client's model and data come to, and what an attacker makes of it."""
        attacker, manifest = self.attacker, order.manifest
        if attacker is not None:
            attacker.see(manifest, base)
            if isinstance(computation, Descend):
                targets = attacker.attack.on_targets(computation.targets)
                computation = replace(computation, targets=targets, idle=not attacker.attack.trains)
        honest = trainer.compute(
            base,
            computation,
            seed=manifest.seed,
            round=manifest.round,
            client_id=self.client_id,
            progress=progress,
            stopped=stopped,
        )
        if attacker is None or isinstance(computation, Measure):
            return honest

        def pause(seconds: float) -> None:
            if self.wait(stopped, seconds):
                raise TrainingStopped

        return attacker.distort(manifest, honest, now=self.now(), pause=pause)
