"""Simulated clients spread over the processes and machines of a Ray cluster."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from federation.spec.computation import AtBase
from federation.tasks import Splits, task
from federation.training import TrainingDiverged, TrainingStopped
from federation.training.determinism import log_operations
from federation.work.base import Result, WorkError
from fedpareto.simulation import SimulationError
from fedpareto.simulation.local import LocalWork, Loop, Outcome, Serves, Stopped, Turn

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 10.0


class _Trainers:
    """Some of the clients, in a process of its own."""

    def __init__(
        self, name: str, splits: Mapping[str, Splits], device: str, serves: Serves | None, path: Sequence[str]
    ) -> None:
        import torch  # noqa: PLC0415 - in the actor's process

        sys.path += [entry for entry in path if entry not in sys.path]  # where the task's class may be
        torch.set_num_threads(1)
        self._loop = Loop(task(name), splits, device, serves)

    def ready(self) -> None:
        """Returns once the clients are loaded."""

    def compute(self, base: NDArray[np.float32], computations: dict[str, AtBase], seed: int, round_: int) -> "_Done":
        """Like `LocalWork.compute`."""
        outcomes = self._loop.compute(base, computations, Turn(seed, round_, lambda: False))
        return _Done(
            {
                name: outcome.step if isinstance(outcome, TrainingDiverged) else outcome
                for name, outcome in outcomes.items()
            },
            {name: self._loop.repeatable(name) for name in outcomes},
            self._loop.operations,
        )


@dataclass(frozen=True)
class _Done:
    """The work of one process.

    Attributes:
        outcomes: by client; for training that diverged, the step, since an exception would lose it.
        repeatable: by client.
        operations: those that had no deterministic kernel until now.
    """

    outcomes: Mapping[str, Result | WorkError | int]
    repeatable: Mapping[str, bool]
    operations: frozenset[str]


class RayWork(LocalWork):
    """Divides the clients among processes of the cluster, one for each free CPU, or GPU for training there.

    A cluster that this process is already connected to is used, and not shut down.

    Args:
        name: of the task, which every machine of the cluster must know.
        splits: the clients' data.
        device: "cpu" or "cuda"; Ray chooses the GPU of a process.
        address: of a running cluster; None starts one on this machine.
        serves: the objectives of each client; None for all.

    Raises:
        SimulationError: no such cluster, no GPU in it, or a machine of it that cannot train the task.
    """

    def __init__(
        self, name: str, splits: Mapping[str, Splits], device: str, address: str | None, serves: Serves | None = None
    ) -> None:
        self._serves, self._name, self._device = serves, name, device.partition(":")[0]
        self._repeatable: dict[str, bool] = {}  # by client, after its last work
        self._operations: frozenset[str] = frozenset()
        self._actors: list[Any] = []
        _CLUSTER.join(address)
        try:
            self._home = self._place(name, splits, self._device)
            _gather([actor.ready.remote() for actor in self._actors], lambda: False)
        except BaseException:
            self.close()
            raise

    def compute(self, base: NDArray[np.float32], computations: Mapping[str, AtBase], turn: Turn) -> dict[str, Outcome]:
        shared = ray.put(base)
        asked = []
        for index, actor in enumerate(self._actors):
            own = {name: computation for name, computation in computations.items() if self._home[name] == index}
            if own:
                asked.append(actor.compute.remote(shared, own, turn.seed, turn.round))
        outcomes: dict[str, Outcome] = {}
        for done in _gather(asked, turn.stopped):
            outcomes |= {
                name: TrainingDiverged(outcome) if isinstance(outcome, int) else outcome
                for name, outcome in done.outcomes.items()
            }
            self._repeatable |= done.repeatable
            if new := done.operations - self._operations:
                self._operations |= new
                log_operations(self._name, self._device, new)
        return {name: outcomes[name] for name in computations}

    def repeatable(self, client: str) -> bool:
        return self._repeatable.get(client, True)

    def close(self) -> None:
        """Ends the processes at once, and the cluster if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        _CLUSTER.leave()

    def _place(self, name: str, splits: Mapping[str, Splits], device: str) -> dict[str, int]:
        """Starts the processes. Returns the process of each client."""
        resources: dict[str, float] = ray.available_resources()
        kind = "GPU" if device == "cuda" else "CPU"
        free = int(resources.get(kind, 0))
        if free == 0 and device == "cuda":
            raise SimulationError("the Ray cluster has no free GPU: use --device cpu, or --backend stacked without Ray")
        count = max(1, min(len(splits), free))
        # Where none is free, another simulation of this process may have them: to wait for its end would last too long.
        actor: Any = ray.remote(num_cpus=kind == "CPU" and free > 0, num_gpus=kind == "GPU")(_Trainers)
        names = list(splits)
        for index in range(count):
            own = {client: splits[client] for client in names[index::count]}
            self._actors.append(actor.remote(name, own, device, self._serves, list(sys.path)))
        return {client: index % count for index, client in enumerate(names)}


class _Cluster:
    """The cluster to which this process is connected, for the simulations on its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users, self._started = 0, False

    def join(self, address: str | None) -> None:
        """Connects to a cluster, or starts one, unless this process has one. Raises SimulationError."""
        with self._lock:
            if self._users == 0:
                self._started = not ray.is_initialized()
                if self._started:
                    _connect(address)
            self._users += 1

    def leave(self) -> None:
        """Ends the connection with the last simulation, if the first one has made it."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._started:
                ray.shutdown()


_CLUSTER = _Cluster()


def _connect(address: str | None) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
    try:
        if address and "://" not in address and ":" in address:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()  # Ray itself would try for minutes
        # Without "local" Ray would join any cluster that happens to run on this machine.
        ray.init(address or "local", include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        problem = f"there is no Ray cluster at {address}" if address else "Ray does not start on this machine"
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SimulationError(f"{problem}: {cause}") from error


def _gather(asked: list[Any], stopped: Stopped) -> list[Any]:
    """Waits for the answers. If `stopped` returns true, it raises; unfinished work goes on until `RayWork.close`."""
    waiting = list(asked)
    try:
        while waiting:
            if stopped():
                raise TrainingStopped
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
        answers: list[Any] = ray.get(asked)
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, SimulationError):  # it names the client
            raise SimulationError(str(cause)) from error
        raise SimulationError(f"a process of the Ray cluster failed: {str(cause).splitlines()[-1]}") from error
    return answers
