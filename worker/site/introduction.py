"""A worker's description of itself for the coordinator: its tasks, the private rounds left, and its opening hours."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from federation.training.trainer import Trainer
from federation.v1.federation_pb2 import Hello, SessionsLeft, TaskOffer
from federation.work.site import Site
from worker import software
from worker.site.policy import Policy


@dataclass(frozen=True, eq=False)
class Introduction:
    """A site in the messages of its worker.

    Attributes:
        offers: the trainer of each task, by the task's name.
        device: a description of the devices.
        site: the owner's rules for private rounds, and the ledger of those that count.
        policy: the owner's policy.
    """

    offers: Mapping[str, Trainer]
    device: str
    site: Site
    policy: Policy

    def hello(self) -> Hello:
        """The first message of a stream, without its nonce."""
        tasks = [
            TaskOffer(
                task=name, samples=trainer.samples, objectives=trainer.objectives, abilities=sorted(trainer.abilities)
            )
            for name, trainer in self.offers.items()
        ]
        left = map(self._left, self.offers)
        return Hello(
            software=software(), device=self.device, tasks=tasks, sessions_left=left, consents=self.policy.decides
        )

    def left_beside(self, task: str) -> list[SessionsLeft]:
        """The private rounds that are left for each task that trains on the same data set as `task`."""
        return [self._left(name) for name in self.offers if name in self.site.tasks_beside(task)]

    def closed(self, now: datetime) -> datetime | None:
        """The time until which the site is closed, aware; None while it is open."""
        return self.policy.open.closed_until(now)

    def _left(self, task: str) -> SessionsLeft:
        training, evaluation = (
            self.site.sessions_left(task, evaluation=is_evaluation) for is_evaluation in (False, True)
        )
        return SessionsLeft(task=task, training=training, evaluation=evaluation)
