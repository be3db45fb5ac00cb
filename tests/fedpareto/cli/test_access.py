import gzip
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.members.access.callers import RULES
from coordinator.server import MAX_MESSAGE_BYTES
from federation.transport.channels import mutual_channel, refusal_from_rpc_error, server_verified_channel
from federation.trust.admin_files import AdminFiles
from federation.trust.certificates import pem
from federation.trust.identity import Role, client_uri
from federation.trust.keys import new_tls_key, private_key_pem
from federation.v1 import admin_pb2, enrollment_pb2, federation_pb2
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from federation.v1.federation_pb2 import AttendResponse, FetchBlobRequest
from federation.v1.federation_pb2_grpc import FederationStub
from fedpareto.processes.forked import Forked
from tests.federation.trust.scene import Authority
from tests.harness import Attending, Member, fedpareto, python
from tests.paths import ROOT
from tests.running import SECONDS, Applicant, Running, refused, running, wait_for


def attending(member: Member) -> Attending:
    """An attendance stream that the coordinator has taken; it stays open until the coordinator ends it."""
    stream = member.attend()
    welcome = stream.next()
    assert isinstance(welcome, AttendResponse)
    assert welcome.WhichOneof("message") == "welcome"
    return stream


def fetch(channel: grpc.Channel, digest: str = "") -> object:
    """A call that a member may make."""
    return next(FederationStub(channel).FetchBlob(FetchBlobRequest(digest=digest), timeout=SECONDS))


def greet(channel: grpc.Channel) -> object:
    """A call that anybody may make, with a join string that nobody has made."""
    return EnrollmentStub(channel).Enroll(Applicant().request(b"x"), timeout=SECONDS)


def handshake(port: int, version: ssl.TLSVersion, member: Path) -> str | None:
    """Shakes hands as a member, so that nothing but the version can stand in the way."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(member / "ca.pem")
    context.load_cert_chain(member / "login.pem")
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        assert connection.recv(1)  # the server's settings frame: it has accepted the certificate too
        return connection.version()


def test_every_rpc_of_the_contract_has_a_rule_and_the_contract_names_its_role() -> None:
    ours = {name: rule for name, rule in RULES.items() if name.startswith("/federation.")}
    modules = (admin_pb2, enrollment_pb2, federation_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    assert set(ours) == {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    proto = (ROOT / "proto/federation/v1/admin.proto").read_text()
    pairs = re.findall(r"\((viewer|operator|security-officer)\)\..*?rpc (\w+)", proto, re.DOTALL)
    stated = {rpc: role for role, rpc in pairs}
    for name, rule in ours.items():
        service, rpc = name.split(".")[-1].split("/")
        assert rule.kind == {"Admin": "admin", "Federation": "client", "Enrollment": "anyone"}[service]
        assert rule.role == (stated[rpc] if service == "Admin" else None), rpc


@pytest.mark.full
def test_a_process_that_would_serve_tls_1_2_serves_nothing(tmp_path: Path) -> None:
    program = """
import asyncio, os, sys
os.environ.pop("GRPC_SSL_CIPHER_SUITES", None)
from datetime import UTC, datetime
from pathlib import Path
from coordinator.home import CoordinatorHome as Home
from coordinator.settings import Settings
from coordinator.server import serve
serve(Home.init(Path(sys.argv[1]), Settings.check({"federation_id": "test"}, "test"), now=datetime.now(UTC)))
"""
    assert "it would serve TLS 1.2" in python("-c", program, tmp_path / "home", code=1).stderr
    assert not (tmp_path / "home" / "ports.json").exists()


@pytest.mark.parametrize("port", ["federation_port", "enrollment_port"])
def test_tls_1_3_and_nothing_older(served: Running, port: str) -> None:
    number = getattr(served.coordinator, port)
    member = served.home.admin_dir
    assert handshake(number, ssl.TLSVersion.TLSv1_3, member) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        handshake(number, ssl.TLSVersion.TLSv1_2, member)


def test_a_call_without_a_certificate_at_the_enrollment_port_is_refused_and_on_record(served: Running) -> None:
    with served.newcomer() as channel, refused("UNAUTHENTICATED", "certificate-unknown"):
        AdminStub(channel).ListClients(admin_pb2.ListClientsRequest(), timeout=SECONDS)
    entry = served.refusals("ListClients")[-1]
    assert entry.outcome == "certificate-unknown"
    assert entry.actor in ("peer 127.0.0.1", "peer ::1")


def foreign(served: Running, *, ca: bytes) -> grpc.Channel:
    """A channel with a certificate of another CA, for a client of the same name in a federation of the same name."""
    other, key = Authority("test"), new_tls_key()
    pair: Any = {"key": private_key_pem(key), "certificate": pem(other.issue([client_uri("test", "a")], key=key))}
    return mutual_channel(served.address, ca=ca or pem(other.ca), **pair)


@pytest.mark.parametrize(
    ("reach", "why"),
    [
        (
            lambda at: server_verified_channel(at.address, pem(at.home.ca)),
            "did not accept your certificate",
        ),
        (lambda at: foreign(at, ca=pem(at.home.ca)), "another federation's CA"),
        (lambda served: foreign(served, ca=b""), "did not prove that it is this federation's coordinator"),
        (lambda served: server_verified_channel("127.0.0.1:1", pem(served.home.ca)), "no coordinator answers there"),
    ],
    ids=["no certificate", "a certificate of another CA", "the coordinator of another CA", "nobody at the address"],
)
def test_who_does_not_shake_hands_is_told_why(
    served: Running, reach: Callable[[Running], grpc.Channel], why: str
) -> None:
    with reach(served) as channel, refused("UNAVAILABLE", "unreachable") as messages:
        fetch(channel)
    assert why in messages[0]


def test_an_expired_certificate_does_not_shake_hands_and_its_owner_is_told_why(served: Running) -> None:
    with (
        served.certified("stale", known=True, lifetime=timedelta(seconds=-1)) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        fetch(channel)
    expired = served.clock() - timedelta(seconds=1)
    found = refusal_from_rpc_error(caught.value, not_after=expired)
    assert (found.status, found.reason) == ("UNAVAILABLE", "unreachable")
    assert "your certificate ended" in found.message


def test_a_live_stream_ends_when_its_certificate_expires(served: Running, tmp_path: Path) -> None:
    member = Member(served.joined(tmp_path / "mortal", "mortal", ago=timedelta()))
    with member.channel, served.clock.moved(timedelta(days=90, seconds=-3)):
        ended = attending(member).end()
    assert (ended.status, ended.reason) == ("UNAUTHENTICATED", "certificate-expired")


def test_nobody_may_call_what_has_no_rule(served: Running) -> None:
    with served.administrator(*Role) as channel:
        sudo: Any = channel.unary_unary("/federation.v1.Admin/Sudo")
        with pytest.raises(grpc.RpcError, check=lambda error: error.code() is grpc.StatusCode.UNIMPLEMENTED):
            sudo(b"", timeout=SECONDS)


def test_health_and_reflection_answer_on_both_ports(served: Running) -> None:
    for channel in (served.newcomer(), served.administrator(Role.VIEWER)):
        with channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for service in ("", "federation.v1.Federation", "federation.v1.Admin", "federation.v1.Enrollment"):
                request = health_pb2.HealthCheckRequest(service=service)
                assert check(request, timeout=SECONDS).status == health_pb2.HealthCheckResponse.SERVING
            asks = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            answer = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asks, timeout=SECONDS))
            names = {service.name for service in answer.list_services_response.service}
            assert names >= {"federation.v1.Federation", "federation.v1.Admin", "federation.v1.Enrollment"}


def test_an_rpc_that_takes_one_request_takes_no_second_one(served: Running) -> None:
    with served.member("talkative") as channel:
        call: Any = channel.stream_stream("/federation.v1.Federation/FetchBlob")
        with refused("INVALID_ARGUMENT", "argument"):
            list(call(iter([FetchBlobRequest().SerializeToString()] * 2), timeout=SECONDS))


def test_a_message_over_the_limit_is_refused_also_when_it_arrives_compressed(served: Running) -> None:
    request = enrollment_pb2.EnrollRequest(secret=bytes(MAX_MESSAGE_BYTES + 1))
    assert len(gzip.compress(request.SerializeToString())) < 10_000
    with served.newcomer() as channel:
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            with pytest.raises(grpc.RpcError, check=lambda error: error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED):
                EnrollmentStub(channel).Enroll(request, timeout=SECONDS, compression=compression)
        with refused("UNAUTHENTICATED", "join-string-invalid"):
            greet(channel)


def test_what_nobody_foresaw_is_internal_and_tells_a_stranger_nothing(
    served: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object, **more: object) -> None:
        raise KeyError("the secret of the house")

    monkeypatch.setattr("coordinator.services.enrollment.enroll", fails)
    with served.newcomer() as channel, pytest.raises(grpc.RpcError) as caught:
        greet(channel)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    details = caught.value.details() or ""
    assert "secret" not in details
    incident = details.split()[-1]
    assert f"incident {incident}" in caplog.text
    assert "the secret of the house" in caplog.text
    assert f"incident {incident}" in {entry.detail for entry in served.refusals("Enroll")}


def test_raw_bytes_at_the_door_leave_the_coordinator_serving(served: Running) -> None:
    for port in (served.coordinator.federation_port, served.coordinator.enrollment_port):
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + struct.pack(">H", 0xFFFF), bytes(64), b""):
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as plain:
                plain.sendall(data)
    with served.newcomer() as channel, refused("UNAUTHENTICATED", "join-string-invalid"):
        greet(channel)


def test_when_the_coordinator_stops_its_streams_are_told(tmp_path: Path) -> None:
    with running(tmp_path / "home") as served:
        guest = Member(served.joined(tmp_path / "guest", "guest", ago=timedelta()))
        stream = attending(guest)
        assert served.home.ports_file.exists()
    ended = stream.end()
    assert (ended.status, ended.reason) == ("UNAVAILABLE", "stopping")
    guest.channel.close()
    assert not served.home.ports_file.exists()


def test_a_coordinator_keeps_the_ports_that_the_kernel_picked(tmp_path: Path) -> None:
    with running(tmp_path / "home") as served:
        ports = (served.coordinator.federation_port, served.coordinator.enrollment_port)
        again = Running.__new__(Running)
    again.__init__(served.home, served.clock)  # type: ignore[misc]
    try:
        assert (again.coordinator.federation_port, again.coordinator.enrollment_port) == ports
    finally:
        again.stop()


def test_the_command_makes_serves_and_stops_a_federation_with_encrypted_keys(tmp_path: Path) -> None:
    secret, wrong, home = tmp_path / "passphrase", tmp_path / "wrong", tmp_path / "home"
    secret.write_text("correct horse\n")
    wrong.write_text("battery staple\n")
    unlocked = ("--passphrase-file", str(secret))

    def coordinator(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        return fedpareto("coordinator", *arguments, "--home", home, code=code)

    made = coordinator("init", "--name", "wards", *unlocked, "--json")
    assert json.loads(made.stdout)["federation_id"] == "wards"
    again = coordinator("init", "--name", "wards", code=1)
    assert again.stdout == ""
    assert "holds a federation already (wards): nothing was changed" in again.stderr
    coordinator("init", "--name", "Not A Name", code=2)
    for arguments in ([], ["--passphrase-file", wrong]):
        locked = coordinator("serve", *arguments, code=1)
        assert "passphrase" in locked.stderr
        assert "Traceback" not in locked.stderr

    command = ["-m", "fedpareto", "coordinator", "serve", "--home", str(home), *unlocked]
    daemon = Forked(command, tmp_path / "out", tmp_path / "log", cwd=ROOT, env=os.environ)
    try:
        wait_for(lambda: (home / "ports.json").exists() or daemon.poll() is not None, "the daemon to serve")
        assert daemon.poll() is None, (tmp_path / "log").read_text()
        coordinator("admin", "eve", "--role", "operator", "--out", tmp_path / "eve", *unlocked)
        with AdminFiles.load(tmp_path / "eve").channel() as channel:
            AdminStub(channel).ListRuns(admin_pb2.ListRunsRequest(), timeout=SECONDS)
            with refused("PERMISSION_DENIED", "role"):
                AdminStub(channel).CreateJoinString(admin_pb2.CreateJoinStringRequest(client_id="a"), timeout=SECONDS)
        daemon.send(signal.SIGTERM)
        assert daemon.wait(SECONDS) == 0
    finally:
        daemon.send(signal.SIGKILL)
        daemon.wait()
    assert not (home / "ports.json").exists()
