"""Crowds of strangers at the ports of a real coordinator process, while a member works."""

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from federation.digests import digest
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.federation_pb2 import AttendRequest, Heartbeat
from federation.vectors import Layout, Tensor, to_bytes
from tests.harness import SECONDS, Attending, Federation, Member, federation, wait_for

MODEL = to_bytes(Layout((Tensor("layer.weight", (8, 5)),)), np.zeros(40, np.float32))
SPEC = b"""
name = "endless"
task = "anything"
rounds = 100000
seed = 1
algorithm.name = "fedavg"
train.deadline_seconds = 900
evaluate.every = 0
"""
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit} // 2, {limit}))
from fedpareto.cli.main import main
main()
"""  # the coordinator raises the soft limit to the hard one


def work(member: Member) -> Attending:
    """Attends, and answers whatever comes, in a thread."""
    stream = member.attend(anything=10)

    def answer() -> None:
        with contextlib.suppress(AssertionError, grpc.RpcError, ValueError):
            while True:
                member.answer(stream.assignment())
                stream.say(AttendRequest(heartbeat=Heartbeat()))

    threading.Thread(target=answer, daemon=True).start()
    return stream


def submit(made: Federation) -> None:
    header = admin.RunHeader(spec=SPEC, model=digest(MODEL), model_bytes=len(MODEL))
    with made.administrator() as channel:
        requests = [admin.SubmitRunRequest(header=header), admin.SubmitRunRequest(chunk=MODEL)]
        AdminStub(channel).SubmitRun(iter(requests), timeout=SECONDS)


def rounds(made: Federation) -> int:
    return int(made.query("select count(*) from rounds where state = 'COMPLETED'")[0][0])


def goes_on(made: Federation, count: int) -> None:
    """Waits until the given number of further rounds have been completed."""
    before = rounds(made)
    wait_for(lambda: rounds(made) >= before + count, f"{count} more rounds")
    assert made.query("select state, reason from runs") == [("RUNNING", "")]


@contextlib.contextmanager
def crowd(ports: list[int], count: int, addresses: int) -> Iterator[None]:
    """Idle connections from several loopback addresses; every other one has sent the beginning of a TLS handshake."""
    with contextlib.ExitStack() as held:
        for number in range(count):
            source = (f"127.0.0.{2 + number % addresses}", 0)
            try:
                made = socket.create_connection(
                    ("127.0.0.1", ports[number % 2]), timeout=SECONDS, source_address=source
                )
            except ConnectionResetError:  # closed before this side had seen it opened
                continue
            held.enter_context(made)
            if number // 2 % 2:
                with contextlib.suppress(OSError):  # it has been closed already
                    made.sendall(b"\x16\x03\x01\x02\x00\x01")
        yield


def ports(made: Federation) -> list[int]:
    noted = json.loads((made.home / "ports.json").read_text())
    return [noted["federation"], noted["enrollment"]]


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
    assert "EMFILE" not in made.coordinator.text
    assert "Too many open files" not in made.coordinator.text


@pytest.mark.full
def test_with_5000_idle_connections_more_than_half_the_rounds_are_done(made: Federation) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made.serve(program=LIMITED.format(limit=hard))
    stream = work(made.enroll("worker"))
    submit(made)
    goes_on(made, 20)

    def pace(seconds: float = 15.0) -> int:
        before = rounds(made)
        time.sleep(seconds)
        return rounds(made) - before

    undisturbed = pace()
    with crowd(ports(made), 5000, addresses=10):
        disturbed = pace()
        goes_on(made, 20)
    after = pace()
    stream.close()
    print(f"rounds in 15 s: {undisturbed} without the crowd, {disturbed} with it, {after} after it")
    assert disturbed > undisturbed / 2
    assert after > undisturbed / 2
