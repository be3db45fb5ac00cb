"""Runs the cells of an experiment, one after the other or several at once, each in a process of its own then."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, Literal

from experiments import measures, toml
from experiments.results import Job, Store

if TYPE_CHECKING:
    from simulation.simulate import Simulation

Kind = Literal["round", "finished", "failed", "stopped"]

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Settings:
    """How runs are made.

    Attributes:
        data: the directory of the data; None for tasks that bring it along.
        device: where clients train: "auto", "cpu", "cuda" or "cuda:N".
        backend: how: "auto", "stacked" or "loop".
        exclude_attackers: whether accuracies are those of honest clients only.
        parallel: runs at once.
    """

    data: Path | None = None
    device: str = "auto"
    backend: str = "auto"
    exclude_attackers: bool = False
    parallel: int = 1


@dataclass(frozen=True)
class Event:
    """What happened to a run.

    Attributes:
        kind: "round" when it has made progress, "finished", "failed", or "stopped" when `Runner.stop` was heeded.
        done: rounds that are over.
        reason: why it failed.
    """

    job: Job
    kind: Kind
    done: int = 0
    reason: str = ""


Tell = Callable[[Event], object]


class Runner:
    """Makes runs and stores what they come to.

    Args:
        store: where results go, and what an interrupted run needs to go on.
        settings: how runs are made.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._stopping = False
        self._current: Simulation | None = None

    def stop(self) -> None:
        """Ends `run` soon, from any thread or signal handler; finished runs are kept, others go on at the next call."""
        self._stopping = True
        if self._current is not None:
            self._current.stop()

    def run(self, jobs: Sequence[Job], tell: Tell) -> None:
        """Makes these runs, each from where it was interrupted.

        Args:
            jobs: the runs.
            tell: called with everything that happens.
        """
        if self._settings.parallel > 1:
            self._run_apart(jobs, tell)
            return
        for job in jobs:
            if self._stopping:
                return
            tell(self.run_one(job, tell))

    def run_one(self, job: Job, tell: Tell) -> Event:
        """Makes one run, in this process.

        Returns:
            How it ended.
        """
        workspace = self._store.workspace(job)
        try:
            with self._simulation(job, workspace) as self._current:
                if self._stopping:
                    self._current.stop()
                history = self._current.run(lambda progress: tell(Event(job, "round", progress.done)))
        except Exception as error:  # the other runs go on
            return Event(job, "failed", reason=f"{type(error).__name__}: {error}")
        finally:
            self._current = None
        done = len(history.round_records)
        if history.state == "PAUSED":
            return Event(job, "stopped", done)
        shutil.rmtree(workspace, ignore_errors=True)
        if history.state != "COMPLETED":
            reason = history.round_records[-1]["reason"] if done else ""
            return Event(job, "failed", done, f"the run ended {history.state}: {reason}")
        exclude = history.attackers if self._settings.exclude_attackers else ()
        self._store.keep(job, measures.final(history, exclude=exclude), measures.rounds(history, exclude=exclude))
        return Event(job, "finished", done)

    def _simulation(self, job: Job, workspace: Path) -> "Simulation":
        """The simulation that was interrupted, or else a new one."""
        from coordinator.home import HomeError  # noqa: PLC0415 - these load torch
        from simulation.simulate import Simulation, SimulationError  # noqa: PLC0415

        make = partial(
            Simulation,
            toml.dumps(job.given).encode(),
            workspace,
            data=self._settings.data,
            device=self._settings.device,
            backend=self._settings.backend,
        )
        if workspace.exists():
            try:
                return make(resume=True)
            except (HomeError, SimulationError):  # it ended before it had begun, or is of another specification
                shutil.rmtree(workspace)
        workspace.parent.mkdir(parents=True, exist_ok=True)
        return make(resume=False)

    def _run_apart(self, jobs: Sequence[Job], tell: Tell) -> None:
        context = multiprocessing.get_context("spawn")
        told: multiprocessing.Queue[Event] = context.Queue()
        waiting, running = list(jobs), dict[str, tuple[Job, SpawnProcess]]()
        while running or (waiting and not self._stopping):
            while waiting and len(running) < self._settings.parallel and not self._stopping:
                job = waiting.pop(0)
                process = context.Process(target=_child, args=(job, self._store, self._settings, told), daemon=True)
                process.start()
                running[job.name] = job, process
            if self._stopping:
                for _, process in running.values():
                    process.terminate()  # which the child takes for a request to stop
            # Looked at before the queue: what a process that is gone has told is in the queue by then.
            gone = [name for name, (_, process) in running.items() if not process.is_alive()]
            event = _next(told)
            if event is not None:
                tell(event)
                if event.kind != "round":
                    running.pop(event.job.name)[1].join()
                continue
            for name in gone:
                job, process = running.pop(name)
                kind: Kind = "stopped" if self._stopping else "failed"
                tell(Event(job, kind, reason=f"its process ended with {process.exitcode}"))


def _next(told: "multiprocessing.Queue[Event]") -> Event | None:
    try:
        return told.get(timeout=_LOOK_SECONDS)
    except Empty:
        return None


def _child(job: Job, store: Store, settings: Settings, told: Any) -> None:
    """One run in a process of its own."""
    runner = Runner(store, settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.stop())
    import torch  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.parallel))
    told.put(runner.run_one(job, told.put))
