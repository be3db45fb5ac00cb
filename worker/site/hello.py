"""A worker's description of itself for the coordinator: its tasks, and the bounds of its owner."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from federation.spec.accounting import NoiseBudget
from federation.spec.computation import with_fixed
from federation.spec.run_spec import RUN_KINDS
from federation.task_layout import TaskLayout
from federation.training.trainer import Trainer
from federation.v1 import common_pb2, federation_pb2
from federation.v1.federation_pb2 import Hello, SessionsLeft, TaskOffer, WorkLimits
from federation.work.site import Site
from federation.work.work_bounds import LARGEST_BOUND
from worker import software
from worker.site.policy_file import Policy
from worker.status import OfferedTask


def _no_budget(_: str) -> None:
    """Of a site without rules for noise."""


@dataclass(frozen=True, eq=False)
class Introduction:
    """A site in the messages of its worker.

    Attributes:
        offers: the trainer of each task, by the task's name.
        device: a description of the devices.
        site: the owner's rules for private rounds, and the ledger of those that count.
        policy: the owner's policy.
        budget: gives the owner's noise and budget for a task; None where there is none.
    """

    offers: Mapping[str, Trainer]
    device: str
    site: Site
    policy: Policy
    budget: Callable[[str], NoiseBudget | None] = _no_budget
    _told: dict[str, frozenset[str]] = field(default_factory=dict, init=False)  # the abilities in the last hello
    _sizes: dict[str, OfferedTask] = field(default_factory=dict, init=False)  # in the last hello

    def hello(self) -> Hello:
        """The first message of a stream, without its nonce."""
        self._told.update({name: trainer.abilities for name, trainer in self.offers.items()})
        return Hello(
            software=software(),
            device=self.device,
            tasks=map(self._offer, self.offers),
            sessions_left=map(self._left, self.offers),
            consents=self.policy.decides,
            run_kinds=RUN_KINDS,
            limits=WorkLimits(**asdict(self.policy.limits.bounds)),
        )

    @property
    def offered(self) -> tuple[OfferedTask, ...]:
        """The sizes of the tasks in the last hello; empty before the first."""
        return tuple(self._sizes.values())

    @property
    def outdated(self) -> bool:
        """True if a trainer has other abilities than the last hello told, as its work may have shown."""
        return any(self.offers[name].abilities != told for name, told in self._told.items())

    def left_beside(self, task: str) -> list[SessionsLeft]:
        """The private rounds that are left for each task that trains on the same data set as `task`."""
        return [self._left(name) for name in self.offers if name in self.site.tasks_beside(task)]

    def _offer(self, task: str) -> TaskOffer:
        trainer = self.offers[task]
        self._sizes[task] = OfferedTask(task, trainer.layout.size, len(trainer.objectives))
        return TaskOffer(
            task=task,
            samples=0 if trainer.unfit else trainer.samples,  # no training or evaluation asks a client without samples
            objectives=trainer.objectives,
            abilities=sorted(with_fixed(trainer.abilities)),
            layout=common_pb2.TaskLayout(**asdict(TaskLayout.of(trainer.layout, trainer.buffers))),
            private_only=self.site.policy(task).required,
            noise_budget=self._budget(task),
        )

    def _budget(self, task: str) -> federation_pb2.NoiseBudget | None:
        budget = self.budget(task)
        return None if budget is None else federation_pb2.NoiseBudget(**asdict(budget))

    def _left(self, task: str) -> SessionsLeft:
        training, evaluation = (
            min(self.site.sessions_left(task, evaluation=is_evaluation), LARGEST_BOUND)
            for is_evaluation in (False, True)
        )
        return SessionsLeft(task=task, training=training, evaluation=evaluation)
