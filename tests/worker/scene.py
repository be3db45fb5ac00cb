"""A worker in this process, and a scripted coordinator that it serves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.spec.computation import LocalSgd
from federation.spec.objective_names import Targets
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.trainer import Trainer
from federation.vectors import Layout, to_bytes
from federation.work.base import Result
from tests.scripted import CLIENT, ScriptedCoordinator, scripted
from tests.trained import train
from tests.worker.working import Running
from worker.home import WorkerHome
from worker.service import prepare_offers

SOURCE = DataSource(part=Part(0, 8))


@pytest.fixture(scope="module")
def offers() -> dict[str, Trainer]:
    return prepare_offers(["digits"], SOURCE, device="cpu", threads=1)[0]


@pytest.fixture(scope="module")
def model() -> tuple[Layout, bytes]:
    layout, vector = initial_model(task("digits"), 3)
    return layout, to_bytes(layout, vector)


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    with scripted() as made:
        yield made


Start = Callable[..., Running]


@pytest.fixture
def start(coordinator: ScriptedCoordinator, offers: dict[str, Trainer], tmp_path: Path) -> Iterator[Start]:
    """Starts workers, all with one membership and one home."""
    member = coordinator.member()
    started: list[Running] = []

    def run(**options: Any) -> Running:
        made = Running(WorkerHome(tmp_path / "home"), options.pop("member", member), offers, **options)
        started.append(made)
        return made

    yield run
    for running in started:
        running.stop()


def trained(
    trainer: Trainer,
    model: tuple[Layout, bytes],
    *,
    steps: int = 1,
    round_: int = 0,
    targets: Targets | None = None,
) -> Result:
    """What a worker's training on the scripted coordinator's assignment gives."""
    layout, data = model
    base = np.frombuffer(data[len(layout.header) :], dtype=np.float32)
    work = LocalSgd(steps=steps, batch_size=10, learning_rate=0.1)
    return train(trainer, base, work, seed=7, round=round_, client_id=CLIENT, targets=targets)
