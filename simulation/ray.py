"""Simulated clients spread over the processes and machines of a Ray cluster."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from federation.tasks import Splits, task
from federation.training import TrainingDiverged, TrainingStopped, TrainWork
from simulation.local import LocalWork, Loop, Outcome, Stopped

_POLL_SECONDS = 0.2


class _Trainers:
    """Some of the clients, in a process of its own."""

    def __init__(self, name: str, splits: Mapping[str, Splits], device: str, threads: int) -> None:
        import torch  # noqa: PLC0415 - in the actor's process

        torch.set_num_threads(threads)
        self._loop = Loop(task(name), splits, device)

    def train(
        self, base: NDArray[np.float32], work: TrainWork, clients: list[str], seed: int, round_: int
    ) -> dict[str, Outcome | int]:
        outcomes = self._loop.train(base, work, clients, seed=seed, round_=round_, stopped=lambda: False)
        return {name: one.step if isinstance(one, TrainingDiverged) else one for name, one in outcomes.items()}

    def evaluate(
        self, base: NDArray[np.float32], clients: list[str], splits: tuple[str, ...]
    ) -> dict[str, dict[str, float]]:
        return self._loop.evaluate(base, clients, splits, stopped=lambda: False)


class RayWork(LocalWork):
    """Every client lives in one of the cluster's processes, as many as it has CPUs (or GPUs, where clients use them).

    Args:
        name: of the task, which every machine of the cluster must know.
        splits: the clients' data; each part goes to its process once.
        device: "cpu", "cuda".
        address: of a cluster that runs; None starts one on this machine.
    """

    def __init__(self, name: str, splits: Mapping[str, Splits], device: str, address: str | None) -> None:
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(address=address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = int(resources.get("GPU", 0)) if device.startswith("cuda") else 0
        count = max(1, min(len(splits), gpus or int(resources.get("CPU", 1))))
        actor: Any = ray.remote(num_cpus=0 if gpus else 1, num_gpus=1 if gpus else 0)(_Trainers)
        names = list(splits)
        self._home = {client: index % count for index, client in enumerate(names)}
        self._actors: list[Any] = [
            actor.remote(name, {client: splits[client] for client in names[index::count]}, device, 1)
            for index in range(count)
        ]

    def train(
        self,
        base: NDArray[np.float32],
        work: TrainWork,
        clients: Sequence[str],
        *,
        seed: int,
        round_: int,
        stopped: Stopped,
    ) -> dict[str, Outcome]:
        """See the base."""
        shared = ray.put(base)
        asked = [actor.train.remote(shared, work, some, seed, round_) for actor, some in self._dealt(clients)]
        outcomes: dict[str, Outcome] = {}
        for part in _gather(asked, stopped):
            outcomes |= {name: TrainingDiverged(one) if isinstance(one, int) else one for name, one in part.items()}
        return outcomes

    def evaluate(
        self, base: NDArray[np.float32], clients: Sequence[str], splits: tuple[str, ...], *, stopped: Stopped
    ) -> dict[str, dict[str, float]]:
        """See the base."""
        shared = ray.put(base)
        asked = [actor.evaluate.remote(shared, some, splits) for actor, some in self._dealt(clients)]
        found: dict[str, dict[str, float]] = {}
        for part in _gather(asked, stopped):
            found |= part
        return {name: found[name] for name in clients}

    def close(self) -> None:
        """Ends the processes, and the cluster if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        if self._started:
            ray.shutdown()

    def _dealt(self, clients: Sequence[str]) -> list[tuple[Any, list[str]]]:
        dealt = [(actor, [name for name in clients if self._home[name] == at]) for at, actor in enumerate(self._actors)]
        return [(actor, some) for actor, some in dealt if some]


def _gather(asked: list[Any], stopped: Stopped) -> list[dict[str, Any]]:
    waiting = list(asked)
    while waiting:
        if stopped():
            for one in waiting:
                ray.cancel(one)
            raise TrainingStopped
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
    answers: list[dict[str, Any]] = ray.get(asked)
    return answers
