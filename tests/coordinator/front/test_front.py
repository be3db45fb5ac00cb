"""The front listener by itself: its process, real sockets, and in gRPC's place a server that echoes."""

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.front import listener
from coordinator.front.forwarder import Forwarder
from coordinator.front.listener import host_of
from coordinator.front.places import Places
from tests.coordinator.front.scene import HELLO, ROOM, Fronted, descriptors, ended, received
from tests.running import SECONDS, wait_for


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where temporary files go: no path of a socket may be as long."""
    long = tmp_path / ("x" * 200)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    return long


@pytest.fixture
def one(request: pytest.FixtureRequest) -> Iterator[Fronted]:
    """A front with the limits that the test is marked with; with ROOM, if it is not."""
    made = Fronted(ROOM._replace(**getattr(request, "param", {})))
    yield made
    made.close()


def limited(**limits: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", [limits], indirect=True, ids=["limited"])


def test_bytes_pass_in_both_directions_and_so_does_the_end(one: Fronted) -> None:
    data = HELLO + random.Random(1).randbytes(8 << 20)
    connection = one.connect()

    def send() -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    assert received(connection, len(data) + 1) == data
    assert connection.recv(1) == b""
    sender.join()
    assert [host_of(peer) for peer in one.inner.peers] == ["127.0.0.1"]


def test_a_reader_that_stops_stops_the_writer_and_then_everything_arrives(one: Fronted) -> None:
    connection = one.greeted()
    one.inner.reading.clear()
    connection.settimeout(0.2)
    data = random.Random(2).randbytes(64 << 20)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < len(data):
            sent += connection.send(data[sent : sent + (1 << 16)])
    assert 0 < sent < len(data)  # what is under way is bounded
    one.inner.reading.set()
    connection.settimeout(SECONDS)
    assert received(connection, sent) == data[:sent]


def test_a_reset_passes_through_and_everything_is_released(one: Fronted) -> None:
    idle = one.greeted()
    before = descriptors(one.process)
    for reset in (True, False):
        connection = one.greeted()
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait_for(lambda: descriptors(one.process) == before, "the descriptors to be released")
    assert not ended(idle)


@limited(first_byte_seconds=0.1)
def test_what_is_no_tls_and_what_says_nothing_reaches_nobody(one: Fronted) -> None:
    plain, silent = one.connect(data=b"GET / HTTP/1.1\r\n\r\n"), one.connect()
    wait_for(lambda: ended(plain), "plain HTTP to be hung up on")
    wait_for(lambda: ended(silent), "a silent connection to be ended")
    wait_for(lambda: one.refused == [("127.0.0.1", "limit:idle", 1)], "the report")
    assert one.inner.peers == []


@limited(verified_seconds=1.0)
def test_a_connection_that_shows_no_certificate_in_time_is_ended_and_a_verified_one_stays(one: Fronted) -> None:
    member, stranger = one.greeted(), one.greeted()
    one.verify(1, "fedpareto://test/client/a")
    wait_for(lambda: ended(stranger), "the stranger to be ended")
    assert not ended(member)


@limited(unverified_per_address=4, unverified=8)
def test_a_crowd_from_one_address_keeps_nobody_else_out(one: Fronted) -> None:
    member = one.greeted()
    one.verify(1, "fedpareto://test/client/a")
    crowd = [one.greeted("127.0.0.2") for _ in range(6)]
    wait_for(lambda: ended(crowd[1]), "the oldest of the crowd to be closed")
    assert ended(crowd[0])
    assert not any(map(ended, crowd[2:]))
    others = [one.greeted(f"127.0.0.{host}") for host in (3, 4, 5, 6, 7)]  # one more than there are places
    wait_for(lambda: ended(crowd[2]), "the largest crowd to make room")
    assert not any(map(ended, [member, *crowd[3:], *others]))
    assert one.refused[0] == ("127.0.0.2", "limit:connections", one.refused[0][2])


@limited(per_member=2)
def test_a_member_has_so_many_connections_and_its_oldest_one_ends(one: Fronted) -> None:
    connections = [one.greeted() for _ in range(4)]
    for number in (1, 2, 3):
        one.verify(number, "fedpareto://test/client/a")
    one.verify(4, "fedpareto://test/client/b")
    wait_for(lambda: ended(connections[0]), "the oldest to be closed")
    assert not any(map(ended, connections[1:]))
    wait_for(lambda: one.refused == [("fedpareto://test/client/a", "limit:connections", 1)], "the report")


@pytest.mark.parametrize("half_a_line", [False, True])
def test_the_process_is_started_again_on_the_same_port_however_the_connection_to_it_broke(
    one: Fronted, monkeypatch: pytest.MonkeyPatch, half_a_line: bool
) -> None:
    monkeypatch.setattr(listener, "RESTART_SECONDS", 0.0)
    connection, first = one.greeted(), one.process
    if half_a_line:
        one.run(one.hear(b'{"actor": "192'))
    else:
        os.kill(first, signal.SIGSTOP)
        one.verify(1, "fedpareto://test/client/a")  # which the process does not read any more: a reset follows
    os.kill(first, signal.SIGKILL)
    one.replaced(first, connection)


def test_a_process_that_cannot_be_started_is_tried_again(one: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "RESTART_SECONDS", 0.0)
    connection, failures = one.greeted(), [OSError(errno.EMFILE, "Too many open files")] * 2
    start = subprocess.Popen

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    before = descriptors(os.getpid())
    first = one.process
    os.kill(first, signal.SIGKILL)
    one.replaced(first, connection).close()
    assert not failures
    wait_for(lambda: descriptors(os.getpid()) <= before, "the descriptors to be released")


def test_a_process_that_hangs_is_killed_and_replaced_and_the_log_says_so(
    one: Fronted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "BEAT_SECONDS", 0.05)
    connection, first = one.greeted(), one.process
    os.kill(first, signal.SIGSTOP)
    one.replaced(first, connection)
    assert "the front listener does not answer (State: T (stopped)): it is killed" in caplog.text
    assert "the front listener was killed by SIGKILL, and every connection ended with it" in caplog.text


def test_a_process_that_slept_with_the_whole_machine_is_not_killed(
    one: Fronted, caplog: pytest.LogCaptureFixture
) -> None:
    connection, front = one.greeted(), one.front
    os.kill(one.process, signal.SIGSTOP)
    one.pass_time(3600.0)
    os.kill(one.process, signal.SIGCONT)
    answered = front._answered
    wait_for(lambda: front._answered > answered + 1, "two more answers")
    assert not ended(connection)
    assert not caplog.text


def test_a_process_that_fails_again_and_again_is_started_less_and_less_often(
    one: Fronted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = one.paused(monkeypatch)
    for _ in range(6):
        one.replace()
    assert starts == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert "it is started again in 10 s; it has failed 6 times in a row" in caplog.text
    one.front._answered = listener.STEADY_BEATS
    one.replace()
    assert starts[-1] == 1.0
    one.greeted()


def test_reports_that_the_database_keeps_waiting_do_not_hide_that_the_process_answers(one: Fronted) -> None:
    gate = asyncio.Event()
    one.front._refused = lambda *_: gate.wait()  # type: ignore[assignment]
    one.run(one.hear(b'{"actor": "192.0.2.7", "reason": "limit:idle", "times": 1}\n'))
    answered = one.front._answered
    wait_for(lambda: one.front._answered > answered + 1, "two more answers")
    one._loop.call_soon_threadsafe(gate.set)


def test_gives_up_on_a_coordinator_that_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not Forwarder([], theirs, {}, ROOM, "", unheard_seconds=0.0).run()
        ours.close()
        assert Forwarder([], theirs, {}, ROOM, "", unheard_seconds=60.0).run()


def test_a_replaced_process_has_its_sockets_in_no_directory_and_gives_no_number_again(long: Path, one: Fronted) -> None:
    assert not list(long.iterdir())
    one.greeted()
    one.replace()
    one.greeted()
    assert [peer.rpartition("/")[2] for peer in one.inner.peers] == ["1@127.0.0.1", f"{(1 << 32) + 1}@127.0.0.1"]


def test_signals_to_the_whole_group_do_not_end_the_process_before_the_coordinator(one: Fronted) -> None:
    connection = one.greeted()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(one.process, number)
    connection.sendall(b"still there")
    assert received(connection, 11) == b"still there"


def test_the_largest_group_loses_its_oldest_holder_when_all_places_are_taken() -> None:
    places: Places[int] = Places(3, 4)
    assert [places.add(holder, group) for holder, group in enumerate("aabb")] == [None] * 4
    assert places.add(4, "a") == 0  # of two groups that are equally large, the one that came first
    assert places.add(5, "c") == 1
    assert [places.add(6, "b"), places.add(7, "b")] == [2, 3]
    places.remove(4)
    places.remove(4)
    assert places.add(8, "b") is None
    assert places.add(9, "b") == 6
    assert sorted(places) == [5, 7, 8, 9]


@pytest.mark.parametrize(
    ("peer", "host"),
    [("unix-abstract:9f2c/17@192.0.2.7", "192.0.2.7"), ("unix-abstract:9f/3@2001%3Adb8%3A%3A1", "2001:db8::1")],
)
def test_a_peer_is_named_by_its_public_address(peer: str, host: str) -> None:
    assert host_of(peer) == host
