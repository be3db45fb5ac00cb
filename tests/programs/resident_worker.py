"""A worker that does not train: it returns the same update for each assignment, or with "fresh" other ones.

    python tests/programs/resident_worker.py HOME PARAMETERS [fresh]

Certificate, stream, signatures, download, spool, upload and receipt are those of a usual worker.
"""

import random
import signal
import sys
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from federation.spec.computation import Computation, Measure
from federation.tasks import Task
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import Trainer
from federation.trust.member_files import MemberFiles
from federation.vectors import Vector
from federation.work.base import Result
from worker.events import Events
from worker.home import WorkerHome
from worker.service import Worker


class Nothing(Task):
    """A task with a model of this number of parameters."""

    def __init__(self, size: int) -> None:
        self.size = size

    def initial(self, seed: int) -> dict[str, Vector]:
        return {"weight": np.zeros(self.size, dtype=np.float32)}


class NoTraining(Trainer):
    """A trainer without model and data."""

    sizes = MappingProxyType({"train": 10, "validation": 0, "test": 10})

    def __init__(self, task: Nothing, seed: int, *, fresh: bool) -> None:
        super().__init__(task, None)
        self._fresh = fresh
        self._update = np.random.default_rng(seed).standard_normal(task.size, dtype=np.float32)

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        return model - self._update

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        return {"loss": 1.0, "accuracy": 0.5}

    def compute(self, base: Vector, computation: Computation, **_: Any) -> Result:
        if isinstance(computation, Measure):
            return Result({}, {}, {"test/accuracy": 0.5, "test/loss": 1.0, "train/loss": 1.0}, self.samples)
        if self._fresh:
            self._update = np.roll(self._update, 1)
        return Result({"loss": self._update}, {"loss": 1.0}, {"train/loss": 1.0}, self.samples)


def main() -> None:
    home = WorkerHome(Path(sys.argv[1]))
    member = MemberFiles.load(home.directory)
    fresh = "fresh" in sys.argv[3:]
    seed = zlib.crc32(member.client_id.encode()) if fresh else len(member.client_id)
    trainer = NoTraining(Nothing(int(sys.argv[2])), seed, fresh=fresh)
    worker = Worker(
        home=home,
        member=member,
        offers={"nothing": trainer},
        device="none",
        events=Events(sys.stdout),
        uniform=random.uniform,
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()


if __name__ == "__main__":
    main()
