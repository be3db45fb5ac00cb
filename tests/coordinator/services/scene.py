"""What tests of the services share: what each rpc answers to whom, and a member that works in rounds without end."""

import contextlib
import json
import re
import threading
import time
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthListRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from federation.transport.channels import refusal_from_rpc_error
from federation.v1 import admin_pb2 as admin
from federation.v1 import federation_pb2 as wire
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.enrollment_pb2 import EnrollRequest, LoginRequest
from federation.vectors import Layout, Tensor, to_bytes
from tests.harness import Attending, Federation, Member, wait_for
from tests.paths import DOCS
from tests.running import SECONDS
from tests.stage import submission

# --- what each rpc answers to whom

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
    "Federation/Attend": Probe(wire.AttendRequest(), ("INVALID_ARGUMENT", "hello")),
    "Federation/FetchBlob": Probe(wire.FetchBlobRequest(), ("PERMISSION_DENIED", "blob-not-offered")),
    "Federation/LocateBlob": Probe(wire.LocateBlobRequest(), ("PERMISSION_DENIED", "blob-not-offered")),
    "Federation/Submit": Probe(wire.SubmitRequest(), ("INVALID_ARGUMENT", "header")),
    "Federation/Renew": Probe(wire.RenewRequest(), ("INVALID_ARGUMENT", "csr")),
    "Federation/GetModel": Probe(wire.GetModelRequest(nonce=bytes(16)), UNKNOWN_RUN),
    "Federation/Leave": Probe(wire.LeaveRequest(), ("UNAUTHENTICATED", "key-unknown")),
    "Federation/RotateKey": Probe(wire.RotateKeyRequest(), ("INVALID_ARGUMENT", "csr")),
    "Admin/CreateJoinString": Probe(admin.CreateJoinStringRequest(), ("INVALID_ARGUMENT", "argument")),
    "Admin/ListJoinStrings": Probe(admin.ListJoinStringsRequest()),
    "Admin/CancelJoinStrings": Probe(admin.CancelJoinStringsRequest(), ("NOT_FOUND", "join-string-unknown")),
    "Admin/ListAlerts": Probe(admin.ListAlertsRequest()),
    "Admin/ListClients": Probe(admin.ListClientsRequest()),
    "Admin/ApproveClient": Probe(admin.ApproveClientRequest(), UNKNOWN_CLIENT),
    "Admin/TagClient": Probe(admin.TagClientRequest(), UNKNOWN_CLIENT),
    "Admin/RevokeClient": Probe(admin.RevokeClientRequest(), UNKNOWN_CLIENT),
    "Admin/ForgetClient": Probe(admin.ForgetClientRequest(), UNKNOWN_CLIENT),
    "Admin/ListCoordinators": Probe(admin.ListCoordinatorsRequest()),
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
    page = (DOCS / "operate/administrators.md").read_text()
    table = page.partition("\n| Who | Calls |\n|---|---|\n")[2].partition("\n\n")[0]
    found: dict[str, set[str]] = {}
    for row in table.splitlines():
        who, calls = row.strip("|").split("|")
        columns = set(COLUMNS if "everybody" in who else re.findall("`(.+?)`", who))
        for rpc in re.findall("`(.+?)`", calls):
            assert rpc not in found, rpc
            found[rpc] = columns
    return found


def answer(channel: grpc.Channel, method: str) -> tuple[str, str]:
    """The status and the reason of one call; OK as soon as there is a first message, or the end."""
    stream: Any = channel.stream_stream(method)
    call = stream(iter([PROBES[short(method)].request.SerializeToString()]), timeout=SECONDS)
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
    stranger = columns == {"no certificate"}
    return ("UNAUTHENTICATED", "certificate-unknown") if stranger else ("PERMISSION_DENIED", "role")


# --- rounds without end, of a coordinator process

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


def work(member: Member) -> Attending:
    """Attends, and answers whatever comes, in a thread."""
    stream = member.attend(anything=10)

    def answer() -> None:
        with contextlib.suppress(AssertionError, grpc.RpcError, ValueError):
            while True:
                member.answer(stream.assignment())
                stream.say(wire.AttendRequest(heartbeat=wire.Heartbeat()))

    threading.Thread(target=answer, daemon=True).start()
    return stream


def submit(made: Federation) -> None:
    with made.administrator() as channel:
        AdminStub(channel).SubmitRun(iter(submission(SPEC, MODEL)), timeout=SECONDS)


def rounds(made: Federation) -> int:
    return int(made.query("select count(*) from rounds where state = 'COMPLETED'")[0][0])


def goes_on(made: Federation, count: int) -> None:
    """Waits until the given number of further rounds have been completed."""
    before = rounds(made)
    wait_for(lambda: rounds(made) >= before + count, f"{count} more rounds")
    assert made.query("select state, reason from runs") == [("RUNNING", "")]


def pace(made: Federation, seconds: float) -> int:
    """The rounds that are completed in this time."""
    before = rounds(made)
    time.sleep(seconds)
    return rounds(made) - before


def ports(made: Federation) -> list[int]:
    noted = json.loads((made.home / "ports.json").read_text())
    return [noted["federation"], noted["enrollment"]]
