"""What a receiver was told, and what waits for it: a file that is written before anything is sent.

So a receiver gets each piece of news at least once, also after a crash, and under the same id if it comes twice.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from federation.text_files import FORMAT, check_format
from federation.trust.keys import FileDamaged, replace_private
from fedpareto.admin_messages import FIRST_TIME
from fedpareto.delivery.news import KnownAlert, News, State

TRIED = timedelta(days=1)  # how long a delivery is tried; that of an alert which lasts, until it ends
KEPT = timedelta(days=9)  # how long ago alerts began whose end is remembered
MAX_WAITING = 1000  # what does not fit is found again by a later look


@dataclass(frozen=True)
class _Told:
    """What a receiver knows of an alert: how many news it got, and the alert as it was then."""

    number: int
    alert: KnownAlert


@dataclass(frozen=True)
class _Content:
    """What the file holds. `looked` is when the alerts were last read, None before the first time."""

    looked: datetime | None = None
    told: Mapping[str, _Told] = field(default_factory=dict)
    waiting: tuple[News, ...] = ()
    dropped: int = 0  # news that were not delivered, since the last that was


class DeliveryRecord:
    """The record of one receiver; its methods may be called by any thread.

    Args:
        path: of the file, which is made when there is something to write.
        federation_id: of the alerts.
        least: the place in `SEVERITIES` of the least severity that it wants.
        trouble: is told when the file cannot be written. The record goes on in memory: after a crash, the receiver is
            told again what the file does not have.

    Raises:
        FileDamaged: the file cannot be read; the message says what to do.
    """

    def __init__(self, path: Path, federation_id: str, least: int, trouble: Callable[[str], object]) -> None:
        self._path = path
        self._federation_id = federation_id
        self._least = least
        self._trouble = trouble
        self._changed = threading.Condition()
        self._written = True  # what is in memory is in the file
        self._content = _read(path)

    @property
    def looked(self) -> datetime | None:
        """When the alerts were last read."""
        return self._content.looked

    def lasting(self) -> dict[str, str]:
        """When the alerts began whose end the receiver was not told, by their keys."""
        return {key: told.alert.began for key, told in self._content.told.items() if not told.alert.ended}

    def take(self, alerts: Mapping[str, KnownAlert], now: datetime, known_from: datetime = FIRST_TIME) -> None:
        """Notes the alerts as they are now: all that last, and those that have ended since the last look.

        An alert that the receiver was told of, and that is no longer among them, has ended. Of alerts that began before
        `known_from`, some are not among them: nothing is known of these.
        """
        with self._changed:
            told, news, first = dict(self._content.told), list[News](), self._content.looked is None
            known = known_from.astimezone(UTC).isoformat(timespec="seconds")
            gone = [key for key, began in self.lasting().items() if key not in alerts and began > known]
            ended = [replace(told[key].alert, ended=now.isoformat(timespec="seconds")) for key in gone]
            for alert in (*alerts.values(), *ended):
                before = told.get(alert.key)
                state = self._state(before, alert, now, quiet=first)
                if state is None and (before is not None or alert.rank() < self._least):
                    continue
                number = before.number if before is not None else 0
                if state is not None:
                    if len(self._content.waiting) + len(news) >= MAX_WAITING:
                        continue
                    news.append(News.of(self._federation_id, alert, state, number, now))
                    number += 1
                told[alert.key] = _Told(number, replace(alert, about={}) if alert.ended else alert)
            oldest = (now - KEPT).isoformat()
            kept = {key: item for key, item in told.items() if not item.alert.ended or item.alert.began > oldest}
            self._queue(replace(self._content, looked=now, told=kept), news, now)

    def take_one(self, alert: KnownAlert, now: datetime) -> None:
        """Notes one alert of this client that lasts, unless one of its kind does, and nothing about the others."""
        with self._changed:
            content, news = self._content, list[News]()
            lasting = [item.alert.about["kind"] for item in content.told.values() if not item.alert.ended]
            if alert.about["kind"] not in lasting and alert.key not in content.told:
                content = replace(content, told={**content.told, alert.key: _Told(1, alert)})
                news.append(News.of(self._federation_id, alert, State.BEGINS, 0, now))
            self._queue(content, news, now)

    def _state(self, before: _Told | None, alert: KnownAlert, now: datetime, *, quiet: bool) -> State | None:
        """What is new about an alert for the receiver."""
        if alert.rank() < self._least:
            return None if before is None or before.alert.ended or not alert.ended else State.ENDED
        if before is None:
            old = alert.ended and (quiet or alert.ended < (now - TRIED).isoformat(timespec="seconds"))
            return None if old else State.ENDED if alert.ended else State.BEGINS
        if before.alert.ended:
            return None if alert.ended else State.BEGINS  # a backup was restored in which it lasts
        if alert.ended:
            return State.ENDED
        return State.WORSE if alert.rank() > before.alert.rank() else None

    def _queue(self, content: _Content, news: Iterable[News], now: datetime) -> None:
        """Adds news to what waits, without what was tried for too long, and writes the file if need be."""
        since, waiting, dropped = (now - TRIED).timestamp(), list[News](), content.dropped
        for item in (*content.waiting, *news):
            told = content.told.get(item.key)
            if item.queued > since:
                waiting.append(item)
            elif told is not None and not told.alert.ended:
                waiting.append(replace(item, queued=now.timestamp()))
            else:
                dropped += 1
        before = self._content
        changed = before.looked is None or (content.told, tuple(waiting)) != (before.told, before.waiting)
        self._content = replace(content, waiting=tuple(waiting), dropped=dropped)
        if changed or not self._written:
            self._write()
        self._changed.notify_all()

    # For the one that sends

    def next(self, seconds: float) -> tuple[News | None, int]:
        """The news to send, and how many could not be delivered before; None if nothing comes within this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._content.waiting, seconds)
            return next(iter(self._content.waiting), None), self._content.dropped

    def delivered(self, news: News) -> None:
        """Notes that the receiver has taken this news, which also told it how many were dropped."""
        with self._changed:
            left = tuple(item for item in self._content.waiting if item.id != news.id)
            self._content = replace(self._content, waiting=left, dropped=0)
            self._write()

    def postpone(self, news: News) -> None:
        """Lets other news be tried first; those about the same alert stay in their order."""
        with self._changed:
            others = [item for item in self._content.waiting if item.key != news.key]
            same = [item for item in self._content.waiting if item.key == news.key]
            self._content = replace(self._content, waiting=(*others, *same))

    def _write(self) -> None:
        content, self._written = self._content, False
        document = {
            "format": FORMAT,
            "looked": content.looked.isoformat() if content.looked else None,
            "told": [{"number": told.number, **asdict(told.alert)} for told in content.told.values()],
            "waiting": [asdict(item) for item in content.waiting],
            "dropped": content.dropped,
        }
        try:
            replace_private(self._path, json.dumps(document).encode())
            self._written = True
        except OSError as error:
            self._trouble(f"{self._path} cannot be written ({error.strerror or error})")


def _read(path: Path) -> _Content:
    try:
        values: Any = json.loads(path.read_bytes())
        check_format(values["format"])
        told = [_Told(int(item.pop("number")), KnownAlert(**item)) for item in values["told"]]
        return _Content(
            looked=datetime.fromisoformat(values["looked"]).astimezone(UTC) if values["looked"] else None,
            told={item.alert.key: item for item in told},
            waiting=tuple(News(**item) for item in values["waiting"]),
            dropped=int(values["dropped"]),
        )
    except FileNotFoundError:
        return _Content()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileDamaged(
            f"{path} cannot be used ({getattr(error, 'strerror', None) or error}): remove it, and its receiver is told "
            "again of the alerts that last"
        ) from None
