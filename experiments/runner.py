"""Runs the cells of an experiment, one after the other or several at once, each in a process of its own then."""

import multiprocessing
import os
import shutil
import signal
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from experiments import measures, record
from experiments.results import Job, Store, difference

if TYPE_CHECKING:
    from simulation.history import History
    from simulation.simulate import Simulation

Kind = Literal["round", "finished", "failed", "stopped"]

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Settings:
    """How runs are made.

    Attributes:
        data: the directory of the data; None for tasks that bring it along.
        device: where clients train: "auto", "cpu", "cuda" or "cuda:N".
        backend: how: "auto", "stacked", "loop", "compiled" or "ray".
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
        goes_on = _is_under_way(workspace)
        try:
            with self._simulation(job, workspace, goes_on) as self._current:
                if self._stopping:
                    self._current.stop()
                history = self._current.run(lambda progress: tell(Event(job, "round", progress.done)))
            return self._ended(job, workspace, history)
        except Exception as error:  # the other runs go on
            return Event(job, "failed", reason=_why(error, workspace, goes_on))
        finally:
            self._current = None

    def _ended(self, job: Job, workspace: Path, history: "History") -> Event:
        done = len(history.round_records)
        if history.state == "PAUSED":
            return Event(job, "stopped", done)
        if history.state != "COMPLETED":  # and whoever wonders why finds the record in the workspace
            reason = f"the run ended {history.state}: {history.reason}{_refusals(history)}"
            return Event(job, "failed", done, f"{reason}; its record is in {workspace}, --anew makes it again")
        exclude = history.attackers if self._settings.exclude_attackers else ()
        self._store.keep(job, measures.final(history, exclude=exclude), measures.rounds(history, exclude=exclude))
        shutil.rmtree(workspace, ignore_errors=True)
        return Event(job, "finished", done)

    def _simulation(self, job: Job, workspace: Path, goes_on: bool) -> "Simulation":
        """The simulation that was interrupted, or else a new one."""
        from coordinator.ownership import HomeError  # noqa: PLC0415 - these load torch
        from simulation.simulate import Simulation  # noqa: PLC0415

        text = tomli_w.dumps(job.given).encode()
        if not goes_on:  # what is there ended before it had begun
            shutil.rmtree(workspace, ignore_errors=True)
            workspace.parent.mkdir(parents=True, exist_ok=True)
        elif begun := _begun(workspace):
            if other := difference(begun[1], job.given, job.given):
                raise HomeError(f"it is of another specification: {other}")
            text = begun[0]  # to the letter
        return Simulation(
            text,
            workspace,
            data=self._settings.data,
            device=self._settings.device,
            backend=self._settings.backend,
            resume=goes_on,
        )

    def _run_apart(self, jobs: Sequence[Job], tell: Tell) -> None:
        context = _context()
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

    def _idle(self, children: "list[_Child]", context: ForkServerContext | SpawnContext, told: Any) -> "_Child | None":
        """A child without a job: one that is there, for starting takes seconds, or a new one; None at the limit."""
        for child in children:
            if child.job is None and child.process.is_alive():
                return child
        if len(children) >= self._settings.parallel:
            return None
        children.append(_Child(context, self._store, self._settings, told))
        return children[-1]


def other(store: Store, job: Job) -> str:
    """How the specification of what is there of a run, finished or under way, differs; empty when it does not."""
    if store.find(job) is not None:
        return ""
    begun = _begun(store.workspace(job))
    return store.other(job) or (difference(begun[1], job.given, job.given) if begun else "")


def forget(store: Store, jobs: Sequence[Job]) -> None:
    """Removes these runs, finished or under way; none of them if another process is making one.

    Raises:
        DatabaseBusy: another process is making one of the runs; the message names the process.
    """
    from coordinator.home import Home  # noqa: PLC0415
    from coordinator.ownership import HomeError  # noqa: PLC0415
    from storage.database import Database  # noqa: PLC0415

    with ExitStack() as held:
        for workspace in filter(_is_under_way, map(store.workspace, jobs)):
            with suppress(HomeError, OSError, ValueError):  # damaged: no process is making it
                database = Database.open(Home.load(workspace).database_url, durable=False)
                held.callback(database.close)
                database.lock_exclusive()
        record.forget(store, jobs)
        for job in jobs:
            store.forget(job)


def _is_under_way(workspace: Path) -> bool:
    from coordinator.home import SETTINGS_FILE  # noqa: PLC0415

    return (workspace / SETTINGS_FILE).exists()


def _begun(workspace: Path) -> tuple[bytes, dict[str, Any]] | None:
    """The specification of the run in a workspace, as text and document; None when there is none, or it is damaged."""
    from sqlalchemy import select  # noqa: PLC0415
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    from coordinator.home import Home  # noqa: PLC0415
    from storage.models import Run  # noqa: PLC0415

    if not _is_under_way(workspace):
        return None
    try:
        database = Home.load(workspace).open_database(durable=False)
        try:
            with database.read() as session:
                text = session.scalar(select(Run.spec).order_by(Run.created.desc()).limit(1))
        finally:
            database.close()
        return None if text is None else (text, tomllib.loads(text.decode()))
    except (OSError, ValueError, SQLAlchemyError):
        return None


def _why(error: Exception, workspace: Path, goes_on: bool) -> str:
    """Why a run failed, in a line."""
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    from coordinator.ownership import HomeError  # noqa: PLC0415
    from federation.keys import IdentityError  # noqa: PLC0415
    from federation.refusals import Refusal  # noqa: PLC0415
    from storage.blobs import BlobCorrupt, BlobMissing  # noqa: PLC0415
    from storage.database import DatabaseBusy  # noqa: PLC0415

    if isinstance(error, DatabaseBusy):
        return f"another process is making this run, in {workspace}"
    said = str(error).partition("\n")[0].partition(" (Background on this error")[0]
    damage = (SQLAlchemyError, HomeError, IdentityError, BlobCorrupt, BlobMissing, Refusal)
    of_file = isinstance(error, OSError) and str(error.filename).startswith(str(workspace))
    if goes_on and (of_file or isinstance(error, damage)):
        return f"the interrupted run in {workspace} cannot be used ({said}): --anew makes it again"
    return f"{type(error).__name__}: {said}"


def _refusals(history: "History") -> str:
    """The most frequent reason for which updates were not accepted; empty when all were."""
    refused = [record for record in history.update_records if not record["accepted"]]
    if not refused:
        return ""
    reasons = Counter(record["reason"] or "without a reason" for record in refused)
    return f"; {len(refused)} of {len(history.update_records)} updates not accepted: {reasons.most_common(1)[0][0]}"


def _context() -> ForkServerContext | SpawnContext:
    """Makes processes: forks of one that has imported PyTorch, which takes seconds, where the system has forks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["simulation.simulate", "torch"])
    return context


class _Child:
    """A process that makes one run after the other.

    Attributes:
        job: what it is at; None when it waits.
        process: itself.
    """

    def __init__(self, context: ForkServerContext | SpawnContext, store: Store, settings: Settings, told: Any) -> None:
        self.job: Job | None = None
        self._theirs, self._jobs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(self._theirs, store, settings, told), daemon=True)
        self.process.start()

    def begin(self, job: Job) -> None:
        """Gives it a job."""
        self.job = job
        self._jobs.send(job)

    def end(self) -> None:
        """Lets it go."""
        self._jobs.close()
        self.process.join()


def _next(told: "multiprocessing.Queue[Event]") -> Event | None:
    try:
        return told.get(timeout=_LOOK_SECONDS)
    except Empty:
        return None


def _work(jobs: Connection, store: Store, settings: Settings, told: Any) -> None:
    """What a child does: run after run, until there are no more, or it is told to stop, or its parent is gone."""
    runner = Runner(store, settings)
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        runner.stop()

    def stop_when_alone() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            told.cancel_join_thread()  # nobody reads any more
            stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threading.Thread(target=stop_when_alone, daemon=True).start()
    import torch  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.parallel))
    with suppress(EOFError):  # there are no more
        while not stopping.is_set():
            if jobs.poll(_LOOK_SECONDS):
                told.put(runner.run_one(jobs.recv(), told.put))
