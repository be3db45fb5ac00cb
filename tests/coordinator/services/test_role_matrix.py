"""Who may call which rpc: every rpc by every kind of caller against a real coordinator, cell by cell."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import NamedTuple

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthListRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from coordinator.members.access.callers import RULES, CallerRule
from coordinator.members.authority import register
from federation.line.channels import mutual_channel, refusal_from_rpc_error, server_verified_channel
from federation.trust.certificates import issue_certificate, make_ca, pem
from federation.trust.identity import Role, admin_uris, client_uri
from federation.trust.keys import new_tls_key, private_key_pem
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.enrollment_pb2 import EnrollRequest, LoginRequest
from federation.v1.federation_pb2 import AttendRequest, FetchBlobRequest, RenewRequest, RotateKeyRequest, SubmitRequest
from tests.paths import DOCS
from tests.running import SECONDS, Running, running

PAGE = DOCS / "operate/administrators.md"
COLUMNS = ("no certificate", "client", "viewer", "operator", "security-officer")
OK = ("OK", "")


class Probe(NamedTuple):
    """A request that changes nothing, and the answer to a caller who may make it."""

    request: Message
    answer: tuple[str, str] = OK


UNKNOWN_RUN = ("NOT_FOUND", "run-unknown")
UNKNOWN_CLIENT = ("NOT_FOUND", "client-unknown")
PROBES: dict[str, Probe] = {
    "Enrollment/Enroll": Probe(EnrollRequest(), ("UNAUTHENTICATED", "join-string-invalid")),
    "Enrollment/Login": Probe(LoginRequest(), ("UNAUTHENTICATED", "login")),
    "Federation/Attend": Probe(AttendRequest(), ("INVALID_ARGUMENT", "hello")),
    "Federation/FetchBlob": Probe(FetchBlobRequest(), ("PERMISSION_DENIED", "blob-not-offered")),
    "Federation/Submit": Probe(SubmitRequest(), ("INVALID_ARGUMENT", "header")),
    "Federation/Renew": Probe(RenewRequest(), ("INVALID_ARGUMENT", "csr")),
    "Federation/RotateKey": Probe(RotateKeyRequest(), ("INVALID_ARGUMENT", "csr")),
    "Admin/CreateJoinString": Probe(admin.CreateJoinStringRequest(), ("INVALID_ARGUMENT", "argument")),
    "Admin/ListJoinStrings": Probe(admin.ListJoinStringsRequest()),
    "Admin/CancelJoinStrings": Probe(admin.CancelJoinStringsRequest(), ("NOT_FOUND", "join-string-unknown")),
    "Admin/ListClients": Probe(admin.ListClientsRequest()),
    "Admin/ApproveClient": Probe(admin.ApproveClientRequest(), UNKNOWN_CLIENT),
    "Admin/TagClient": Probe(admin.TagClientRequest(), UNKNOWN_CLIENT),
    "Admin/RevokeClient": Probe(admin.RevokeClientRequest(), UNKNOWN_CLIENT),
    "Admin/ForgetClient": Probe(admin.ForgetClientRequest(), UNKNOWN_CLIENT),
    "Admin/ListAdministrators": Probe(admin.ListAdministratorsRequest()),
    "Admin/RevokeAdministrator": Probe(admin.RevokeAdministratorRequest(), ("NOT_FOUND", "administrator-unknown")),
    "Admin/RequestAction": Probe(admin.RequestActionRequest(), ("UNAUTHENTICATED", "key-unknown")),
    "Admin/ListRequests": Probe(admin.ListRequestsRequest()),
    "Admin/DecideRequest": Probe(admin.DecideRequestRequest(), ("UNAUTHENTICATED", "key-unknown")),
    "Admin/SubmitRun": Probe(admin.SubmitRunRequest(), ("INVALID_ARGUMENT", "argument")),
    "Admin/GetDisk": Probe(admin.GetDiskRequest()),
    "Admin/GetSystem": Probe(admin.GetSystemRequest()),
    "Admin/ListRuns": Probe(admin.ListRunsRequest()),
    "Admin/GetRun": Probe(admin.GetRunRequest(), UNKNOWN_RUN),
    "Admin/PauseRun": Probe(admin.PauseRunRequest(), UNKNOWN_RUN),
    "Admin/ResumeRun": Probe(admin.ResumeRunRequest(), UNKNOWN_RUN),
    "Admin/StopRun": Probe(admin.StopRunRequest(), UNKNOWN_RUN),
    "Admin/WatchRun": Probe(admin.WatchRunRequest(), UNKNOWN_RUN),
    "Admin/ListAlerts": Probe(admin.ListAlertsRequest()),
    "Admin/ListRounds": Probe(admin.ListRoundsRequest(), UNKNOWN_RUN),
    "Admin/GetRound": Probe(admin.GetRoundRequest(), UNKNOWN_RUN),
    "Admin/ExportRounds": Probe(admin.ExportRoundsRequest(), UNKNOWN_RUN),
    "Admin/ListReplies": Probe(admin.ListRepliesRequest(), UNKNOWN_RUN),
    "Admin/ExportModel": Probe(admin.ExportModelRequest(), UNKNOWN_RUN),
    "Admin/ExportBundle": Probe(admin.ExportBundleRequest(), UNKNOWN_RUN),
    "Admin/ListAudit": Probe(admin.ListAuditRequest()),
    "Admin/VerifyAudit": Probe(admin.VerifyAuditRequest(skip_blobs=True)),
    "Health/Check": Probe(HealthCheckRequest()),
    "Health/List": Probe(HealthListRequest()),
    "Health/Watch": Probe(HealthCheckRequest()),
    "ServerReflection/ServerReflectionInfo": Probe(ServerReflectionRequest(list_services="")),
}


def short(method: str) -> str:
    """The rpc without its package."""
    return method.rpartition(".")[2]


def stated() -> dict[str, set[str]]:
    """Who may call each rpc, as the page says."""
    rows = re.findall(r"^\| `([A-Za-z]+/[A-Za-z]+)` \|(.+)\|$", PAGE.read_text(), re.MULTILINE)
    return {
        rpc: {column for column, cell in zip(COLUMNS, cells.split("|"), strict=True) if cell.strip() == "yes"}
        for rpc, cells in rows
    }


def permitted(rule: CallerRule) -> set[str]:
    if rule.kind == "anyone":
        return set(COLUMNS)
    if rule.kind == "client":
        return {"client"}
    return {role for role in Role if rule.role in (role, Role.VIEWER)}  # every administrator is a viewer


def test_the_matrix_on_the_page_is_that_of_the_rules() -> None:
    assert stated() == {short(method): permitted(rule) for method, rule in RULES.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("matrix") / "home", admin_certificate_seconds=3600) as made:
        yield made


Caller = Callable[[Running], grpc.Channel]


def certified(
    served: Running, uris: list[str], *, foreign: bool = False, known: bool = False, age: timedelta = timedelta()
) -> grpc.Channel:
    """A certificate that was made behind the coordinator's back, of its CA or of another one with the same name."""
    key, ca_key, now = new_tls_key(), served.home.ca_key, served.clock() - age
    ca = served.home.ca
    if foreign:
        ca_key = new_tls_key()
        ca = make_ca(ca_key, served.home.federation_id, now)
    certificate = issue_certificate(
        ca=ca,
        ca_key=ca_key,
        public_key=key.public_key(),
        federation_id=served.home.federation_id,
        common_name="x",
        uris=uris,
        now=now,
        lifetime=timedelta(hours=1),
    )
    if known:
        with served.database.begin() as session:
            register(session, certificate)
    return mutual_channel(
        served.address, ca=pem(served.home.ca), key=private_key_pem(key), certificate=pem(certificate)
    )


def revoked_client(served: Running) -> grpc.Channel:
    channel = served.member("revoked")
    with served.administrator(Role.SECURITY_OFFICER) as officer:
        AdminStub(officer).RevokeClient(admin.RevokeClientRequest(client_id="revoked"), timeout=SECONDS)
    return channel


def issued(served: Running, name: str, *roles: Role) -> grpc.Channel:
    directory = served.home.directory / f"of-{name}-{len(list(served.home.directory.iterdir()))}"
    return served.home.issue_admin(served.database, name, roles, directory, now=served.clock(), by="test").channel()


def revoked_officer(served: Running) -> grpc.Channel:
    channel = issued(served, "gone", *Role)
    with served.administrator(Role.SECURITY_OFFICER) as officer:
        AdminStub(officer).RevokeAdministrator(admin.RevokeAdministratorRequest(name="gone"), timeout=SECONDS)
    return channel


def replaced_officer(served: Running) -> grpc.Channel:
    channel = issued(served, "again", *Role)
    issued(served, "again", Role.VIEWER).close()
    return channel


def all_roles() -> list[str]:
    return admin_uris("test", "ghost", Role)


# A caller who may call what its columns may.
SERVED: dict[str, tuple[Caller, set[str]]] = {
    "no certificate": (lambda served: served.newcomer(), {"no certificate"}),
    "client": (lambda served: served.member("client"), {"client"}),
    "viewer": (lambda served: served.administrator(), {"viewer"}),
    "operator": (lambda served: served.administrator(Role.OPERATOR), {"viewer", "operator"}),
    "officer": (lambda served: served.administrator(Role.SECURITY_OFFICER), {"viewer", "security-officer"}),
    "operator and officer": (
        lambda served: served.administrator(Role.OPERATOR, Role.SECURITY_OFFICER),
        {"viewer", "operator", "security-officer"},
    ),
}
# A caller to whom each rpc gives the same answer, also those for anyone.
SHUT_OUT: dict[str, tuple[Caller, tuple[str, str]]] = {
    "revoked client": (revoked_client, ("UNAUTHENTICATED", "certificate-revoked")),
    "revoked officer": (revoked_officer, ("UNAUTHENTICATED", "certificate-revoked")),
    "officer who was issued again": (replaced_officer, ("UNAUTHENTICATED", "certificate-revoked")),
    "client of our CA, not on record": (
        lambda served: certified(served, [client_uri("test", "ghost")]),
        ("UNAUTHENTICATED", "certificate-unknown"),
    ),
    "officer of our CA, not on record": (
        lambda served: certified(served, all_roles()),
        ("UNAUTHENTICATED", "certificate-unknown"),
    ),
    "officer of another federation": (
        lambda served: certified(served, admin_uris("other", "ghost", Role), known=True),
        ("UNAUTHENTICATED", "certificate-unknown"),
    ),
    "client of another CA": (
        lambda served: certified(served, [client_uri("test", "client")], foreign=True),
        ("UNAVAILABLE", "unreachable"),
    ),
    "officer of another CA": (
        lambda served: certified(served, all_roles(), foreign=True),
        ("UNAVAILABLE", "unreachable"),
    ),
    "officer whose certificate has ended": (
        lambda served: certified(served, all_roles(), known=True, age=timedelta(days=1)),
        ("UNAVAILABLE", "unreachable"),
    ),
    "no certificate at the port of members": (
        lambda served: server_verified_channel(served.address, pem(served.home.ca)),
        ("UNAVAILABLE", "unreachable"),
    ),
}


def answer(channel: grpc.Channel, method: str) -> tuple[str, str]:
    """The status and the reason of one call; OK as soon as there is a first message, or the end."""
    call = channel.stream_stream(method)(iter([PROBES[short(method)].request.SerializeToString()]), timeout=SECONDS)
    try:
        next(call, None)
    except grpc.RpcError as error:
        refusal = refusal_from_rpc_error(error)
        return refusal.status, refusal.reason
    finally:
        call.cancel()
    return OK


def expected(method: str, columns: set[str]) -> tuple[str, str]:
    if stated()[short(method)] & columns:
        return PROBES[short(method)].answer
    return (
        ("UNAUTHENTICATED", "certificate-unknown") if columns == {"no certificate"} else ("PERMISSION_DENIED", "role")
    )


@pytest.mark.parametrize("name", SERVED)
def test_each_rpc_answers_each_kind_of_caller_as_the_matrix_says(served: Running, name: str) -> None:
    make, columns = SERVED[name]
    with make(served) as channel:
        answers = {method: answer(channel, method) for method in RULES}
    assert answers == {method: expected(method, columns) for method in RULES}


@pytest.mark.parametrize("name", SHUT_OUT)
def test_each_rpc_shuts_out_whom_the_federation_does_not_know_any_more_or_never_did(served: Running, name: str) -> None:
    make, reason = SHUT_OUT[name]
    with make(served) as channel:
        assert {method: answer(channel, method) for method in RULES} == dict.fromkeys(RULES, reason)


@contextmanager
def later(served: Running, time: timedelta) -> Iterator[None]:
    served.clock.ahead = time
    try:
        yield
    finally:
        served.clock.ahead = timedelta()


def test_each_rpc_refuses_a_certificate_that_has_ended_by_the_coordinators_clock(served: Running) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(served.certified("short", known=True, lifetime=timedelta(hours=1)))
        officer = stack.enter_context(issued(served, "late", *Role))
        stack.enter_context(later(served, timedelta(hours=2)))
        for channel in (client, officer):
            answers = {method: answer(channel, method) for method in RULES}
            assert answers == dict.fromkeys(RULES, ("UNAUTHENTICATED", "certificate-expired"))
