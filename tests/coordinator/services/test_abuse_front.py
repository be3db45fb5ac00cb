"""Every kind of abuse of the public ports at once, while workers train: each ends as documented, and nothing else does.

What one kind does alone is in `coordinator/front/test_front.py`, `fedpareto/cli/test_access.py`,
`coordinator/members/test_limits.py` and `test_role_matrix.py`.
"""

import contextlib
import itertools
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from coordinator.members.access.callers import RULES
from federation.transport.channels import server_verified_channel
from federation.trust.admin_files import AdminFiles
from federation.trust.identity import Role
from federation.trust.keys import private_key_pem
from tests.coordinator.scene import Scene, attended, front_of
from tests.coordinator.services.scene import answer, expected, ports
from tests.harness import SECONDS, Member, wait_for

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # and empty settings
HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # of a ClientHello


def frame(kind: int, flags: int, stream: int, content: bytes = b"", length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return size.to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content


def drip() -> Iterator[bytes]:
    """A byte each second, of a handshake that never ends."""
    for byte in HALF + bytes(500):
        yield bytes([byte])
        threading.Event().wait(1.0)


# Bytes that are sent as they are. Their sender is shut out at once, or by the limits of an idle connection.
PLAIN: dict[str, Callable[[], Iterator[bytes]]] = {
    "nothing": lambda: iter(()),
    "HTTP/1": lambda: iter([b"GET / HTTP/1.1\r\n\r\n"]),
    "HTTP/2 without TLS": lambda: iter([PREFACE]),
    "SSL 2": lambda: iter([b"\x80\x2e\x01\x00\x02" + bytes(41)]),
    "a record that is too long": lambda: iter([b"\x16\x03\x01\xff\xff" + bytes(1 << 16)]),
    "an alert first": lambda: iter([b"\x15\x03\x03\x00\x02\x02\x28"]),
    "noise in a handshake": lambda: iter([HALF + random.Random(7).randbytes(600)]),
    "half a handshake": lambda: iter([HALF]),
    "a handshake in drops": drip,
}
# Bytes inside TLS, with a member's certificate, that make no call.
INSIDE: dict[str, Callable[[], Iterator[bytes]]] = {
    "no HTTP/2": lambda: iter([random.Random(8).randbytes(1 << 16)]),
    "a preface and silence": lambda: iter([PREFACE]),
    "a frame that is too long": lambda: iter([PREFACE, frame(0, 0, 1, bytes(1000), length=0xFFFFFF)]),
    "pings without end": lambda: itertools.chain([PREFACE], itertools.repeat(frame(6, 0, 0, bytes(8)) * 64, 400)),
    "settings without end": lambda: itertools.chain(
        [PREFACE], itertools.repeat(frame(4, 0, 0, struct.pack(">HI", 4, 65535)) * 64, 400)
    ),
    "headers without end": lambda: itertools.chain(
        [PREFACE, frame(1, 0, 1, b"\x82")], itertools.repeat(frame(9, 0, 1, b"\x00\x01a\x7f\x00" * 2000), 400)
    ),
    "a stream that was never opened": lambda: iter([PREFACE, frame(0, 1, 99, b"x"), frame(3, 0, 99, bytes(4))]),
}


def member_tls(member: Member, directory: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=member.files.ca.decode())
    chain = directory / "chain.pem"
    chain.write_bytes(private_key_pem(member.files.tls_key) + member.files.certificate)
    context.load_cert_chain(chain)
    context.set_alpn_protocols(["h2"])
    return context


def ends(made: socket.socket, pieces: Iterator[bytes]) -> bool:
    """Sends pieces, and reads until the other side ends the connection; False if it does not."""
    with made, contextlib.suppress(OSError):
        reader = threading.Thread(target=_read, args=(made,), daemon=True)
        reader.start()
        with contextlib.suppress(OSError):
            for piece in pieces:
                made.sendall(piece)
                if not reader.is_alive():
                    break
        reader.join(SECONDS)
        return not reader.is_alive()
    return True


def _read(made: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while made.recv(1 << 16):
            pass


def lines(made: Scene, member: Member, directory: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    tls = member_tls(member, directory)
    stranger = ssl.create_default_context(cadata=member.files.ca.decode())
    old = ssl.create_default_context(cadata=member.files.ca.decode())
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    def connect(port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=2 * SECONDS)

    def inside(port: int, context: ssl.SSLContext, pieces: Iterator[bytes]) -> bool:
        try:
            return ends(context.wrap_socket(connect(port), server_hostname="localhost"), pieces)
        except OSError:  # of the handshake
            return True

    def half_open(port: int) -> bool:
        plain = connect(port)
        plain.sendall(HALF)
        plain.shutdown(socket.SHUT_WR)
        return ends(plain, iter(()))

    for service, port in zip(("members", "newcomers"), ports(made.fed), strict=True):
        for name, pieces in PLAIN.items():
            yield f"{service}: {name}", lambda port=port, pieces=pieces: ends(connect(port), pieces())  # type: ignore[misc]
        yield f"{service}: half open", lambda port=port: half_open(port)  # type: ignore[misc]
        yield f"{service}: TLS 1.2", lambda port=port: inside(port, old, iter([PREFACE]))  # type: ignore[misc]
    members = ports(made.fed)[0]
    yield "members: no certificate", lambda: inside(members, stranger, iter([PREFACE]))
    for name, pieces in INSIDE.items():
        yield f"members: {name}", lambda pieces=pieces: inside(members, tls, pieces())  # type: ignore[misc]


def callers(made: Scene, member: Member) -> Iterator[tuple[str, set[str], Callable[[], grpc.Channel]]]:
    enrollment = f"localhost:{ports(made.fed)[1]}"
    yield "stranger", {"no certificate"}, lambda: server_verified_channel(enrollment, member.files.ca)
    yield "member", {"client"}, member.files.channel
    for role in Role:
        directory = made.fed.directory / role
        roles = ("--role", role, "--home", str(made.fed.home), "--out", str(directory))
        made.fed.fedpareto("coordinator", "admin", f"the-{role}", *roles)
        yield role, {"viewer", role}, lambda directory=directory: AdminFiles.load(directory).channel()  # type: ignore[misc]


@pytest.mark.full
def test_under_every_abuse_at_once_each_is_answered_as_documented_and_a_run_comes_to_the_same_model(
    tmp_path: Path,
) -> None:
    with attended(tmp_path) as made, ThreadPoolExecutor(100) as pool:
        calm, coordinator = made.fed.wait_completed(made.submit()), made.fed.serving
        member, front, abuse = made.fed.enroll("mallory"), front_of(coordinator), dict[str, Future[object]]()
        allowed = dict[str, set[str]]()
        for name, columns, channel in callers(made, member):
            allowed[name] = columns
            abuse[name] = pool.submit(lambda channel=channel: answers(channel()))  # type: ignore[misc]
        for name, act in lines(made, member, tmp_path):
            abuse[name] = pool.submit(act)
        for _ in range(3):
            made.completes(made.submit(), calm)
        found = {name: act.exception(2 * SECONDS) or act.result() for name, act in abuse.items()}
        for name, columns in allowed.items():
            assert found.pop(name) == {method: expected(method, columns) for method in RULES}, name
        assert {name: ended for name, ended in found.items() if ended is not True} == {}
        assert front_of(coordinator) == front, "it has served all the time"
        assert "Traceback" not in coordinator.text
        refused = sum(expected(method, columns)[1] == "role" for columns in allowed.values() for method in RULES)
        counted = "select coalesce(sum(times), 0) from audit_log where outcome = 'role'"
        wait_for(lambda: made.fed.query(counted)[0][0] == refused, f"{refused} refusals on record")
        closed = "select sum(times) from audit_log where action = 'connect' and outcome = 'limit:idle'"
        # Those that say nothing at both ports, and the silent preface; gRPC itself ends most of the others first.
        wait_for(lambda: (made.fed.query(closed)[0][0] or 0) >= 3, "the idle connections on record")


def answers(channel: grpc.Channel) -> dict[str, tuple[str, str]]:
    with channel:
        return {method: answer(channel, method) for method in RULES}
