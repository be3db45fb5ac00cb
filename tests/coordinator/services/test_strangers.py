"""Crowds of strangers at the ports of a real coordinator process, while a member works."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinator.services.scene import goes_on, pace, ports, submit, work
from tests.harness import SECONDS, Federation, federation

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit} // 2, {limit}))
from fedpareto.cli.main import main
main()
"""  # the coordinator raises the soft limit to the hard one


@contextlib.contextmanager
def crowd(ports: list[int], count: int, addresses: int) -> Iterator[None]:
    """Idle connections from several loopback addresses; every other one has sent the beginning of a TLS handshake."""
    with contextlib.ExitStack() as held:
        for number in range(count):
            source = (f"127.0.0.{2 + number % addresses}", 0)
            address = ("127.0.0.1", ports[number % 2])
            try:
                made = socket.create_connection(address, timeout=SECONDS, source_address=source)
            except ConnectionResetError:  # closed before this side had seen it opened
                continue
            held.enter_context(made)
            if number // 2 % 2:
                with contextlib.suppress(OSError):  # it has been closed already
                    made.sendall(b"\x16\x03\x01\x02\x00\x01")
        yield


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Federation]:
    with federation(tmp_path) as made:
        yield made


def test_idle_connections_of_strangers_take_no_descriptor_that_a_round_needs(made: Federation) -> None:
    made.serve(program=LIMITED.format(limit=400))
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 3)
    with crowd(ports(made), 400, addresses=5):
        goes_on(made, 10)
        newcomer = made.enroll("newcomer")  # also over the enrollment port, through the crowd
        newcomer.attend(nothing=1).close()
        goes_on(made, 3)
    goes_on(made, 3)
    stream.close()
    refused = made.query("select actor, sum(times) from audit_log where action = 'connect' group by actor")
    assert {actor for actor, _ in refused} == {f"peer 127.0.0.{host}" for host in range(2, 7)}
    assert "EMFILE" not in made.serving.text
    assert "Too many open files" not in made.serving.text


@pytest.mark.full
def test_with_5000_idle_connections_more_than_half_the_rounds_are_done(made: Federation) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made.serve(program=LIMITED.format(limit=hard))
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 20)

    undisturbed = pace(made, 15.0)
    with crowd(ports(made), 5000, addresses=10):
        disturbed = pace(made, 15.0)
        goes_on(made, 20)
    after = pace(made, 15.0)
    stream.close()
    print(f"rounds in 15 s: {undisturbed} without the crowd, {disturbed} with it, {after} after it")
    assert disturbed > undisturbed / 2
    assert after > undisturbed / 2
