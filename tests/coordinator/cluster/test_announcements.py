"""What one coordinator announces reaches the others on its PostgreSQL, and nothing that is no announcement does."""

import logging
import queue
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from coordinator.cluster.announcements import (
    CHANNEL,
    Announcement,
    AnnouncementKind,
    Announcements,
    SharedAnnouncements,
    announcements_of,
)
from coordinator.fault_state import FaultState
from storage.database import Database
from tests.conftest import Postgres
from tests.running import SECONDS, wait_for

RUN, REPLY = AnnouncementKind.RUN, AnnouncementKind.REPLY
Heard = queue.SimpleQueue[Announcement | None]
Two = tuple[Announcements, Heard, Announcements, Heard]


@contextmanager
def coordinator(url: str) -> Iterator[tuple[Announcements, Heard]]:
    """The announcements of a coordinator that listens, and those that it hears."""
    heard = Heard()
    with closing(Database.open(url)) as database:
        announcements = announcements_of(database, secrets.token_hex(16), FaultState())
        announcements.heard.listen(heard.put)
        announcements.start()
        assert heard.get(timeout=SECONDS) is None  # it listens now; the listener must look up what was announced before
        try:
            yield announcements, heard
        finally:
            announcements.stop()


@pytest.fixture
def two(url: str) -> Iterator[Two]:
    with ExitStack() as stack:
        yield *stack.enter_context(coordinator(url)), *stack.enter_context(coordinator(url))


def test_an_announcement_reaches_each_other_coordinator_and_not_its_own(url: str) -> None:
    with ExitStack() as stack:
        (first, own), (second, heard), (_, also) = (stack.enter_context(coordinator(url)) for _ in range(3))
        first.announce(RUN, "a-run")
        for other in (heard, also):
            assert other.get(timeout=SECONDS) == Announcement(RUN, "a-run")
        second.announce(AnnouncementKind.MESSAGES, "b-run")  # comes after what the first one would have heard of itself
        assert own.get(timeout=SECONDS) == Announcement(AnnouncementKind.MESSAGES, "b-run")


def test_each_reply_is_counted_also_when_many_are_announced_at_once(two: Two) -> None:
    first, _, _, heard = two

    total = 0
    with ThreadPoolExecutor(4) as pool:
        for _ in range(200):
            pool.submit(first.announce, REPLY, "a-run")
        while total < 200:
            announcement = heard.get(timeout=SECONDS)
            assert announcement is not None
            assert announcement == Announcement(REPLY, "a-run", announcement.times)
            total += announcement.times
    assert total == 200


def test_what_is_no_announcement_is_ignored_and_logged_once(
    url: str, two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    _, heard, _, also = two
    sender = "0" * 32
    payloads = [
        "", " ", "run", "x" * 7_000, f"{sender} run a-run", f"{sender} run a-run 1 2", f"{sender} run a-run -1",
        f"{sender} run a-run 1\n", f"{sender} run a-run 1e3", f"{sender} run a-run 9999999", f"{sender} walk a-run 1",
        f"{sender} run ../etc 1", f"{sender} run {'a' * 64} 1", f"{sender} run a\u00e4 1", f"{sender} run a-run \u0661",
        f"{sender[1:]} run a-run 1", f"{sender.replace('0', 'Z')} run a-run 1", "{};DROP TABLE runs",
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING), psycopg.connect(url, autocommit=True) as session:
        for payload in payloads:
            session.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))
        session.execute("SELECT pg_notify(%s, %s)", (CHANNEL, f"{sender} reply a-run 3"))
        for news in (heard, also):
            assert news.get(timeout=SECONDS) == Announcement(REPLY, "a-run", 3)
    assert heard.empty()
    ignored = [record.message for record in caplog.records if "no announcement" in record.message]
    assert len(ignored) == 2, ignored  # a line of each coordinator, whose time limits the next one
    assert max(map(len, ignored)) < 200


def test_when_its_database_is_back_a_coordinator_looks_at_everything_and_listens_again(
    url: str, postgres: Postgres, two: Two
) -> None:
    first, heard, second, also = two
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with psycopg.connect(postgres.get_uri(), autocommit=True) as session:
        session.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        for announcements in (first, second):
            wait_for(lambda: announcements._faults._noted, "the fault to be noted")  # type: ignore[attr-defined]  # noqa: B023
        assert heard.empty()
        assert also.empty()
        session.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    for other in (heard, also):
        assert other.get(timeout=SECONDS) is None
    first.announce(RUN, "later")
    assert also.get(timeout=SECONDS) == Announcement(RUN, "later")


AWAY = OperationalError("SELECT 1", None, Exception("the server closed the connection"))


@pytest.mark.parametrize("error", [RuntimeError(), AWAY], ids=["a bug", "the database is away"])
def test_a_listener_that_fails_keeps_no_other_from_hearing_and_the_log_tells_why(
    two: Two, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    first, heard, second, _ = two

    def fails(_: Announcement | None) -> None:
        raise error

    first.heard._listeners.insert(0, fails)
    second.announce(RUN, "a-run")
    assert heard.get(timeout=SECONDS) == Announcement(RUN, "a-run")
    expected = {"waits for its database": error is AWAY, "was not taken in": error is not AWAY}
    assert {words: words in caplog.text for words in expected} == expected


def test_what_was_announced_before_a_stop_is_sent(url: str) -> None:
    with coordinator(url) as (_, heard):
        with coordinator(url) as (stopping, _):
            for number in range(20):
                stopping.announce(RUN, f"run-{number}")
        assert {heard.get(timeout=SECONDS) for _ in range(20)} == {Announcement(RUN, f"run-{n}") for n in range(20)}


def test_with_sqlite_nobody_is_told_and_no_thread_is_started(tmp_path: Path) -> None:
    with closing(Database.open(f"sqlite:///{tmp_path / 'test.db'}")) as database:
        before = threading.active_count()
        alone = announcements_of(database, secrets.token_hex(16), FaultState())
        alone.start()
        alone.announce(RUN, "a-run")
        assert type(alone) is Announcements
        assert alone.look_seconds is None
        assert threading.active_count() == before
        alone.stop()


def test_a_coordinator_that_never_started_stops(url: str) -> None:
    with closing(Database.open(url)) as database:
        SharedAnnouncements(database, secrets.token_hex(16), FaultState()).stop()
