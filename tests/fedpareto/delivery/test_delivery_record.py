"""What a receiver is told and when: beginnings, ends and worsenings, each once, also after restarts and restores."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from federation.trust.keys import FileDamaged
from fedpareto.delivery.delivery_record import MAX_WAITING, DeliveryRecord
from fedpareto.delivery.news import SEVERITIES, KnownAlert, News
from tests.fedpareto.delivery.scene import FEDERATION, NOW, alert

HOUR = timedelta(hours=1)


class Told:
    """A record, opened anew for each step as after a kill, and a receiver that takes all."""

    def __init__(self, directory: Path, severity: str = "notice") -> None:
        self.path = directory / "a.json"
        self.severity = severity
        self.troubles: list[str] = []

    def open(self) -> DeliveryRecord:
        return DeliveryRecord(self.path, FEDERATION, SEVERITIES.index(self.severity), self.troubles.append)

    def take(self, *alerts: KnownAlert, now: datetime = NOW) -> None:
        self.open().take({each.key: each for each in alerts}, now)

    def news(self) -> Iterator[News]:
        record = self.open()
        while (item := record.next(0.0)[0]) is not None:
            record.delivered(item)
            yield item

    def heard(self) -> list[tuple[str, str]]:
        return [(item.document["client_id"], item.document["state"]) for item in self.news()]


def test_beginnings_ends_and_worsenings_are_told_once_and_what_ended_before_is_not(tmp_path: Path) -> None:
    told = Told(tmp_path)
    old = alert("old", ended=NOW - HOUR)
    told.take(alert("ann"), old)
    told.take(alert("ann"), old)
    assert told.heard() == [("ann", "begins")]
    told.take(alert("ann", severity="critical"), old, now=NOW + HOUR)
    told.take(alert("ann"), old, alert("ben", ended=NOW + HOUR), now=NOW + HOUR)
    assert told.heard() == [("ann", "worse"), ("ben", "ended")], "one that came and went between two looks is told"
    told.take(alert("ann", ended=NOW + 2 * HOUR), now=NOW + 2 * HOUR)
    told.take(alert("ann", ended=NOW + 2 * HOUR), old, now=NOW + 3 * HOUR)
    assert told.heard() == [("ann", "ended")]
    assert told.troubles == []


def test_the_least_severity_leaves_out_what_matters_less_until_it_matters_more(tmp_path: Path) -> None:
    told = Told(tmp_path, "critical")
    told.take(alert("ann"), alert("ben", severity="critical"), alert("cleo"))
    assert told.heard() == [("ben", "begins")]
    told.take(alert("ann", severity="critical"), alert("ben"), alert("cleo", ended=NOW))
    assert told.heard() == [("ann", "begins")]
    told.take(alert("ann", severity="critical"), alert("ben", ended=NOW))
    assert told.heard() == [("ben", "ended")], "who heard of a beginning hears of the end"


def test_after_a_restore_what_is_gone_has_ended_and_what_lasts_again_begins_under_another_id(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.take()
    told.take(alert("ann"), alert("ben", ended=NOW))
    [first, _] = told.news()
    told.take(alert("ben"))
    again, ended = told.news()
    assert (ended.document["client_id"], ended.document["state"]) == ("ann", "ended")
    assert (again.document["client_id"], again.document["state"]) == ("ben", "begins")
    told.take(alert("ann"), alert("ben"))
    [anew] = told.news()
    assert (anew.document["state"], anew.document["began"]) == ("begins", first.document["began"])
    assert anew.id != first.id


def test_a_receiver_that_is_away_for_a_day_is_told_what_lasts_and_how_much_it_has_missed(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.take()
    told.take(alert("ann"), alert("ben", ended=NOW))
    record, later = told.open(), NOW + 25 * HOUR
    first, _ = record.next(0.0)
    told.take(alert("ann"), now=later)
    item, dropped = told.open().next(0.0)
    assert first is not None
    assert item == replace(first, queued=later.timestamp()), "the same news, under the same id"
    assert dropped == 1, "what has ended is tried for a day"
    assert told.heard() == [("ann", "begins")]
    assert told.open().next(0.0) == (None, 0)


def test_news_that_a_receiver_does_not_take_let_others_pass_but_not_those_about_the_same_alert(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.take(alert("ann"), alert("ben"))
    told.take(alert("ann", ended=NOW), alert("ben"))
    record = told.open()
    first, _ = record.next(0.0)
    assert first is not None
    record.postpone(first)
    order = []
    while (item := record.next(0.0)[0]) is not None:
        record.delivered(item)
        order.append((item.document["client_id"], item.document["state"]))
    assert order == [("ben", "begins"), ("ann", "begins"), ("ann", "ended")]


def test_a_flood_of_alerts_waits_its_turn_and_none_that_lasts_is_left_out(tmp_path: Path) -> None:
    told, many = Told(tmp_path), [alert(f"m{number}") for number in range(MAX_WAITING + 50)]
    record = told.open()
    record.take({each.key: each for each in many}, NOW)
    document = told.path.read_text()
    assert document.count("begins") == MAX_WAITING
    for _ in range(60):
        item, _ = record.next(0.0)
        assert item is not None
        record._content = replace(record._content, waiting=record._content.waiting[1:])
    record.take({each.key: each for each in many}, NOW)
    assert len(record.lasting()) == len(many)


def test_a_file_that_cannot_be_written_stops_no_delivery_and_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    told = Told(tmp_path / "gone")
    record = told.open()
    record.take({alert("ann").key: alert("ann")}, NOW)
    assert record.next(0.0)[0] is not None
    assert "a.json cannot be written (No such file or directory)" in told.troubles[0]
    told.path.parent.mkdir()
    record.take({alert("ann").key: alert("ann")}, NOW)
    assert told.heard() == [("ann", "begins")], "it is written as soon as it can be"
    for text in ("", "{}", '{"format": 2}', "[" * 100_000, '{"format": 1, "told": 3, "looked": null}'):
        told.path.write_text(text)
        with pytest.raises(FileDamaged, match=r"a\.json cannot be used .*: remove it"):
            told.open()
