"""One port for newcomers and members: the name of the server that a client asks for decides, and gives no rights."""

import runpy
import select
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.x509 import DNSName, SubjectAlternativeName
from grpc_health.v1.health_pb2 import HealthCheckResponse
from hypothesis import given
from hypothesis import strategies as st

from coordinator.front.connection_limits import ConnectionLimits
from coordinator.front.forwarder import Connection, Forwarder
from coordinator.front.server_name import MOST_BYTES, server_name
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import Settings
from federation.transport.channels import mutual_channel, server_verified_channel
from federation.trust.certificates import fingerprint, pem
from federation.trust.identity import client_uri
from federation.trust.join_string import JoinStringFields
from federation.trust.keys import new_tls_key, private_key_pem
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import AttendRequest, AttendResponse, Hello, RenewRequest
from federation.v1.federation_pb2_grpc import FederationStub
from tests.federation.trust.scene import Authority
from tests.paths import ROOT
from tests.running import SECONDS, Running, made_home, refused, running
from worker.connection.enroll import enroll
from worker.home import WorkerHome

# Members are given an address, for which TLS asks for no name; newcomers a name.
HOSTS = ["127.0.0.1", "members.example"]
NEWCOMERS = "localhost"


def limited(patch: pytest.MonkeyPatch, **limits: float) -> None:
    """Connections have these limits, and the usual ones otherwise."""
    usual = ConnectionLimits.for_descriptors
    patch.setattr(ConnectionLimits, "for_descriptors", lambda count: usual(count)._replace(**limits))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:  # no limit ends what the front listener should end by itself
        limited(patch, first_byte_seconds=1e6, idle_seconds=1e6, verified_seconds=1e6)
        with running(tmp_path_factory.mktemp("one") / "home", hosts=HOSTS, enrollment_host=NEWCOMERS) as made:
            patch.undo()
            yield made


def client_hello(name: str | None) -> bytes:
    """What a TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def hello_of_grpc(target: str) -> bytes:
    """What gRPC says first."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def first() -> bytes:
            connection, _ = listener.accept()
            with connection:
                data = b""
                while server_name(data) is None:
                    data += connection.recv(1 << 16)
                return data

        said = pool.submit(first)
        credentials = grpc.ssl_channel_credentials()
        with grpc.secure_channel(f"{target}:{listener.getsockname()[1]}", credentials) as channel:
            FederationStub(channel).Renew.future(RenewRequest(), timeout=SECONDS)
            return said.result(SECONDS)


def test_the_name_is_read_as_soon_as_the_message_is_whole() -> None:
    for hello, name in (
        (client_hello("Fl.Example.org"), "fl.example.org"),
        (client_hello(None), ""),
        (client_hello("127.0.0.1"), ""),
        (hello_of_grpc("localhost"), "localhost"),
        (hello_of_grpc("127.0.0.1"), ""),
    ):
        assert [server_name(hello[:length]) for length in range(len(hello))] == [None] * len(hello)
        assert server_name(hello) == server_name(hello + b"more") == name


@given(st.binary(max_size=200), st.integers(0, 600), st.integers(0, 255))
def test_no_bytes_confuse_the_reader(junk: bytes, at: int, value: int) -> None:
    server_name(b"\x16\x03\x01" + junk)
    hello = bytearray(HELLO)
    hello[min(at, len(hello) - 1)] = value
    assert isinstance(server_name(bytes(hello)), str | None)


HELLO = client_hello("fl.example.org")


def test_a_message_that_announces_more_than_a_record_holds_names_nobody() -> None:
    assert server_name(b"\x16\x03\x01" + MOST_BYTES.to_bytes(2)) == ""
    assert server_name(b"\x16\x03\x01\x00\x04\x02\x00\x00\x00") == "", "not a ClientHello"


def test_a_member_joins_and_attends_at_one_port(served: Running, tmp_path: Path) -> None:
    port = served.coordinator.federation_port
    assert served.coordinator.enrollment_port == port
    join = JoinStringFields((f"{NEWCOMERS}:{port}",), fingerprint(served.home.ca), served.join_secret("ann"), "ann")
    member = enroll(WorkerHome(tmp_path / "ann"), join).member
    assert member.address == f"127.0.0.1:{port}"
    with member.channel() as channel:
        (welcome,) = first_words(channel)
        assert welcome.WhichOneof("message") == "welcome"


def first_words(channel: grpc.Channel) -> list[AttendResponse]:
    """The first message of an attendance."""
    call = FederationStub(channel).Attend(iter([AttendRequest(hello=Hello(software="test"))]), timeout=SECONDS)
    try:
        return [next(call)]
    finally:
        call.cancel()


def test_who_asks_for_the_newcomers_name_can_only_enroll_whatever_it_shows(served: Running) -> None:
    """gRPC's server does not even ask for a certificate there, so a member's own counts for nothing."""
    port, ca = served.coordinator.federation_port, pem(served.home.ca)
    applicant, answer = served.enroll("bob")
    keys: dict[str, Any] = {"key": private_key_pem(applicant.tls_key), "certificate": answer.certificate}
    for channel in (
        server_verified_channel(f"{NEWCOMERS}:{port}", ca),
        mutual_channel(f"{NEWCOMERS}:{port}", ca=ca, **keys),
    ):
        with channel, refused("UNAUTHENTICATED", "certificate-unknown"):
            first_words(channel)


@pytest.mark.parametrize("kind", ["none", "of another authority", "expired"])
def test_who_asks_for_another_name_must_show_a_valid_certificate(kind: str, served: Running) -> None:
    port, ca = served.coordinator.federation_port, pem(served.home.ca)
    key, now = new_tls_key(), datetime.now(UTC)
    options = [("grpc.ssl_target_name_override", "members.example")]
    if kind == "none":
        channel = server_verified_channel(f"127.0.0.1:{port}", ca, options)
    else:
        other = kind == "of another authority"
        authority = Authority("test") if other else Authority("test", served.home.ca, served.home.ca_key)
        began, uris = now if other else now - timedelta(days=2), [client_uri("test", "eve")]
        certificate = authority.issue(uris, key=key, now=began, lifetime=timedelta(days=1))
        pair: dict[str, Any] = {"key": private_key_pem(key), "certificate": pem(certificate)}
        channel = mutual_channel(f"127.0.0.1:{port}", ca=ca, options=options, **pair)
    with channel:
        for call in (lambda: first_words(channel), lambda: EnrollmentStub(channel).Enroll(EnrollRequest(), timeout=9)):
            with refused("UNAVAILABLE", "unreachable"):  # TLS has ended the connection
                call()


def test_a_revoked_certificate_and_one_that_is_not_on_record_are_refused(served: Running) -> None:
    with served.certified("carl", known=False) as channel, refused("UNAUTHENTICATED", "certificate-unknown"):
        first_words(channel)
    with served.member("dora") as channel:
        first_words(channel)
        served.command("revoke", "dora", "--yes")
        with refused("UNAUTHENTICATED", "certificate-revoked"):
            first_words(channel)


def test_a_handshake_that_comes_in_pieces_is_waited_for_and_half_of_one_ends(served: Running) -> None:
    address = ("127.0.0.1", served.coordinator.federation_port)
    with socket.create_connection(address, timeout=SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(HELLO), 50):
            connection.sendall(HELLO[start : start + 50])
        assert connection.recv(1) == b"\x16", "the server has answered the whole"
    with socket.create_connection(address, timeout=SECONDS) as connection:
        connection.sendall(HELLO[:100])
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_the_containers_health_check_asks_for_the_newcomers_name(served: Running) -> None:
    check = runpy.run_path(str(ROOT / "docker" / "healthcheck.py"))
    serves = check["coordinator_serves"]
    assert serves(served.home.directory, answers=False)
    served.run(served.coordinator.health.set("", HealthCheckResponse.NOT_SERVING))
    try:
        assert not serves(served.home.directory, answers=False)
        assert serves(served.home.directory, answers=True)  # Kubernetes does not restart it
    finally:
        served.run(served.coordinator.health.set("", HealthCheckResponse.SERVING))


def test_while_half_a_handshake_is_there_the_process_is_not_woken() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        forwarder = Forwarder([], theirs, {}, ConnectionLimits(16, 8), "fl.example.org")
        with socket.create_connection(listener.getsockname()) as far, listener.accept()[0] as public:
            connection = Connection(1, public, "127.0.0.1", "both", 0.0)
            for start in range(0, len(HELLO), 100):
                far.sendall(HELLO[start : start + 100])
                assert select.select([public], [], [], SECONDS)[0], "there is more"
                seen = public.recv(MOST_BYTES, socket.MSG_PEEK)
                if not forwarder._decide(connection, seen):
                    assert not select.select([public], [], [], 0)[0]
            assert connection.service == "newcomers"
            assert public.recv(MOST_BYTES) == HELLO, "nothing was taken from the connection"


def test_half_a_handshake_has_the_time_of_a_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, first_byte_seconds=0.2)
    with (
        running(tmp_path / "home", hosts=HOSTS, enrollment_host=NEWCOMERS) as made,
        socket.create_connection(("127.0.0.1", made.coordinator.federation_port), timeout=SECONDS) as connection,
    ):
        connection.sendall(HELLO[:100])
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"enrollment_host": "10.0.0.1"}, "'10.0.0.1' is not a host name: TLS asks for servers by name"),
        ({"enrollment_host": "join example"}, "'join example' is not a host name"),
        ({"enrollment_host": "B.example", "hosts": ["a.example", "b.Example"]}, "it is none of hosts"),
        ({"enrollment_host": "b.example", "enrollment_port": 7444}, "goes without enrollment_port"),
    ],
)
def test_a_name_that_cannot_tell_newcomers_apart_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(CoordinatorHomeError, check=lambda error: problem in str(error)):
        Settings.check({"federation_id": "test", **values}, "coordinator.toml")


def test_the_second_name_is_in_the_certificate_and_the_ports_are_one(tmp_path: Path) -> None:
    home = made_home(tmp_path / "home", now=datetime.now(UTC), hosts=HOSTS, enrollment_host="Join.Example")
    names = home.server.extensions.get_extension_for_class(SubjectAlternativeName).value
    assert "join.example" in names.get_values_for_type(DNSName)
    home.note_ports(7443, 7443)
    assert home.ports() == (7443, 7443)
