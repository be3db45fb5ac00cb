"""A worker that does not train: it returns the same update for each assignment.

    python benchmarks/resident_worker.py HOME PARAMETERS

Certificate, stream, signatures, download, spool, upload and receipt are those of a usual worker.
"""

import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from federation.member_files import MemberFiles
from federation.training.trainer import Trainer
from federation.vectors import Layout, Tensor, Vector
from federation.work.base import Result, Shape
from federation.work.computation import Computation, Measure
from worker.events import Events
from worker.home import Home
from worker.service import Worker


class NoTraining(Trainer):
    """A trainer without model and data."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.objectives, self.samples = layout, ("loss",), 10
        self.shape = Shape(layout, self.objectives, self.objectives)
        self._update = np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)

    def compute(self, base: Vector, computation: Computation, **_: Any) -> Result:
        if isinstance(computation, Measure):
            return Result({}, {}, {"test/accuracy": 0.5, "test/loss": 1.0, "train/loss": 1.0}, self.samples)
        return Result({"loss": self._update}, {"loss": 1.0}, {"train/loss": 1.0}, self.samples)


def main() -> None:
    home = Home(Path(sys.argv[1]))
    layout = Layout((Tensor("weight", (int(sys.argv[2]),)),))
    member = MemberFiles.load(home.directory)
    trainer = NoTraining(layout, seed=len(member.client_id))
    worker = Worker(
        home=home,
        member=member,
        offers={"nothing": trainer},
        device="none",
        events=Events(),
        uniform=random.uniform,
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()


if __name__ == "__main__":
    main()
