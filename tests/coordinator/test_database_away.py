"""PostgreSQL restarts, loses a connection, or is taken by another coordinator, while a coordinator serves."""

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import InterfaceError, OperationalError

from fedpareto.processes.process_federation import COMMAND, ProcessError, serving
from storage.database import Database, DatabaseBusy
from storage.states import RoundState
from tests.coordinator.scene import NOT_SERVING, SERVING, begun, health, replied, with_constants
from tests.harness import federation
from tests.postgresql import Postgresql, end_sessions, postgresql
from tests.running import refused, wait_for
from tests.service_manager import listening
from tests.stage import Stage, reply, stage


@pytest.fixture(scope="module")
def server() -> Iterator[Postgresql]:
    """A PostgreSQL server of its own, which the tests stop and start."""
    with postgresql() as made:
        yield made


def locked(database: Database, url: str, sessions: str = "true") -> bool:
    """Ends these sessions of others, and tries to take their lock; False if the coordinator was faster."""
    end_sessions(url, sessions)
    try:
        database.lock_exclusive()
    except (DatabaseBusy, InterfaceError):
        return False
    return True


@pytest.fixture
def url(server: Postgresql, request: pytest.FixtureRequest) -> str:
    return server.create(f"test_{abs(hash(request.node.name)) % 10**9}")


@pytest.fixture
def away(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("coordinator.monitor.CHECK_SECONDS", 0.5)
    with stage(tmp_path / "coordinator", url) as made:
        yield made


@pytest.mark.full
def test_a_run_goes_on_after_its_database_was_restarted(
    away: Stage, server: Postgresql, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run, orders = begun(away, 2)
        server.stop()
        wait_for(lambda: health(away) == NOT_SERVING, "the health to tell")
        for player, order in orders.items():
            with refused("UNAVAILABLE", "database") as messages:
                player.reply(order)
            assert messages == ["the coordinator waits for its database; try again in a moment"]
        with refused("UNAVAILABLE", "database"):
            away.pause(run)
        server.start()
        wait_for(lambda: health(away) == SERVING, "the coordinator to go on")
        assert away.served.coordinator.record.database.holds_lock()
        reply(orders)
        away.play(run, *orders)
    assert [round_.state for round_ in away.rounds(run)] == [RoundState.COMPLETED] * 2
    told = [record for record in caplog.records if record.name.startswith("coordinator")]
    waiting = [record.message for record in told if record.levelno >= logging.ERROR]
    assert len(waiting) == 1, waiting
    assert waiting[0].startswith("the coordinator waits for its database (")
    assert [record.message for record in caplog.records if record.exc_info] == []


@pytest.mark.full
def test_sessions_that_the_server_ends_are_made_again_and_the_lock_is_taken_again(away: Stage, url: str) -> None:
    run, orders = begun(away)
    database = away.served.coordinator.record.database
    end_sessions(url)
    wait_for(database.holds_lock, "the lock to be taken again")
    for player, order in orders.items():
        wait_for(lambda: replied(player, order, unless="database"), "the reply to be taken")  # noqa: B023
    away.play(run, *orders)
    other = Database.open(url)
    with pytest.raises(DatabaseBusy, match="in use by another process: pid"):
        other.lock_exclusive()
    other.close()


@pytest.mark.full
def test_a_coordinator_whose_connection_broke_waits_for_another_one_that_is_starting(away: Stage, url: str) -> None:
    starting = Database.open(url)
    wait_for(lambda: locked(starting, url), "the lock")
    wait_for(lambda: health(away) == NOT_SERVING, "the health to tell")
    starting.close()
    wait_for(lambda: health(away) == SERVING, "the coordinator to go on")
    assert away.served.coordinator.record.database.holds_lock()


def test_a_lock_whose_connection_broke_unnoticed_by_the_server_is_taken_again(url: str) -> None:
    database = Database.open(url)
    database.lock_exclusive()
    lost, database._lock_connection = database._lock_connection, None  # the server still has it
    assert wait_for(lambda: taken(database), "the lock")
    assert database.holds_lock()
    assert lost is not None
    with pytest.raises(OperationalError, match=r"terminat|closed"):
        lost.execute(text("SELECT 1"))
    lost.close()
    assert not database.keep_lock()
    database.close()


def taken(database: Database) -> bool:
    try:
        return database.keep_lock()
    except InterfaceError:  # the old connection is being ended
        return False


def test_a_coordinator_ends_with_a_sentence_when_another_one_has_its_database(url: str, tmp_path: Path) -> None:
    with federation(tmp_path, "--database", url) as fed:
        served = fed.serve(program=with_constants("coordinator.monitor", CHECK_SECONDS=1.0, LOCK_SECONDS=1.0))
        other = Database.open(url)
        wait_for(lambda: locked(other, url, "application_name LIKE 'pid %'"), "the other to take the lock")
        assert served.popen.wait(60) == 1
        other.close()
    assert re.search(r"in use by another\s+process: pid", served.text), served.text
    assert "Traceback" not in served.text
    assert "Event loop is closed" not in served.text


def test_a_coordinator_that_starts_while_its_database_is_away_waits_for_it_and_then_serves(
    url: str, server: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with federation(tmp_path, "--database", url) as fed, listening(tmp_path / "notify") as manager:
        arguments = ["coordinator", "serve", "--home", str(fed.home)]
        ports = fed.home / "ports.json"
        ports.write_text('{"pid": 1}')  # of a process that was killed
        server.stop()
        try:
            stopped, late = (
                fed.spawn(name, [*program, *arguments])  # a log each: it says that this one handles signals
                for name, program in (
                    ("stopped", COMMAND),
                    ("late", ("-c", with_constants("coordinator.server", START_SECONDS=0.1))),
                )
            )
            with monkeypatch.context() as patch:
                for name, value in manager.variables.items():
                    patch.setenv(name, value)
                waiting = fed.spawn("waiting", [*COMMAND, *arguments])
            for process in (stopped, waiting):
                wait_for(lambda: "the coordinator waits for its database (" in process.text, "the log to tell")  # noqa: B023
            os.kill(stopped.popen.pid, signal.SIGTERM)
            assert (stopped.popen.wait(60), late.popen.wait(60)) == (0, 1), (stopped.text, late.text)
            assert "the database does not answer as it should" in late.text
            assert not ports.exists()
            with pytest.raises(ProcessError, match="the database does not answer"):  # other commands do not wait
                fed.fedpareto("coordinator", "restored", "--home", str(fed.home))
            assert set(manager.drain()) == {"WATCHDOG=1"}, "systemd neither takes it for ready nor restarts it"
        finally:
            server.start()
        wait_for(lambda: serving(fed.home) == waiting.popen.pid, "the coordinator to serve")
        assert manager.until("READY=1") <= {"WATCHDOG=1"}
        try:
            server.stop()
            wait_for(lambda: waiting.text.count("the coordinator waits for its database (") == 2, "the log to tell")
            manager.drain()
            assert [manager.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
        finally:
            server.start()
        os.kill(waiting.popen.pid, signal.SIGTERM)
        assert waiting.popen.wait(60) == 0
        assert manager.until("STOPPING=1") <= {"WATCHDOG=1"}
    for process in (stopped, late, waiting):
        assert "Traceback" not in process.text, process.text


def test_a_coordinator_that_was_replaced_while_its_database_was_away_ends(
    away: Stage, server: Postgresql, url: str
) -> None:
    with psycopg.connect(url, autocommit=True) as session:
        session.execute("UPDATE coordinators SET coordinator = 'another'")
    end_sessions(url)
    monitoring = away.served.coordinator.monitoring
    wait_for(monitoring.done, "the coordinator to give up")
    assert "another coordinator had the database meanwhile" in str(monitoring.exception())
    assert away.look(lambda session: session.scalar(text("SELECT coordinator FROM coordinators"))) == "another"
