"""Reads the alerts of a federation, and has each receiver told by a thread of its own: none waits for another."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc

from federation.durable_files import make_directories
from federation.errors import Error
from federation.monitoring.events import Events
from federation.process.lock_file import held
from federation.text import counted, escaped
from federation.transport.channels import refusal_from_rpc_error
from federation.v1 import admin_pb2 as v1
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import FIRST_TIME, CoordinatorAway, Source, began, newest_alerts
from fedpareto.delivery.delivery_record import DeliveryRecord
from fedpareto.delivery.news import SEVERITIES, KnownAlert, News, State
from fedpareto.delivery.senders import DeliveryFailed, Sender, SendingTimes, sender_of
from fedpareto.delivery.targets_file import AlertTarget, Targets

ROOM = "notify"  # the directory of the records, in that of the administrator
LOOK_SECONDS = 10.0  # between two looks at the alerts
CALL_SECONDS = 30.0  # for one call
MOST_ALERTS = 5000  # the most that one look reads of the alerts that last, and of those that began lately
PAUSES = (5.0, 900.0)  # the first and the longest pause between two attempts at a receiver, in seconds
STOP_SECONDS = 5.0  # for what is being sent when the process stops
REACH = timedelta(hours=1)  # how long before the last look alerts began that are read again
FIRST_REACH = timedelta(days=7)  # the same after the connection was lost


class RecordsInUse(Error):
    """Another process delivers alerts with this directory."""


@contextmanager
def locked(room: Path) -> Iterator[None]:
    """Makes the directory of the records if need be, and holds it until the block ends.

    Raises:
        RecordsInUse: another process holds it.
        OSError: it cannot be made.
    """
    make_directories(room, 0o700)
    with held(
        room / "lock",
        lambda holder: RecordsInUse(
            f"another process ({escaped(holder, 40)}) delivers alerts with {room.parent}: stop it first"
        ),
    ):
        yield


@dataclass(frozen=True)
class Times:
    """Times of a deliverer, in seconds: between two looks, and the first and the longest between two attempts."""

    look: float = LOOK_SECONDS
    pause: float = PAUSES[0]
    longest_pause: float = PAUSES[1]
    sending: SendingTimes = field(default_factory=SendingTimes)


class Deliverer:
    """Delivers the alerts of one federation until it is stopped.

    Args:
        room: the directory of the records.
        federation_id: of the alerts.
        targets: the receivers.
        events: gets what happens, for people and programs.
        environment: of this process.
        times: shorter ones are for tests.

    Raises:
        FileDamaged: a record cannot be read.
        PackagesMissing, ProxyError, OSError: see `sender_of`.
    """

    def __init__(
        self,
        room: Path,
        federation_id: str,
        targets: Targets,
        events: Events,
        environment: Mapping[str, str],
        times: Times | None = None,
    ) -> None:
        self._times = times or Times()
        self._events = events
        self._away_seconds = targets.away_seconds
        self._stopping = threading.Event()
        self._stop_by: float | None = None
        self._looked: datetime | None = None  # by the coordinator's clock
        self._away: tuple[float, KnownAlert] | None = None  # since when, by the monotonic clock, and what is told
        self._many = False  # there are more alerts than are read
        self._troubles = set[str]()
        self._records = {
            name: DeliveryRecord(room / f"{name}.json", federation_id, SEVERITIES.index(target.severity), self._trouble)
            for name, target in targets.targets.items()
        }
        senders = {
            name: sender_of(target, environment, lambda: self._stop_by, self._times.sending)
            for name, target in targets.targets.items()
        }
        self._threads = [
            threading.Thread(target=self._deliver, args=each, name=f"notify-{each[0]}", daemon=True)
            for each in senders.items()
        ]

    def stop(self) -> None:
        """Ends `run` soon. A signal's handler may call it."""
        self._stopping.set()

    def run(self, source: Source, alive: Callable[[], object] = lambda: None) -> None:
        """Delivers until `stop`; calls `alive` often. What is being sent then is sent again after the next start."""
        for thread in self._threads:
            thread.start()
        while not self._stopping.is_set():
            try:
                with source() as opened:
                    reach = FIRST_REACH
                    while not self._stopping.is_set():
                        self._look(opened.stub, reach)
                        reach = REACH
                        self._wait(alive)
            except (grpc.RpcError, CoordinatorAway) as error:
                why = refusal_from_rpc_error(error).message if isinstance(error, grpc.RpcError) else str(error)
                self._note_away(why)
            self._wait(alive)
        self._stop_by = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, self._stop_by + 1 - time.monotonic()))

    def _wait(self, alive: Callable[[], object]) -> None:
        alive()
        self._stopping.wait(self._times.look)

    def _look(self, stub: AdminStub, reach: timedelta) -> None:
        """Reads the alerts that last and those that began not long ago, and gives them to the records."""
        call = partial(stub.ListAlerts, timeout=CALL_SECONDS)
        lasting = newest_alerts(call, v1.ListAlertsRequest(), MOST_ALERTS)
        now, known_from = lasting.now.ToDatetime(UTC), _known_from(lasting)
        alerts = {alert.key: alert for alert in map(KnownAlert.of, lasting.alerts)}
        oldest = min(now, self._looked or now) - reach
        for record in self._records.values():  # what has ended may have begun long ago
            times = (datetime.fromisoformat(at) for key, at in record.lasting().items() if key not in alerts)
            oldest = min([oldest, *(at for at in times if at >= known_from)])
        recent = newest_alerts(call, v1.ListAlertsRequest(all=True), MOST_ALERTS, since=oldest)
        known_from = max(known_from, _known_from(recent))
        alerts |= {alert.key: alert for alert in map(KnownAlert.of, recent.alerts)}
        self._note_many(many=known_from > FIRST_TIME)
        for record in self._records.values():
            record.take(alerts, datetime.now(UTC), known_from)
        if self._away is not None:
            self._events.tell("answers", "the coordinator answers again")
        self._looked, self._away = now, None

    def _note_many(self, *, many: bool) -> None:
        """Says once that there are more alerts than are read."""
        if many and not self._many:
            self._events.warn("many", f"more than {MOST_ALERTS:,} alerts: of the oldest, nothing new is told meanwhile")
        self._many = many

    def _note_away(self, why: str) -> None:
        """Has the receivers told that no coordinator answers, once that has lasted."""
        now = datetime.now(UTC)
        if self._away is None:
            self._away = time.monotonic(), KnownAlert.away(now)
            self._events.warn("away", f"the alerts cannot be read, trying again: {escaped(why)}")
        since, alert = self._away
        if time.monotonic() - since >= self._away_seconds:
            for record in self._records.values():
                record.take_one(alert, now)

    # One thread for each receiver

    def _deliver(self, name: str, sender: Sender) -> None:
        record, failures = self._records[name], 0
        while not self._stopping.is_set():
            news, dropped = record.next(LOOK_SECONDS)
            if news is None:
                continue
            try:
                sender.send(news, dropped)
            except DeliveryFailed as failure:
                failures += 1
                record.postpone(news)
                if failures == 1:
                    text, about = _line(name, news, f"not told, trying again for a day: {failure}")
                    self._events.warn("failed", text, **about)
                pause = self._times.pause * 2.0 ** min(failures - 1, 20)
                self._stopping.wait(min(pause, self._times.longest_pause))
                continue
            record.delivered(news)
            failures = 0
            lost = f"; {counted(dropped, 'message')} before it were not delivered" if dropped else ""
            text, about = _line(name, news, f"told{lost}")
            self._events.tell("delivered", text, dropped=dropped, **about)

    def _trouble(self, text: str) -> None:
        """Reports that a record cannot be written, once."""
        if text not in self._troubles:
            self._troubles.add(text)
            self._events.warn("disk", f"{text}: after a restart, receivers may be told again what they know")


def _known_from(answer: v1.ListAlertsResponse) -> datetime:
    """Since when an answer has all alerts that it was asked for."""
    return began(answer.alerts[-1]) if answer.next_page_token else FIRST_TIME


def _line(name: str, news: News, text: str) -> tuple[str, dict[str, object]]:
    """A line for people about news for a receiver, and the fields for programs."""
    about = {"target": name, "id": news.id, "kind": news.document["kind"], "state": news.document["state"]}
    return f"{name}: {news.title}: {text}", about


def try_all(targets: Targets, federation_id: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Sends each receiver a message that says it is a test. Returns by name what went wrong, empty where it was taken.

    Raises:
        PackagesMissing, ProxyError, OSError: see `sender_of`.
    """
    now = datetime.now(UTC)

    def problem(target: AlertTarget, sender: Sender) -> str:
        alert = replace(KnownAlert.test(now), severity=target.severity)
        try:
            sender.send(News.of(federation_id, alert, State.BEGINS, 0, now), 0)
        except DeliveryFailed as failure:
            return str(failure)
        return ""

    senders = [sender_of(target, environment, lambda: None) for target in targets.targets.values()]
    with ThreadPoolExecutor(len(senders)) as pool:
        problems = list(pool.map(problem, targets.targets.values(), senders))
    return dict(zip(targets.targets, problems, strict=True))
