"""Makes the runs of an experiment: one after the other in this process, or several at once in child processes."""

import multiprocessing
import os
import shutil
import signal
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import SETTINGS_FILE
from federation.process.sockets import short_enough
from federation.refusals import Refusal
from federation.trust.keys import IdentityError
from fedpareto.experiments import measures
from fedpareto.experiments.kinds import KINDS, SIMULATION
from fedpareto.experiments.result_store import Job, Store, difference
from fedpareto.simulation.history import History
from fedpareto.simulation.simulate import Simulation
from storage.blobs import BlobCorrupt, BlobMissing
from storage.database import Database, DatabaseBusy
from storage.models import Run

Kind = Literal["round", "finished", "failed", "stopped"]

_POLL_SECONDS = 1.0  # between looks whether a signal has come
_DAMAGE = (SQLAlchemyError, CoordinatorHomeError, IdentityError, BlobCorrupt, BlobMissing, Refusal)


@dataclass(frozen=True)
class RunnerSettings:
    """How runs are made: see `fedpareto.simulate` for `data`, `device` and `backend`.

    With `exclude_attackers`, accuracies are those of honest clients only; `parallel` is the number of runs at once.
    """

    data: Path | None = None
    device: str = "auto"
    backend: str = "auto"
    exclude_attackers: bool = False
    parallel: int = 1


@dataclass(frozen=True)
class Event:
    """Progress of a run.

    Attributes:
        kind: "round" after a round; "finished"; "failed"; "stopped" after `ExperimentRunner.stop`.
        done: the number of rounds that have ended.
        reason: why it failed.
    """

    job: Job
    kind: Kind
    done: int = 0
    reason: str = ""


Tell = Callable[[Event], object]


class ExperimentRunner:
    """Makes runs, and keeps results and the state of interrupted runs in a store."""

    def __init__(self, store: Store, settings: RunnerSettings) -> None:
        self._store = store
        self._settings = settings
        self.stopping = False
        self._current: Simulation | None = None

    def stop(self) -> None:
        """Ends `run` soon, from any thread or signal handler. The next call continues interrupted runs."""
        self.stopping = True
        if self._current is not None:
            self._current.stop()

    def run(self, jobs: Sequence[Job], tell: Tell) -> None:
        """Makes runs, and continues interrupted ones. Calls `tell` with each event."""
        if self._settings.parallel > 1:
            self._run_in_children(jobs, tell)
            return
        for job in jobs:
            if not self.stopping:
                tell(self.run_one(job, tell))

    def run_one(self, job: Job, tell: Tell) -> Event:
        """Makes one run in this process, and returns its last event."""
        specification, workspace = job.cell.spec(job.seed), self._store.workspace(job)
        resume = _is_under_way(workspace)
        try:
            if job.cell.kind != SIMULATION:
                kind = KINDS.find(job.cell.kind)()
                kind.data = self._settings.data
                self._store.keep(job, *kind.measure(specification))
                return Event(job, "finished", job.cell.rounds)
            with self._simulation(job, workspace, resume) as self._current:
                if self.stopping:
                    self._current.stop()
                history = self._current.run(lambda progress: tell(Event(job, "round", progress.done)))
            return self._ended(job, workspace, history)
        except Exception as error:  # the other runs continue
            return Event(job, "failed", reason=_why(error, workspace, resume))
        finally:
            self._current = None

    def _ended(self, job: Job, workspace: Path, history: History) -> Event:
        done = len(history.round_records)
        if history.state == "PAUSED" and self.stopping:  # a check of a private round can pause a run, too
            return Event(job, "stopped", done)
        if history.state != "COMPLETED":
            reason = f"the run ended {history.state}: {history.reason}{_refusals(history)}"
            return Event(job, "failed", done, f"{reason}; its record is in {workspace}, --anew makes it again")
        exclude = history.attackers if self._settings.exclude_attackers else ()
        self._store.keep(job, measures.final(history, exclude=exclude), measures.rounds(history, exclude=exclude))
        shutil.rmtree(workspace, ignore_errors=True)
        return Event(job, "finished", done)

    def _simulation(self, job: Job, workspace: Path, resume: bool) -> Simulation:
        text = tomli_w.dumps(job.given).encode()
        if not resume:  # an earlier call can have ended before it made the settings file
            shutil.rmtree(workspace, ignore_errors=True)
            workspace.parent.mkdir(parents=True, exist_ok=True)
        elif begun := _begun(workspace):
            if changed := difference(begun[1], job.given, job.given):
                raise CoordinatorHomeError(f"it is of another specification: {changed}")
            text = begun[0]  # a resumed run needs the same bytes
        how = self._settings
        return Simulation(text, workspace, data=how.data, device=how.device, backend=how.backend, resume=resume)

    def _run_in_children(self, jobs: Sequence[Job], tell: Tell) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # importing PyTorch takes seconds
        waiting, under_way, children = list(jobs), dict[Connection, Job](), dict[Connection, ForkServerProcess]()
        while under_way or (waiting and not self.stopping):
            while not self.stopping and len(children) < min(self._settings.parallel, len(jobs)):
                connection, far = context.Pipe()
                process = context.Process(target=_work, args=(far, self._store, self._settings), daemon=True)
                with short_enough():
                    process.start()
                far.close()
                children[connection] = process
            for connection, process in children.items():
                if self.stopping:
                    process.terminate()  # its handler stops the run
                elif waiting and connection not in under_way:
                    under_way[connection] = waiting.pop(0)
                    with suppress(OSError):  # it has ended, which shows when it is listened to
                        connection.send(under_way[connection])
            told = wait(children, _POLL_SECONDS)
            for connection in [connection for connection in children if connection in told]:
                try:
                    event: Event = connection.recv()
                except (EOFError, OSError):
                    process = children.pop(connection)
                    process.join()
                    if connection not in under_way:
                        continue
                    kind: Kind = "stopped" if self.stopping else "failed"
                    reason = f"its process ended with {process.exitcode}"
                    event = Event(under_way[connection], kind, reason=reason)
                if event.kind != "round":
                    del under_way[connection]
                tell(event)
        for connection, process in children.items():
            connection.close()  # it ends after its last job
            process.join()


def other(store: Store, job: Job) -> str:
    """How the specification of a stored run, finished or interrupted, differs from a job; empty if it does not."""
    begun = None if store.find(job) else _begun(store.workspace(job))
    return store.other(job) or (difference(begun[1], job.given, job.given) if begun else "")


def forget(store: Store, jobs: Sequence[Job]) -> None:
    """Removes runs, finished or interrupted; none of them if another process is making one.

    Raises:
        DatabaseBusy: another process is making one of the runs; the message names the process.
    """
    with ExitStack() as locks:
        for workspace in filter(_is_under_way, map(store.workspace, jobs)):
            with suppress(CoordinatorHomeError, OSError, ValueError):  # it is damaged, so no process is making it
                database = Database.open(CoordinatorHome.load(workspace).database_url, durable=False)
                locks.callback(database.close)
                database.lock_exclusive()
        store.forget(jobs)


def _is_under_way(workspace: Path) -> bool:
    return (workspace / SETTINGS_FILE).exists()


def _begun(workspace: Path) -> tuple[bytes, dict[str, Any]] | None:
    """The specification of an interrupted run as text and document; None if there is none, or it is damaged."""
    try:
        home = CoordinatorHome.load(workspace)
        with closing(home.open_database(durable=False)) as database, database.read() as session:
            text = session.scalar(select(Run.spec).order_by(Run.created.desc()).limit(1))
        return None if text is None else (text, tomllib.loads(text.decode()))
    except (OSError, ValueError, SQLAlchemyError):
        return None


def _why(error: Exception, workspace: Path, resume: bool) -> str:
    """One line on why a run failed."""
    if isinstance(error, DatabaseBusy):
        return f"another process is making this run, in {workspace}"
    message = str(error).partition("\n")[0].partition(" (Background on this error")[0]
    of_workspace = isinstance(error, OSError) and str(error.filename).startswith(str(workspace))
    if resume and (of_workspace or isinstance(error, _DAMAGE)):
        return f"the interrupted run in {workspace} cannot be used ({message}): --anew makes it again"
    return f"{type(error).__name__}: {message}"


def _refusals(history: History) -> str:
    """The most frequent reason of refused replies; empty if all were accepted."""
    reasons = Counter(item["reason"] or "without a reason" for item in history.reply_records if not item["accepted"])
    total = f"{reasons.total()} of {len(history.reply_records)} replies not accepted"
    return f"; {total}: {reasons.most_common(1)[0][0]}" if reasons else ""


def _work(connection: Connection, store: Store, settings: RunnerSettings) -> None:
    """Runs in a child: makes runs until there are no more, a signal arrives, or its parent ends."""
    runner = ExperimentRunner(store, settings)

    def tell(event: Event) -> None:
        try:
            connection.send(event)
        except OSError:  # the parent has ended
            runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.stop())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.parallel))
    with suppress(EOFError):  # the parent has no more jobs
        while not runner.stopping:
            if connection.poll(_POLL_SECONDS):
                tell(runner.run_one(connection.recv(), tell))
