"""A coordinator that cannot start ends all that it has started; so does one that is stopped."""

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator import server, startup
from coordinator.alerts.maker import AlertMaker
from coordinator.audit.sequencer import Sequencer
from coordinator.cluster.announcements import Announcements, SharedAnnouncements
from coordinator.cluster.registry import Registry
from coordinator.front.listener import Front
from coordinator.home import CoordinatorHome
from coordinator.lease_keeper import LeaseKeeper
from coordinator.members.logged_rights import LoggedRights
from coordinator.monitor import Monitor
from coordinator.rounds.conductors import Conductors
from coordinator.rounds.fleets.attendances import Attendances, SharedAttendances
from coordinator.rounds.fleets.returning import ReturningMembers
from coordinator.rounds.housekeeping import Housekeeper
from coordinator.server import PortTaken, serving
from coordinator.services.health import HealthService
from storage.blob_directory import DirectoryStore
from storage.database import Database, DatabaseBusy
from storage.models import CoordinatorProcess
from storage.reserve import Reserve
from tests.conftest import Postgres, postgresql_database
from tests.running import made_home

# What a start calls, in its order.
CALLS: list[tuple[Any, str]] = [
    (startup, "check_follows"),
    (startup, "lock_database"),
    (Reserve, "hold"),
    (startup, "start_up"),
    (startup, "officers_caution"),
    (Sequencer, "sequence"),
    (LoggedRights, "problems"),
    (DirectoryStore, "probe"),
    (server, "descriptor_limit"),
    (Front, "listen"),
    (Announcements, "start"),
    (Attendances, "start"),
    (Housekeeper, "start"),
    (Conductors, "start"),
    (ReturningMembers, "expect"),
    (AlertMaker, "start"),
    (Registry, "note_addresses"),
    (Front, "start"),
    (server, "serves_tls12"),
    (HealthService, "set"),
    (Monitor, "__init__"),
    (CoordinatorHome, "note_ports"),
]
STEPS = {f"{where.__name__.rpartition('.')[2]}.{name}": (where, name) for where, name in CALLS}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> CoordinatorHome:
    """A coordinator that has served once: the libraries keep some descriptors open after that."""
    made = made_home(tmp_path_factory.mktemp("start") / "home", now=datetime.now(UTC))
    asyncio.run(served(made))
    return made


@pytest.fixture(scope="module")
def shared(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorHome]:
    """The same, on a database that other coordinators may use."""
    with postgresql_database(postgres) as url:
        made = made_home(tmp_path_factory.mktemp("shared") / "home", now=datetime.now(UTC), database=url)
        asyncio.run(served(made))
        yield made


async def served(home: CoordinatorHome) -> None:
    async with serving(home):
        pass


def running_things() -> Counter[str]:
    """The threads, the child processes and the open files of this process, without what gRPC keeps for itself."""
    found = Counter(str(thread) for thread in threading.enumerate() if "_poll_wrapper" not in thread.name)
    for children in Path("/proc/self/task").glob("*/children"):
        found.update(children.read_text().split())
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            file = os.readlink(f"/proc/self/fd/{name}")
            found[file] += file.startswith("/")
    return found


def check_nothing_is_left(home: CoordinatorHome) -> None:
    """Another process may have the database and the ports."""
    assert not home.ports_file.exists()
    assert not [*home.directory.rglob("reserve")]
    for port in home.ports():
        socket.create_server(("127.0.0.1", port)).close()
    with closing(home.open_database()) as database:
        database.lock_exclusive()
        with database.read() as session:
            assert session.scalars(select(CoordinatorProcess)).all() == []


def check_ends_all(
    home: CoordinatorHome, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, *, half_way: bool
) -> None:
    """Starts it, but a call fails; `half_way`: after it has done its work."""
    original = getattr(where, name)

    def fails(*arguments: Any, **more: Any) -> Any:
        if half_way:
            original(*arguments, **more)
        raise ArithmeticError("planted")

    before = running_things()
    monkeypatch.setattr(where, name, fails)
    with pytest.raises(ArithmeticError, match="planted"):
        asyncio.run(served(home))
    monkeypatch.undo()
    assert running_things() - before == Counter()
    check_nothing_is_left(home)


@pytest.mark.parametrize("step", STEPS)
def test_a_start_that_fails_ends_all_that_it_has_started(
    home: CoordinatorHome, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    where, name = STEPS[step]
    check_ends_all(home, monkeypatch, where, name, half_way=where in (Housekeeper, Conductors, AlertMaker))


@pytest.mark.parametrize("where", [SharedAnnouncements, SharedAttendances, LeaseKeeper, Conductors])
def test_so_it_does_as_one_of_several_coordinators(
    shared: CoordinatorHome, monkeypatch: pytest.MonkeyPatch, where: type[object]
) -> None:
    check_ends_all(shared, monkeypatch, where, "start", half_way=True)


def test_one_of_several_that_cannot_share_the_lock_leaves_no_sign_of_life(
    shared: CoordinatorHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_ends_all(shared, monkeypatch, Database, "lock_shared", half_way=False)


def test_no_run_goes_on_while_the_port_is_taken_and_the_next_start_finds_all_in_order(
    home: CoordinatorHome, caplog: pytest.LogCaptureFixture
) -> None:
    _, port = home.ports()
    before = running_things()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTaken, match=f"cannot listen on .*:{port}"):
        asyncio.run(served(home))
    assert running_things() - before == Counter()
    check_nothing_is_left(home)
    asyncio.run(served(home))
    assert running_things() - before == Counter()
    check_nothing_is_left(home)


def test_a_start_on_a_database_that_another_process_has_leaves_that_one_alone(home: CoordinatorHome) -> None:
    before = running_things()

    def second() -> None:
        asyncio.run(served(home))

    async def first() -> None:
        async with serving(home):
            with pytest.raises(DatabaseBusy, match="in use by another coordinator"):
                await asyncio.to_thread(second)
            assert home.ports_file.exists()
            assert (home.directory / "reserve").exists()

    asyncio.run(first())
    assert running_things() - before == Counter()
