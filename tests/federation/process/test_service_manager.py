"""A service manager, such as systemd, hears that a process serves, and that its event loop runs."""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from federation.process.service_manager import ServiceManager
from tests.service_manager import listening


@contextmanager
def running() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def test_an_event_loop_that_hangs_feeds_the_watchdog_no_longer(tmp_path: Path) -> None:
    with listening(tmp_path / "notify") as manager, running() as loop:
        told = ServiceManager.of({**manager.variables})
        loop.call_soon_threadsafe(told.feed_from, loop)
        assert [manager.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
        hangs, goes_on = threading.Event(), threading.Event()
        loop.call_soon_threadsafe(hangs.set)
        loop.call_soon_threadsafe(goes_on.wait, 60)
        assert hangs.wait(60)
        assert manager.falls_silent()
        goes_on.set()
        assert manager.next() == "WATCHDOG=1"


def test_a_process_tells_what_is_due_and_only_where_it_was_started_by_a_service_manager(tmp_path: Path) -> None:
    times = iter((0.0, 0.0, 19.0, 20.0, 20.0, 30.0, 40.0, 40.0))  # read again where a message is due
    with listening(f"@fedpareto-{secrets.token_hex(8)}") as manager:
        told = ServiceManager(manager.address, 60.0, clock=lambda: next(times))
        told.ready()
        for _ in range(5):
            told.feed()
        told.stopping()
        assert [manager.next() for _ in range(5)] == ["READY=1", *["WATCHDOG=1"] * 3, "STOPPING=1"]
        others = {"WATCHDOG_PID": str(os.getpid() + 1)}
        for changes in (others, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "soon"}, {"NOTIFY_SOCKET": ""}):
            ServiceManager.of({**manager.variables, **changes}).feed()
        environment = {"HOME": "/", "WATCHDOG_PID": str(os.getpid()), **manager.variables}
        mine = ServiceManager.of(environment)
        mine.ready()
        mine.feed()
        assert [manager.next() for _ in range(2)] == ["READY=1", "WATCHDOG=1"]
        assert environment == {"HOME": "/"}, "a child process is not to speak for its parent"


def test_a_service_manager_that_is_gone_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = (tmp_path / "gone", tmp_path / ("long" * 40))
    with caplog.at_level(logging.WARNING):
        for path in paths:
            ServiceManager(str(path)).ready()
    told = [record.message.partition(": ")[0] for record in caplog.records]
    assert told == [f"cannot send READY=1 to the service manager at {path}" for path in paths]
