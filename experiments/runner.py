"""Runs the cells of an experiment, one after the other or several at once, each in a process of its own then."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnContext
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
        from simulation import SimulationError  # noqa: PLC0415
        from simulation.simulate import Simulation  # noqa: PLC0415

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
        waiting, children = list(jobs), list[_Child]()
        while any(child.job for child in children) or (waiting and not self._stopping):
            while waiting and not self._stopping and (child := self._idle(children, context, told)):
                child.begin(waiting.pop(0))
            if self._stopping:
                for child in children:
                    child.process.terminate()  # which it takes for a request to stop
            # Looked at before the queue: what a process that is gone has told is in the queue by then.
            gone = [child for child in children if not child.process.is_alive()]
            event = _next(told)
            if event is not None:
                tell(event)
                if event.kind != "round":
                    next(child for child in children if child.job == event.job).job = None
                continue
            for child in gone:
                children.remove(child)
                if child.job is not None:
                    kind: Kind = "stopped" if self._stopping else "failed"
                    tell(Event(child.job, kind, reason=f"its process ended with {child.process.exitcode}"))
        for child in children:
            child.end()

    def _idle(self, children: "list[_Child]", context: SpawnContext, told: Any) -> "_Child | None":
        """A child without a job: one that is there, for starting takes seconds, or a new one; None at the limit."""
        for child in children:
            if child.job is None and child.process.is_alive():
                return child
        if len(children) >= self._settings.parallel:
            return None
        children.append(_Child(context, self._store, self._settings, told))
        return children[-1]


class _Child:
    """A process that makes one run after the other.

    Attributes:
        job: what it is at; None when it waits.
        process: itself.
    """

    def __init__(self, context: SpawnContext, store: Store, settings: Settings, told: Any) -> None:
        self.job: Job | None = None
        self._jobs = context.SimpleQueue()
        self.process = context.Process(target=_work, args=(self._jobs, store, settings, told), daemon=True)
        self.process.start()

    def begin(self, job: Job) -> None:
        """Gives it a job."""
        self.job = job
        self._jobs.put(job)

    def end(self) -> None:
        """Lets it go."""
        self._jobs.put(None)
        self.process.join()


def _next(told: "multiprocessing.Queue[Event]") -> Event | None:
    try:
        return told.get(timeout=_LOOK_SECONDS)
    except Empty:
        return None


def _work(jobs: Any, store: Store, settings: Settings, told: Any) -> None:
    """What a child does: run after run, until it is told that there are no more or to stop."""
    runner = Runner(store, settings)
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    import torch  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.parallel))
    while not stopping.is_set() and (job := jobs.get()) is not None:
        told.put(runner.run_one(job, told.put))
