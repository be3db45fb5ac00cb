"""Counts what a coordinator in this process asks of its database, its threads and its disk, and who asks."""

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session

from storage.database import Database
from tests.paths import ROOT

_OWN = ("service", "access")  # the names of the coordinator's threads to which its event loop hands work over
_BETWEEN = ("storage/", "coordinator/thread_pool.py", "tests/")  # they pass on what others ask


@dataclass
class Counts:
    """What was counted, each by its cause: the function of the coordinator that asked.

    Attributes:
        reads: transactions that read.
        writes: transactions that write.
        statements: of SQL; an `executemany` is one, and the statements that begin and end a transaction are none.
        handovers: of work from the event loop to a thread.
        syncs: of files and directories, and of commits that changed something.
    """

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    handovers: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> dict[str, int]:
        """The sums, by what was counted."""
        return {name: counter.total() for name, counter in vars(self).items()}

    def table(self, rounds: int = 1) -> str:
        """A line for each cause, per round, the dearest first."""
        causes = sorted(set().union(*vars(self).values()), key=lambda name: -self.statements[name])
        lines = [f"{'':60}" + "".join(f"{name:>12}" for name in vars(self))]
        for cause in ["", *causes]:
            numbers = [counter[cause] if cause else counter.total() for counter in vars(self).values()]
            lines.append(f"{cause or 'all':60}" + "".join(f"{number / rounds:12.1f}" for number in numbers))
        return "\n".join(lines)


def _cause() -> str:
    frame: FrameType | None = sys._getframe(2)
    function = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}/"):
            within = path.removeprefix(f"{ROOT}/")
            if within == "coordinator/thread_pool.py" and frame.f_code.co_name in ("read", "write"):
                called = frame.f_locals.get("function")
                return f"{getattr(called, '__module__', '')}.{getattr(called, '__qualname__', called)}"
            if within.startswith("coordinator/") and not within.startswith(_BETWEEN):
                return f"{within.removesuffix('.py').replace('/', '.')}.{frame.f_code.co_qualname}"
            function = function or f"{within}:{frame.f_code.co_name}"
        frame = frame.f_back
    return function or threading.current_thread().name


@contextmanager
def counted(database: Database) -> Iterator[Counts]:
    """Counts while the context lasts, what the coordinator does with `database` and what it hands over and syncs."""
    counts, lock = Counts(), threading.Lock()
    changed, engines = threading.local(), (database.engine, database._reader)

    def note(counter: Counter[str], cause: str) -> None:
        with lock:
            counter[cause] += 1

    def statement(connection: Connection, _cursor: object, sql: str, *_: object) -> None:
        if connection.engine in engines and not sql.startswith(("BEGIN", "PRAGMA")):
            note(counts.statements, _cause())
            if not sql.lstrip().startswith("SELECT"):
                changed.by = True

    read, begin = Database.read, Database.begin
    submit, fsync = ThreadPoolExecutor.submit, os.fsync

    @contextmanager
    def reads(self: Database) -> Iterator[Session]:
        if self is not database:
            with read(self) as session:
                yield session
            return
        note(counts.reads, _cause())
        with read(self) as session:
            yield session

    @contextmanager
    def writes(self: Database) -> Iterator[Session]:
        if self is not database:
            with begin(self) as session:
                yield session
            return
        cause = _cause()
        note(counts.writes, cause)
        changed.by = False
        with begin(self) as session:
            yield session
        if changed.by:
            note(counts.syncs, cause)

    def handed(self: ThreadPoolExecutor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (self._thread_name_prefix or "").startswith(_OWN):
            name = _function(function)
            note(counts.handovers, name)
        return submit(self, function, *args, **kwargs)

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        note(counts.syncs, _cause())

    event.listen(Engine, "before_cursor_execute", statement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "read", reads)
        patch.setattr(Database, "begin", writes)
        patch.setattr(ThreadPoolExecutor, "submit", handed)
        patch.setattr(os, "fsync", synced)
        try:
            yield counts
        finally:
            event.remove(Engine, "before_cursor_execute", statement)


def _function(call: Any) -> str:
    """The name of what a thread is to call: within the partial of a context's `run`, and of a `read` or a `write`."""
    args = getattr(call, "args", ())
    inner = args[0] if args else call
    while hasattr(inner, "func"):
        inner = inner.func
    closure = getattr(inner, "__closure__", None) or ()
    if getattr(inner, "__module__", "") == "coordinator.thread_pool":
        for cell in closure:
            if callable(cell.cell_contents) and hasattr(cell.cell_contents, "__qualname__"):
                inner = cell.cell_contents
    return f"{inner.__module__}.{inner.__qualname__}"
