"""Alerts of a real coordinator, delivered to real servers: by threads, and by the command, which is killed."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select

from coordinator.alerts import rows
from coordinator.alerts.facts import AlertFact
from coordinator.alerts.maker import AlertMaker
from federation.monitoring.events import Events
from fedpareto.cli.admin.client import opened_calls
from fedpareto.delivery import deliverer
from fedpareto.delivery.deliverer import ROOM, Deliverer, RecordsInUse, locked
from fedpareto.delivery.targets_file import Targets
from fedpareto.web.console import federation_reader
from storage.models import Alert
from storage.states import AlertKind, AlertSeverity
from tests.fedpareto.delivery.scene import TIMES, Receiver, receivers, targets_file
from tests.harness import Process, wait_for
from tests.paths import PROGRAMS
from tests.running import command
from tests.stage import Stage


@pytest.fixture
def home(stage: Stage) -> Iterator[Path]:
    """The administrator's directory, without records of deliveries; the coordinator has no alerts."""
    directory = stage.served.home.directory / "admin"
    with stage.served.database.begin() as session:
        session.execute(delete(Alert))
    yield directory
    for path in (directory / ROOM).glob("*.json"):
        path.unlink()


def begin(stage: Stage, name: str, *, over: bool = False) -> None:
    """An alert begins, of a kind that the coordinator does not end by itself; it has ended at once if it is `over`."""
    with stage.served.database.begin() as session:
        session.add(
            Alert(
                kind=AlertKind.NORM_OUTLIER,
                severity=AlertSeverity.WARNING,
                client_id=name,
                message=f"the update of {name} was long",
                remedy="ask",
                began=datetime.now(UTC),
                ended=datetime.now(UTC) if over else None,
            )
        )


def end(stage: Stage, name: str) -> None:
    with stage.served.database.begin() as session:
        session.scalars(select(Alert).where(Alert.client_id == name)).one().ended = datetime.now(UTC)


class Delivering:
    """A deliverer at work, and what it has said."""

    def __init__(self, home: Path, path: Path) -> None:
        self.out = io.StringIO()
        targets = Targets.load(path)
        self.deliverer = Deliverer(home / ROOM, "test", targets, Events(self.out), {}, TIMES)
        self.deliverer._away_seconds = 0.0
        source = partial(opened_calls, home, proxy="direct", served=True)
        self.thread = threading.Thread(target=self.deliverer.run, args=(source,), daemon=True)

    def events(self, name: str) -> list[Any]:
        return [each for each in map(json.loads, self.out.getvalue().splitlines()) if each["event"] == name]


@contextmanager
def delivering(home: Path, path: Path) -> Iterator[Delivering]:
    with locked(home / ROOM):
        made = Delivering(home, path)
        made.thread.start()
        try:
            yield made
        finally:
            made.deliverer.stop()
            made.thread.join(60)


def heard(receiver: Receiver, *expected: str) -> None:
    """Waits until a receiver has heard of these, "NAME STATE", in any order, and of nothing else."""

    def told() -> list[str]:
        return sorted(f"{each['client_id'] or each['kind']} {each['state']}" for each in receiver.documents())

    wait_for(lambda: len(told()) >= len(expected), f"{expected}, not {told()}")
    assert told() == sorted(expected)


def test_receivers_that_hang_fail_or_flood_delay_no_other_and_no_line_says_where_they_are(
    stage: Stage, home: Path
) -> None:
    begin(stage, "ann")
    with receivers(4) as made:
        good, hangs, fails, floods = made
        hangs.status, fails.status, floods.size = 0, 500, 200_000
        path = targets_file(home, *(each.address for each in made))
        with delivering(home, path) as at_work:
            heard(good, "ann begins")
            heard(floods, "ann begins")
            begin(stage, "ben")
            heard(good, "ann begins", "ben begins")
            end(stage, "ann")
            heard(good, "ann begins", "ben begins", "ann ended")
            begin(stage, "cleo", over=True)  # between two looks
            heard(good, "ann begins", "ben begins", "ann ended", "cleo ended")
            wait_for(lambda: len(fails.requests) > 5 and hangs.requests, "attempts")
            assert fails.documents()[0]["id"] == good.documents()[0]["id"]
            before, fails.status = len(fails.requests), 200
            wait_for(lambda: len(fails.requests) >= before + 3, "what waits to be delivered")
            assert {"ann", "ben"} <= {each["client_id"] for each in fails.documents()}
        failed = at_work.events("failed")
    assert {each["target"] for each in failed} == {"b", "c"}
    assert len(failed) == 2, "each is reported once"
    said = at_work.out.getvalue() + "".join(each.read_text() for each in (home / ROOM).glob("*.json"))
    assert "hidden" not in said
    assert "whsec" not in said
    assert "127.0.0.1" not in said


def test_each_kind_of_alert_that_a_coordinator_has_is_told_from_its_beginning_to_its_end(
    stage: Stage, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AlertMaker, "look_at_time", lambda _: None)  # it would end what is not so
    severities = list(AlertSeverity)
    facts = [
        AlertFact(
            kind=kind,
            severity=severities[number % 3],
            client_id=f"member-{number}",
            message=f"{kind} has begun",
            remedy="ask",
            began=datetime.now(UTC),
        )
        for number, kind in enumerate(AlertKind)
    ]

    def hold(facts: list[AlertFact]) -> None:
        with stage.served.database.begin() as session:
            rows.reconcile(session, None, list(AlertKind), facts, datetime.now(UTC))

    with receivers(1) as [good], delivering(home, targets_file(home, good.address)):
        hold(facts)
        wait_for(lambda: len(good.told()) == len(AlertKind), "the beginnings")
        hold([])
        wait_for(lambda: len(good.told()) == 2 * len(AlertKind), "the ends")
    assert sorted(good.told()) == sorted((kind, state) for kind in AlertKind for state in ("begins", "ended"))
    expected = [(fact.kind, fact.severity.lower(), fact.client_id, fact.message, fact.remedy) for fact in facts]
    fields = ("kind", "severity", "client_id", "message", "remedy")
    for state in ("begins", "ended"):
        told = [tuple(each[name] for name in fields) for each in good.documents() if each["state"] == state]
        assert sorted(told) == sorted(expected)


def test_of_more_alerts_than_a_look_reads_the_newest_are_told_and_the_others_later(
    stage: Stage, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliverer, "MOST_ALERTS", 2)
    with receivers(1) as [good]:
        path = targets_file(home, good.address)
        for name in ("ann", "ben", "cleo"):
            begin(stage, name)
        with delivering(home, path) as at_work:
            heard(good, "ben begins", "cleo begins")
            begin(stage, "dora")
            heard(good, "ben begins", "cleo begins", "dora begins")
            end(stage, "dora")
            heard(good, "ben begins", "cleo begins", "dora begins", "dora ended")
            end(stage, "cleo")
            heard(good, "ben begins", "cleo begins", "dora begins", "dora ended", "cleo ended", "ann begins")
            assert len(at_work.events("many")) >= 1


@pytest.mark.usefixtures("home")
def test_the_first_page_says_that_there_are_more_alerts_than_it_reads(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ann", "ben", "cleo"):
        begin(stage, name)
    assert "4 things need you." in stage.served.command("status")
    monkeypatch.setattr(federation_reader, "MOST_ALERTS", 2)
    said = " ".join(stage.served.command("status").split())
    assert "More than 3 things need you; `fedpareto admin alerts --last 6` lists more." in said


def test_a_test_message_goes_to_each_receiver_and_says_which_has_not_taken_it(home: Path) -> None:
    path = home / "notify.toml"
    path.unlink(missing_ok=True)
    assert "there is no" in str(command("admin", "--home", home, "notify", code=1).exception)
    with receivers(2) as [good, fails]:
        targets_file(home, good.address, fails.address)
        said = command("admin", "--home", home, "notify", "--test").stdout
        assert said == "a: it has taken the message\nb: it has taken the message\n"
        fails.status = 500
        done = command("admin", "--home", home, "notify", "--test", "--json", code=1)
        assert good.told() == [("TEST", "begins")] * 2
    assert json.loads(done.stdout)["targets"] == [
        {"target": "a", "taken": True, "problem": ""},
        {"target": "b", "taken": False, "problem": "it answered 500"},
    ]
    assert str(done.exception) == "1 of 2 receivers did not take the message: b"
    path.chmod(0o644)
    assert "others can read it" in str(command("admin", "--home", home, "notify", code=1).exception)


def test_that_no_coordinator_answers_is_told_once_also_after_a_restart_and_what_a_restore_loses_has_ended(
    stage: Stage, home: Path
) -> None:
    begin(stage, "ann")
    away = "COORDINATOR_AWAY"
    with receivers(1) as [good]:
        path = targets_file(home, good.address)
        with delivering(home, path):
            begin(stage, "ben")
            heard(good, "ann begins", "ben begins")
            stage.stop()
            heard(good, "ann begins", "ben begins", f"{away} begins")
        with stage.served.database.begin() as session:
            session.execute(delete(Alert).where(Alert.client_id == "ben"))  # it began after the backup
        with delivering(home, path) as at_work:
            wait_for(lambda: at_work.events("away"), "the coordinator to be missed")
            stage.start()
            heard(good, "ann begins", "ben begins", f"{away} begins", f"{away} ended", "ben ended")
            assert at_work.events("answers")
            end(stage, "ann")
            wait_for(lambda: len(good.requests) == 6, "the end")
    assert good.documents()[-1]["client_id"] == "ann"
    [told] = [each for each in good.documents() if (each["kind"], each["state"]) == (away, "begins")]
    assert (told["severity"], told["message"][:31]) == ("critical", "no coordinator has answered sin")


@pytest.mark.full
@pytest.mark.parametrize("point", ["alert-found", "alert-noted", "alert-sent", "alert-delivered"])
def test_a_command_that_is_killed_tells_each_alert_at_least_once_and_twice_only_under_one_id(
    stage: Stage, home: Path, tmp_path: Path, point: str
) -> None:
    begin(stage, "ann")
    with receivers(1) as [good]:
        targets_file(home, good.address)
        words = ["admin", "--home", str(home), "notify", "--json"]
        killed = Process([str(PROGRAMS / "crashing.py"), point, *words], tmp_path / "killed.log")
        killed.wait_killed()
        before = len(good.requests)
        assert before == (1 if point in ("alert-sent", "alert-delivered") else 0)
        begin(stage, "ben")
        process = Process(["-m", "fedpareto", *words], tmp_path / "second.log")
        wait_for(lambda: {each["client_id"] for each in good.documents()} == {"ann", "ben"}, "both alerts")
        process.wait_for_text('"delivered"', count=1 if point == "alert-delivered" else 2)
        with (
            pytest.raises(RecordsInUse, match=rf"another process \({process.popen.pid}\) delivers alerts"),
            locked(home / ROOM),
        ):
            pass
        assert process.stop() == 0, process.text
        ids = [each["id"] for each in good.documents() if each["client_id"] == "ann"]
    assert len(set(ids)) == 1
    assert len(ids) == (2 if point == "alert-sent" else 1)
