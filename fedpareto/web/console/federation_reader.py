"""Reads a federation for all pages at once: lists every few seconds, and each open run by one stream.

Nothing of it is written down. When the coordinator is away, the last state stays, with the time since when.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TypeVar

import grpc

from federation.errors import Error
from federation.refusals import Refusal
from federation.text import escaped
from federation.transport.channels import refusal_from_rpc_error
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import CoordinatorAway, OpenedCalls, Source, newest_alerts, whole
from fedpareto.run_names import ENDED, RunNames
from fedpareto.run_table import RunTable
from fedpareto.web.sections.shown_run import ShownRun, stop_metric

T = TypeVar("T")

LIST_SECONDS = 2.0  # between two readings of the lists while a page is open
QUIET_SECONDS = 15.0  # the same while none is
SLOW_SECONDS = 60.0  # between two readings of what changes slowly, such as administrators
PAUSES = (0.5, 5.0)  # the first and the longest pause between two attempts to reach the coordinator, in seconds
MOST_ALERTS = 1000
FOLLOWED = 32  # open runs, the newest, that are followed
HELD = 12  # runs that have ended, whose numbers stay in memory after their page was open
FIRST_ROUNDS = 40  # the newest rounds are read before the others, for the first screen
FIRST_SECONDS = 8.0  # that the first page waits for the lists


class PageError(Error):
    """A page that cannot be shown: the HTTP status, and why in words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Lists:
    """The lists of a federation, as they were read at `at`.

    `alerts` are the newest that last, at most `MOST_ALERTS`; `more_alerts` says that there are others.
    """

    at: datetime
    runs: tuple[v1.Run, ...] = ()
    clients: tuple[v1.Client, ...] = ()
    requests: tuple[v1.ActionRequest, ...] = ()
    alerts: tuple[v1.Alert, ...] = ()
    more_alerts: bool = False
    administrators: tuple[v1.Administrator, ...] = ()


def read_lists(stub: AdminStub, administrators: tuple[v1.Administrator, ...] | None = None) -> Lists:
    """Reads the lists of a federation; the administrators only if they are not given."""
    if administrators is None:
        administrators = tuple(stub.ListAdministrators(v1.ListAdministratorsRequest()).administrators)
    alerts = newest_alerts(stub.ListAlerts, v1.ListAlertsRequest(), MOST_ALERTS)
    return Lists(
        at=datetime.now(UTC),
        runs=tuple(stub.ListRuns(v1.ListRunsRequest(brief=True, page_size=100)).runs),
        clients=tuple(whole(stub.ListClients, v1.ListClientsRequest()).clients),
        requests=tuple(stub.ListRequests(v1.ListRequestsRequest()).requests),
        alerts=tuple(alerts.alerts),
        more_alerts=bool(alerts.next_page_token),
        administrators=administrators,
    )


@dataclass
class HeldRun:
    """A run in memory; `root` begins the console's addresses, `used` is when a page last asked for it."""

    run: v1.Run
    table: RunTable
    root: str = ""
    phase: v1.PhaseProgress | None = None
    ahead: float = 0.0  # seconds of the coordinator's clock before ours
    followed: bool = False
    used: float = 0.0
    seldom: tuple[object, Mapping[str, str]] = (None, MappingProxyType({}))  # sections, and of which state they are
    details: v1.Run | None = None  # as `GetRun` gave it last: with the specification, and the members never asked

    @property
    def spec(self) -> str:
        """Its specification; empty until it is read."""
        return self.details.spec if self.details is not None else ""

    @property
    def outdated(self) -> bool:
        """True if its details have to be read: first, after its first round, and at its end."""
        read = self.details
        if read is None:
            return True
        return (not read.rounds_done and bool(self.run.rounds_done)) or (self.over and read.state not in ENDED)

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.run.state in ENDED

    @property
    def complete(self) -> bool:
        """True once all rounds that have ended were read."""
        return len(self.table.whole) >= self.run.rounds_done

    def shown(self, members: Mapping[str, v1.Client] | None = None, origin: str = "") -> ShownRun:
        """The run as it is, for a page; with members of the federation by name."""
        run = self.run if self.details is None else merged(self.run, self.details)
        return ShownRun(run, self.table.snapshot(), members or {}, origin, self.root)


@dataclass(frozen=True)
class ConnectionState:
    """The connection to the coordinator: `away` is since when it is lost, None while it stands.

    `live` is False while the record of a stopped coordinator is read. `why` says in words why it was lost.
    """

    live: bool = False
    away: datetime | None = None
    why: str = ""


class Reader:
    """The state of a federation, kept by threads of its own; any thread may read it.

    Args:
        source: opens the calls.
        changed: called, from any thread, after each change.
        root: begins the addresses of pages.
    """

    def __init__(self, source: Source, changed: Callable[[], None], root: str) -> None:
        self._source = source
        self._root = root
        self._tell = changed
        self._lock = threading.Lock()
        self._opened: OpenedCalls | None = None
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._begun = threading.Event()  # set once the lists were read, or the coordinator was found away
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="console-load")
        self._loads: dict[str, Future[None]] = {}
        self._followers: dict[str, threading.Thread] = {}
        self._calls: set[object] = set()
        self._slow_at = -SLOW_SECONDS
        self.held: dict[str, HeldRun] = {}
        self.lists: Lists | None = None
        self.connection = ConnectionState()
        self.version = 0
        self.watched = 0  # pages that are open

    # --- the course

    def start(self) -> None:
        """Begins to read."""
        threading.Thread(target=self._read, name="console-lists", daemon=True).start()

    def stop(self) -> None:
        """Ends every call."""
        self._stopping.set()
        self._hurry.set()
        self._end_calls()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def hurry(self) -> None:
        """Reads the lists soon: a page has been opened."""
        self._hurry.set()

    def wait_for_lists(self) -> None:
        """Waits for the first reading, at most some seconds."""
        self._begun.wait(FIRST_SECONDS)

    def _changed(self) -> None:
        self._begun.set()
        with self._lock:
            self.version += 1
        self._tell()

    def _read(self) -> None:
        pause = PAUSES[0]
        while not self._stopping.is_set():
            try:
                with self._source() as opened:
                    for _ in self._readings(opened):
                        pause = PAUSES[0]
            except (grpc.RpcError, CoordinatorAway) as error:
                self._lost(_why(error))
            finally:
                self._opened = None
                self._end_calls()
            self._stopping.wait(pause)
            pause = min(2 * pause, PAUSES[1])

    def _readings(self, opened: OpenedCalls) -> Iterator[None]:
        """Reads the lists until the connection is lost, and yields after each time."""
        while not self._stopping.is_set():
            self._hurry.clear()
            lists = self._read_lists(opened.stub)
            self._opened = opened
            was_away = self.connection.away
            self.connection = ConnectionState(opened.live, None if opened.live else was_away, "")
            self.lists = lists
            self._take(lists.runs)
            if opened.live:
                self._follow_all()
            self._changed()
            yield
            if not opened.live:
                while not self._stopping.wait(LIST_SECONDS):
                    if opened.outdated():
                        raise CoordinatorAway("it serves again")
            self._hurry.wait(LIST_SECONDS if self.watched else QUIET_SECONDS)

    def _lost(self, why: str) -> None:
        stopped = self.lists is not None and not self.connection.live and self.connection.away is None
        if stopped:
            return  # the record of a coordinator that did not run when the console started
        self.connection = ConnectionState(False, self.connection.away or datetime.now(UTC), why)
        self._changed()

    def _read_lists(self, stub: AdminStub) -> Lists:
        slow = time.monotonic() >= self._slow_at + SLOW_SECONDS or self.lists is None
        if slow:
            self._slow_at = time.monotonic()
        return read_lists(stub, None if slow or self.lists is None else self.lists.administrators)

    # --- runs

    def _take(self, runs: Iterable[v1.Run]) -> None:
        """Notes the runs of a list; those that are followed know better."""
        with self._lock:
            for run in runs:
                held = self.held.get(run.run_id)
                if held is not None and not held.followed:
                    held.run = merged(run, held.run)

    def _follow_all(self) -> None:
        runs = [run for run in self.lists.runs if run.state not in ENDED] if self.lists else []
        for run in runs[:FOLLOWED]:
            thread = self._followers.get(run.run_id)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=self._follow, args=(run,), name="console-follow", daemon=True)
                self._followers[run.run_id] = thread
                thread.start()

    def _hold(self, run: v1.Run) -> HeldRun:
        with self._lock:
            held = self.held.get(run.run_id)
            if held is None:
                held = HeldRun(run, RunTable(stop_metric(run.spec)), self._root)
                self.held[run.run_id] = held
            held.used = time.monotonic()
            idle = [item for item in self.held.values() if item.over and not item.followed]
            for item in sorted(idle, key=lambda item: item.used)[: max(0, len(idle) - HELD)]:
                del self.held[item.run.run_id]
            return held

    def _follow(self, run: v1.Run) -> None:
        """Follows an open run until it ends or the connection is lost."""
        opened = self._opened
        if opened is None:
            return
        held = self._hold(run)
        held.followed = True
        try:
            with self._ending(opened.stub.WatchRun(v1.WatchRunRequest(run=run.run_id, parts=True))) as call:
                for message in call:
                    if message.HasField("parts"):
                        held.table.add(message.parts)
                    held.ahead = message.now.ToNanoseconds() / 1e9 - time.time()
                    held.phase = message.phase if message.HasField("phase") else None
                    held.run = merged(message.run, held.run)
                    self._load_later(held)
                    self._changed()
        except (grpc.RpcError, CoordinatorAway):
            pass  # the reading of the lists meets the same, and says it
        finally:
            held.followed = False

    def _load_later(self, held: HeldRun) -> None:
        """Reads the rounds of a run that were not read, in another thread."""
        run_id = held.run.run_id
        with self._lock:
            before = self._loads.get(run_id)
            if (held.complete and not held.outdated) or (before is not None and not before.done()):
                return
            with suppress(RuntimeError):  # the console ends
                self._loads[run_id] = self._pool.submit(self._load, held)

    def _load(self, held: HeldRun) -> None:
        opened, run_id = self._opened, held.run.run_id
        if opened is None:
            return
        with suppress(grpc.RpcError, CoordinatorAway):
            if held.outdated:
                held.details = opened.stub.GetRun(v1.GetRunRequest(run=run_id, brief=True)).run
                held.table.preferred = stop_metric(held.spec)
            stop = held.run.rounds_done
            if stop > 2 * FIRST_ROUNDS and not held.table.lines:
                self._load_rounds(opened.stub, held, stop - FIRST_ROUNDS, stop)
                for summary in whole(opened.stub.ListRounds, v1.ListRoundsRequest(run=run_id)).rounds:
                    held.table.add_summary(summary)
                self._changed()
            for first, end in list(held.table.missing(stop)):
                self._load_rounds(opened.stub, held, first, end)
            self._changed()

    def _load_rounds(self, stub: AdminStub, held: HeldRun, first: int, stop: int) -> None:
        told = time.monotonic()
        with self._ending(stub.ExportRounds(v1.ExportRoundsRequest(run=held.run.run_id, first=first))) as call:
            for item in call:
                if item.summary.round >= stop or self._stopping.is_set():
                    return
                held.table.add(item)
                if time.monotonic() > told + 1:
                    told = time.monotonic()
                    self._changed()
        self._changed()

    @contextmanager
    def _ending(self, call: Iterable[T]) -> Iterator[Iterable[T]]:
        """A stream that is ended when it is left, or when the reader stops."""
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            _cancel(call)

    def _end_calls(self) -> None:
        for call in list(self._calls):
            _cancel(call)

    # --- for pages

    def call(self, ask: Callable[[AdminStub], T]) -> T:
        """Makes calls for a page.

        Raises:
            PageError: 503: the coordinator is away; 404, 403, 400 or 502: it refuses, with its reason.
        """
        opened = self._opened
        if opened is None:
            raise PageError(503, "The coordinator is away, so that this page cannot be read.")
        try:
            return ask(opened.stub)
        except (CoordinatorAway, RuntimeError) as error:
            raise PageError(503, f"The coordinator is away: {error}") from None
        except Refusal as refused:  # of the record of a stopped coordinator
            raise PageError(_STATUSES.get(refused.status, 502), escaped(refused.message)) from None
        except grpc.RpcError as error:
            refusal = refusal_from_rpc_error(error)
            raise PageError(_STATUSES.get(refusal.status, 502), escaped(refusal.message)) from None

    @property
    def names(self) -> RunNames:
        """The names of the runs that are listed or held."""
        with self._lock:
            listed = self.lists.runs if self.lists is not None else ()
            return RunNames([*listed, *(held.run for held in self.held.values())])

    def known(self, name: str) -> HeldRun | None:
        """A run that is in memory, by its id or its name, the newest of that name."""
        with self._lock:
            if name in self.held:
                return self.held[name]
            listed = self.lists.runs if self.lists is not None else ()
            found = next((run.run_id for run in listed if run.name == name), "")
            return self.held.get(found)

    def run(self, name: str, *, seconds: float = 3.0) -> HeldRun:
        """A run by its id, a beginning of it or its name, with its rounds as far as they are read after `seconds`.

        Raises:
            PageError: 404: there is none; as of `call`.
        """
        held = self.known(name)
        if held is None:
            listed = self.lists.runs if self.lists is not None else ()
            found = next((run for run in listed if run.run_id == name), None) or next(
                (run for run in listed if run.name == name), None
            )
            if found is None:
                found = self.call(lambda stub: stub.GetRun(v1.GetRunRequest(run=name, brief=True)).run)
            held = self._hold(found)
        held.used = time.monotonic()
        if held.details is None or (not held.complete and not (held.followed and held.table.lines)):
            self._load_later(held)
            self._wait(held, seconds)
        return held

    def _wait(self, held: HeldRun, seconds: float) -> None:
        """Waits until a run has enough for a first screen."""
        end = time.monotonic() + seconds
        future = self._loads.get(held.run.run_id)
        while time.monotonic() < end and future is not None and not future.done():
            if held.run.rounds_done > 2 * FIRST_ROUNDS and len(held.table.lines) >= held.run.rounds_done:
                return
            time.sleep(0.02)  # the thread that loads tells all pages, and not this one


_STATUSES = {"NOT_FOUND": 404, "PERMISSION_DENIED": 403, "INVALID_ARGUMENT": 400, "UNAVAILABLE": 503}


def _cancel(call: object) -> None:
    cancel = getattr(call, "cancel", None)  # the record of a stopped coordinator has no calls to end
    if cancel is not None:
        cancel()


def _why(error: grpc.RpcError | CoordinatorAway) -> str:
    return escaped(refusal_from_rpc_error(error).message if isinstance(error, grpc.RpcError) else str(error))


def merged(newer: v1.Run, older: v1.Run) -> v1.Run:
    """A run as a message has it, with what only other messages have."""
    run = v1.Run()
    run.CopyFrom(newer)
    for name in ("members", "serving", "consents", "never_asked", "metrics", "objectives"):
        if not getattr(run, name):
            getattr(run, name).extend(getattr(older, name))
    run.spec = run.spec or older.spec
    return run
