"""Several coordinators on one PostgreSQL know together who attends, and a member has one stream to all of them."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import event, update

from coordinator.clock import utc_now
from coordinator.cluster.announcements import Announcements, announcements_of
from coordinator.fault_state import FaultState
from coordinator.rounds.fleets.attendances import Attendances, SharedAttendances, attendances_of
from coordinator.rounds.fleets.consents import Offers
from coordinator.rounds.fleets.presence import AttendanceStream, Presence
from federation.refusals import Refusal
from federation.work.closing import SiteClosing
from storage.database import Database
from storage.models import AttendanceRow, Client, CoordinatorProcess
from storage.states import ClientState
from tests.conftest import empty_database
from tests.running import SECONDS, wait_for

LONG = timedelta(days=1)


@pytest.fixture(scope="module", params=["postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with empty_database(request, tmp_path_factory.mktemp("database")) as made:
        database = Database.open(made)
        database.migrate()
        with database.begin() as session:
            for number in range(30):
                name, key = f"client-{number}", secrets.token_bytes(32)
                of_key = {"signing_key": key, "key_id": key.hex()}
                session.add(Client(client_id=name, state=ClientState.ACTIVE, enrolled=utc_now(), **of_key))
        database.close()
        yield made


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@dataclass
class Site:
    """What a coordinator knows of who attends."""

    name: str
    database: Database
    announcements: Announcements
    presence: Presence
    attendances: SharedAttendances
    loop: asyncio.AbstractEventLoop
    changes: int = 0

    def entered(self, client: str, closing: SiteClosing | None = None) -> AttendanceStream:
        """A stream that has its number."""
        stream = AttendanceStream(
            client_id=client, tasks={}, objectives={}, loop=self.loop, last_seen=utc_now(), closing=closing
        )
        with self.database.begin() as session:
            self.attendances.enter(session, stream)
        return stream

    def attend(self, client: str, *, closing: SiteClosing | None = None) -> AttendanceStream:
        """A stream begins, as in `Attend`."""
        stream = self.entered(client, closing)
        self.presence.join(stream)
        return stream

    def sign(self, ago: timedelta = timedelta()) -> None:
        """Gives a sign of life, as the registry does, or has given the last one some time ago."""
        with self.database.begin() as session:
            at = datetime.now(UTC) - ago
            session.merge(CoordinatorProcess(coordinator=self.name, started=at, last_seen=at))

    def row(self, client: str) -> AttendanceRow:
        with self.database.read() as session:
            return session.get_one(AttendanceRow, client)

    def said(self, stream: AttendanceStream) -> object:
        """The next message of a stream."""
        return asyncio.run_coroutine_threadsafe(stream.outbox.get(), self.loop).result(SECONDS)

    def sees_closing(self, client: str, closing: SiteClosing | None) -> None:
        """Waits until this is why the client's site begins no work."""
        wait_for(lambda: self.presence.attending()[client].closing == closing, f"{client}: {closing}")

    def sees(self, *clients: str) -> None:
        """Waits until just these attend."""
        wait_for(lambda: set(self.presence.attending()) == set(clients), f"{clients} to attend")


@contextmanager
def site(url: str, loop: asyncio.AbstractEventLoop, *, deaf: bool = False) -> Iterator[Site]:
    """A coordinator; one that is deaf neither announces nor hears anything."""
    database, faults, name = Database.open(url), FaultState(), secrets.token_hex(16)
    announcements = announcements_of(database, name, faults)
    presence = Presence(announcements)
    offers = Offers("test", Ed25519PrivateKey.generate())
    given: dict[str, Any] = {"coordinator": name, "clock": utc_now, "lease_seconds": 600.0}
    attendances = attendances_of(database, presence, announcements, offers, faults, **given)
    assert isinstance(attendances, SharedAttendances)
    made = Site(name, database, announcements, presence, attendances, loop)
    made.sign()
    if not deaf:
        announcements.start()
    attendances.start()
    try:
        yield made
    finally:
        for stream in presence.streams().values():
            presence.leave(stream, utc_now())
        attendances.stop()
        announcements.stop()
        database.close()


@pytest.fixture
def start(url: str, loop: asyncio.AbstractEventLoop) -> Iterator[Callable[..., Site]]:
    """Starts coordinators that nobody attends."""
    with psycopg.connect(url, autocommit=True) as session:
        session.execute("DELETE FROM attendances")
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(site(url, loop, **options))


Start = Callable[..., Site]


def all_see(sites: Sequence[Site], *clients: str, left: Mapping[str, datetime]) -> None:
    """Each of these coordinators sees that just these clients attend, and when others have left."""
    for each in sites:
        each.sees(*clients)
        assert each.presence.left() == left


def test_every_coordinator_sees_who_attends_where_who_is_closed_or_paused_and_who_has_left(start: Start) -> None:
    first, second, third = sites = start(), start(), start()
    stream = first.attend("client-1")
    paused = SiteClosing(None, paused=True)
    second.attend("client-2", closing=paused)
    all_see(sites, "client-1", "client-2", left={})
    assert set(first.presence.streams()) == {"client-1"}
    assert third.presence.attending()["client-2"].closing == paused
    until = utc_now() + LONG
    for closing in (SiteClosing(until), paused, SiteClosing(until, paused=True), None):
        first.presence.heartbeat(stream, utc_now(), "", 0.0, closing)
        third.sees_closing("client-1", closing)
    at = utc_now()
    first.presence.leave(stream, at)
    all_see(sites, "client-2", left={"client-1": at})
    third.attend("client-1")
    all_see(sites, "client-1", "client-2", left={})


def test_a_member_that_attends_at_another_coordinator_ends_its_older_stream_and_has_not_left(start: Start) -> None:
    first, second = start(), start()
    older = first.attend("client-1")
    second.sees("client-1")
    newer = second.attend("client-1")
    end = first.said(older)
    assert isinstance(end, Refusal)
    assert end.reason == "superseded"
    assert newer.number == older.number + 1
    assert first.presence.streams() == {}
    first.presence.leave(older, utc_now())  # its call ends: the newer stream does not
    again = first.attend("client-2")  # written after it
    second.sees("client-1", "client-2")
    for each in (first, second):
        assert set(each.presence.attending()) == {"client-1", "client-2"}
        assert each.presence.left() == {}
    assert second.row("client-1").left is None
    assert newer.outbox.empty()
    assert again.outbox.empty()


def test_of_two_streams_that_begin_at_the_same_time_the_one_with_the_higher_number_stays(start: Start) -> None:
    first, second = start(), start()
    with ThreadPoolExecutor() as pool:
        streams = list(pool.map(lambda each: each.attend("client-1"), [first, second] * 4))
    assert sorted(stream.number for stream in streams) == list(range(1, 9))
    (newest,) = (stream for stream in streams if stream.number == 8)

    def only_newest() -> bool:
        return [stream for each in (first, second) for stream in each.presence.streams().values()] == [newest]

    wait_for(only_newest, "the older ones to end")


def test_a_stream_that_is_taken_in_after_one_with_a_higher_number_ends_and_the_other_one_stays(start: Start) -> None:
    first = start()
    older, newer = first.entered("client-1"), first.attend("client-1")
    first.presence.join(older)
    end = first.said(older)
    assert isinstance(end, Refusal)
    assert end.reason == "superseded"
    first.presence.leave(older, utc_now())  # its call ends
    assert first.presence.streams() == {"client-1": newer}
    assert first.presence.left() == {}
    assert newer.outbox.empty()


def test_without_any_announcement_a_look_each_second_sees_the_same(start: Start) -> None:
    first, second = start(deaf=True), start(deaf=True)
    older = first.attend("client-1")
    second.sees("client-1")
    second.attend("client-1")
    assert isinstance(first.said(older), Refusal)
    second.attend("client-2")
    first.sees("client-1", "client-2")


def test_members_of_a_coordinator_without_a_sign_of_life_have_left_when_it_was_noticed(start: Start) -> None:
    first, second = start(), start()
    first.attend("client-1")
    second.sees("client-1")
    before = utc_now()
    first.sign(ago=timedelta(hours=2))
    second.sees()
    assert before <= second.presence.left()["client-1"] <= utc_now()  # so that its grace lasts
    first.sees("client-1")  # as far as it knows
    first.sign()  # its database was away
    second.sees("client-1")
    assert second.presence.left() == {}


def test_members_of_a_coordinator_that_was_dead_at_the_start_left_a_lease_after_its_last_sign(start: Start) -> None:
    first = start()
    first.attend("client-1")
    first.sign(ago=timedelta(hours=2))
    second = start()
    assert second.presence.attending() == {}
    ago = utc_now() - second.presence.left()["client-1"]
    assert timedelta(hours=2) - timedelta(seconds=601) < ago < timedelta(hours=2)
    with second.database.begin() as session:
        session.delete(session.get_one(CoordinatorProcess, first.name))
    assert start().presence.left() == {"client-1": first.row("client-1").last_seen}


def test_a_member_that_comes_back_to_another_coordinator_after_its_own_died_attends(start: Start) -> None:
    first, second, third = start(), start(), start()
    first.attend("client-1")
    first.sign(ago=timedelta(hours=2))
    third.sees()
    second.attend("client-1")
    third.sees("client-1")
    assert third.presence.left() == {}


def test_a_database_that_is_away_ends_no_stream_and_what_it_lost_is_written_again(start: Start) -> None:
    first, second = start(), start()
    stream, gone = first.attend("client-1"), first.attend("client-2")
    second.sees("client-1", "client-2")
    with first.database.begin() as session:  # as long as it lasts, nothing can be written
        session.connection().exec_driver_sql("LOCK TABLE attendances IN EXCLUSIVE MODE")
        end_others(first)
        first.presence.leave(gone, at := utc_now())
        session.connection().exec_driver_sql("DELETE FROM attendances WHERE client_id = 'client-1'")
    second.sees("client-1")
    assert second.presence.left() == {"client-2": at}
    assert stream.outbox.empty()
    assert (first.row("client-1").stream, first.row("client-1").coordinator) == (stream.number, first.name)


def end_others(each: Site) -> None:
    """Ends the sessions of all coordinators that wait for the table, or listen."""
    with psycopg.connect(each.database.engine.url.render_as_string(hide_password=False).replace("+psycopg", "")) as own:
        own.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND state <> 'idle in transaction'"
        )


def test_the_signs_of_life_of_all_members_are_written_in_one_statement(start: Start) -> None:
    first = start(deaf=True)
    streams = [first.attend(f"client-{number}") for number in range(30)]
    wait_for(lambda: len(first.attendances._written) == 30, "the streams to be known")
    written: list[str] = []
    event.listen(first.database.engine, "before_cursor_execute", lambda *given: written.append(given[2]))
    last = utc_now() + LONG
    for stream in streams:
        first.presence.heartbeat(stream, last, "", 0.0)
    wait_for(lambda: first.row("client-7").last_seen == last, "the signs of life")
    assert {first.row(stream.client_id).last_seen for stream in streams} == {last}
    assert len([statement for statement in written if statement.startswith("UPDATE attendances")]) == 1


def test_a_stop_records_who_has_left(start: Start, url: str) -> None:
    first, second = start(), start()
    stream = first.attend("client-1")
    first.presence.leave(stream, at := utc_now())
    first.attendances.stop()
    assert second.row("client-1").left == at


def test_a_change_that_somebody_else_made_to_the_table_by_hand_harms_nothing(start: Start) -> None:
    first, second = start(), start()
    first.attend("client-1")
    with first.database.begin() as session:
        session.execute(update(AttendanceRow).values(coordinator="f" * 32))  # there is none of that name
    second.sees()
    first.sees("client-1")
    second.attend("client-1")
    first.sees("client-1")
    second.sees("client-1")


def test_alone_on_its_database_a_coordinator_numbers_no_streams_and_starts_no_thread() -> None:
    alone, before = Attendances(), threading.active_count()
    alone.start()
    assert threading.active_count() == before
    alone.stop()
