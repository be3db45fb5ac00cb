"""A coordinator as shipped, with runs that an administrator looks at."""

import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from federation.digests import digest
from federation.v1.admin_pb2 import ApproveClientRequest, RunHeader, SubmitRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Layout, Tensor, to_bytes
from fedpareto.cli.show import tables
from tests.harness import Attending, Federation, Member, federation, here

LAYOUT = Layout((Tensor("a", (3, 4)), Tensor("b", (5,))))
Finished = tuple[str, tuple[str, ...]]  # the id of a run, and its clients
SPEC = 'task = "toy"\nrounds = 2\n[algorithm]\nname = "fedmgda+"\n[selection]\nminimum = 3\n'


@pytest.fixture(scope="module")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One coordinator for all tests of this file; each test has runs and clients of its own."""
    with federation(tmp_path_factory.mktemp("admin"), "--approval") as made:
        made.serve()
        yield made


@pytest.fixture
def stub(centre: Federation) -> Iterator[AdminStub]:
    with centre.administrator() as channel:
        yield AdminStub(channel)


def enroll(centre: Federation, stub: AdminStub, client_id: str) -> Member:
    member = centre.enroll(client_id)
    stub.ApproveClient(ApproveClientRequest(client_id=client_id, key_id=member.key_id))
    return member


def submit(centre: Federation, name: str, spec: str = SPEC, *options: str) -> str:
    model = centre.directory / "model.safetensors"
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    model.write_bytes(to_bytes(LAYOUT, vector))
    return centre.submit(name, spec, "--model", str(model), *options)


def shown(picture: Any, width: int = tables.WIDTH) -> str:
    """What commands print of a table."""
    ours = tables.console()
    settings: dict[str, Any] = {"color_system": None, "markup": ours._markup, "emoji": ours._emoji}
    screen = Console(file=io.StringIO(), width=width, **settings)
    with screen.capture() as capture:
        screen.print(picture)
    return capture.get()


def command(centre: Federation, *arguments: object, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = here("admin", "--home", str(centre.home / "admin"), *map(str, arguments), cwd=centre.directory)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def play(streams: dict[Member, Attending], assignments: int) -> None:
    """Lets every member answer this number of assignments honestly."""
    for _ in range(assignments):
        for member, stream in streams.items():
            member.answer(stream.assignment(), seed=hash(member.files.client_id) % 1000)


@contextmanager
def attending(centre: Federation, stub: AdminStub, *clients: str) -> Iterator[dict[Member, Attending]]:
    """Members that were approved, with their streams."""
    members = [enroll(centre, stub, client) for client in clients]
    streams = {member: member.attend(toy=10) for member in members}
    yield streams
    for member, stream in streams.items():
        stream.close()
        member.channel.close()


def conduct(centre: Federation, stub: AdminStub, name: str, clients: tuple[str, ...]) -> str:
    """A whole run of two rounds, with members played by hand; returns its id."""
    with attending(centre, stub, *clients) as streams:
        run_id = submit(centre, name)
        play(streams, 4)  # train and evaluate, twice
        centre.wait_completed(run_id)
    return run_id


@pytest.fixture(scope="module")
def finished(centre: Federation) -> Finished:
    clients = ("alpha", "beta", "gamma")
    with centre.administrator() as channel:
        return conduct(centre, AdminStub(channel), "finished", clients), clients


def requests(spec: str, data: bytes, *, model: str = "", size: int | None = None) -> Iterator[SubmitRunRequest]:
    header = RunHeader(
        spec=spec.encode(), model=model or digest(data), model_bytes=len(data) if size is None else size, paused=True
    )
    yield SubmitRunRequest(header=header)
    for start in range(0, len(data), 7):
        yield SubmitRunRequest(chunk=data[start : start + 7])


def good_model() -> bytes:
    return to_bytes(LAYOUT, np.ones(LAYOUT.size, dtype=np.float32))
