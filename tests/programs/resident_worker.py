"""A worker that does not train: it returns the same update for each assignment.

    python tests/programs/resident_worker.py HOME PARAMETERS [fresh | repeatable]

With "fresh" it returns another update each time. With "repeatable" the update follows from the client, the round and
the model, so that work that is done again gives the same bytes, as with a trainer; members' updates are of very
different lengths, so that a sum in another order gives other bytes.

Certificate, stream, policy, signatures, download, spool, upload, receipt and `/metrics` are those of a usual worker.
"""

import random
import signal
import sys
import zlib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from federation.monitoring.events import Events
from federation.spec.computation import Computation, Measure
from federation.tasks import Task
from federation.training.plans import EvaluationPlan, TrainingPlan
from federation.training.trainer import Trainer
from federation.trust.member_files import MemberFiles
from federation.vectors import Vector
from federation.work.base import Result
from worker.config import WorkerConfig
from worker.event_counts import serving_counts
from worker.home import WorkerHome
from worker.service import Worker
from worker.site.policy_file import Policy


class Nothing(Task):
    """A task with a model of this number of parameters."""

    def __init__(self, size: int) -> None:
        self.size = size

    def initial(self, seed: int) -> dict[str, Vector]:
        return {"weight": np.zeros(self.size, dtype=np.float32)}


class NoTraining(Trainer):
    """A trainer without model and data."""

    sizes = MappingProxyType({"train": 10, "validation": 0, "test": 10})

    def __init__(self, task: Nothing, seed: int, mode: str) -> None:
        super().__init__(task, None)
        self._mode = mode
        self._update = np.random.default_rng(seed).standard_normal(task.size, dtype=np.float32)

    def train(self, model: Vector, plan: TrainingPlan) -> Vector:
        return model - self._update

    def evaluate(self, model: Vector, plan: EvaluationPlan) -> dict[str, float]:
        return {"loss": 1.0, "accuracy": 0.5}

    def compute(self, base: Vector, computation: Computation, **asked: Any) -> Result:
        if isinstance(computation, Measure):
            return Result({}, {}, {"test/accuracy": 0.5, "test/loss": 1.0, "train/loss": 1.0}, self.samples)
        if self._mode == "fresh":
            self._update = np.roll(self._update, 1)
        if self._mode == "repeatable":
            self._update = repeatable_update(asked["client_id"], asked["round"], base)
        return Result({"loss": self._update}, {"loss": 1.0}, {"train/loss": 1.0}, self.samples)


def repeatable_update(client_id: str, number: int, base: Vector) -> Vector:
    """The update of a client in a round, float32, as long as the model."""
    name = f"{client_id}/{number}".encode()
    drawn = np.random.default_rng([zlib.crc32(name), zlib.crc32(base.tobytes())])
    return drawn.standard_normal(base.size, dtype=np.float32) * np.float32(10.0 ** (zlib.crc32(name) % 3 - 1))


def main() -> None:
    home = WorkerHome(Path(sys.argv[1]))
    with home.lock():
        work(home)


def work(home: WorkerHome) -> None:
    """Works until SIGTERM."""
    member = MemberFiles.load(home.directory)
    mode = "".join(sys.argv[3:])
    seed = zlib.crc32(member.client_id.encode()) if mode == "fresh" else len(member.client_id)
    trainer = NoTraining(Nothing(int(sys.argv[2])), seed, mode)
    events = Events(sys.stdout, home.directories)
    worker = Worker(
        home=home,
        member=member,
        offers={"nothing": trainer},
        device="none",
        events=events,
        uniform=random.uniform,
        policy=Policy.load(home.policy),
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    file = home.directory / "worker.toml"
    site = WorkerConfig.load(file) if file.exists() else WorkerConfig.default()
    with serving_counts(site.metrics, events):
        worker.run()


if __name__ == "__main__":
    main()
