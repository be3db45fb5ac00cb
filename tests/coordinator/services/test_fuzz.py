"""Ten thousand random and mutated messages against each service, and the coordinator is as well as before.

The coordinator is a real process behind real TLS. Its callers hold real keys, so that what they send comes as far as it
can: past the door, past the signature. Seeded: a failure comes back.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from coordinator.members.access.callers import RULES
from coordinator.members.access.control import MAX_CONCURRENT_CALLS
from federation.digests import digest
from federation.trust.admin_files import AdminFiles, load_admin_key
from federation.trust.certificates import make_csr
from federation.trust.envelope import sign
from federation.trust.join_string import JoinStringFields
from federation.trust.key_chain import rotate
from federation.trust.keys import new_tls_key, private_key_pem
from federation.trust.member_files import MemberFiles
from federation.trust.proofs import prove_renewal
from federation.v1 import admin_pb2 as admin
from federation.v1 import common_pb2 as common
from federation.v1 import federation_pb2 as wire
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import SignedEnvelope
from federation.v1.enrollment_pb2 import EnrollRequest, LoginRequest
from federation.vectors import Layout, Tensor, to_bytes
from tests.coordinator.services.scene import PROBES, short
from tests.harness import SECONDS, Federation, Member, federation, wait_for
from tests.mutation import mutated, spoil, warp
from tests.stage import submission

SEED = 20260601
AT_ONCE = MAX_CONCURRENT_CALLS - 16  # of one caller: beyond the limit there is one reason only, and little to learn
RUNS = 2  # the number of mallory's assignments that are open at first
GROWTH = 200 << 20  # what the coordinator's memory may grow by, in bytes; the bombs alone would inflate to more
BOMB = 64 << 20
# As often and as long as they like: what is refused for its rate comes no further than that, and the callers without a
# certificate keep one connection throughout.
UNLIMITED = """
from coordinator.members.access import control as access, call_limits as limits
access.RATES = {kind: limits.Rate(1e9, 1e9) for kind in limits.RATES}
from coordinator.front.connection_limits import ConnectionLimits as Limits
usual = Limits.for_descriptors
Limits.for_descriptors = lambda count: usual(count)._replace(idle_seconds=1e6, newcomer_seconds=1e6)
from fedpareto.cli.main import main
main()
"""

LAYOUT = Layout((Tensor("weight", (5, 8)),))
MODEL = to_bytes(LAYOUT, np.zeros(LAYOUT.size, np.float32))
SPEC = """
name = "{name}"
task = "{task}"
rounds = 1
[train]
deadline_seconds = 900
[evaluate]
splits = ["test"]
deadline_seconds = 900
[selection]
quorum = 0.0
"""

# Nobody foresaw it; gave no answer in time; hung up.
ENDLESS = {"/federation.v1.Admin/WatchRun", "/federation.v1.Admin/ListAudit"}  # may last until their caller goes
ALARMING = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "UNAVAILABLE", "DATA_LOSS"}


# --- senders


Say = Callable[[random.Random], list[bytes]]  # the messages of one call


@dataclass
class Caller:
    """Somebody who calls, with a channel of their own."""

    channel: grpc.aio.Channel
    calls: "dict[str, Say]"
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))


async def call(channel: grpc.aio.Channel, method: str, messages: Sequence[bytes], ending: str) -> str:
    """Makes one call; returns the name of its status. `ending`: how the caller goes away."""

    async def said() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    seconds = 3.0 if method in ENDLESS else SECONDS
    compression = grpc.Compression.Gzip if ending == "gzip" else None
    stream: Any = channel.stream_stream(method)
    made = stream(said(), timeout=seconds, compression=compression)
    try:
        if ending == "cancel":
            await made.wait_for_connection()
            made.cancel()
        async for _ in made:
            if ending == "deaf":
                made.cancel()
        return str((await made.code()).name)
    except grpc.aio.AioRpcError as error:
        status = str(error.code().name)
        if method in ENDLESS and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "CANCELLED"
        if error.details() == "Internal error from Core":
            return "CANCELLED"  # our own library's word for a call that was over before all was written
        return f"{status}: {error.details()}" if status in ALARMING else status
    except asyncio.CancelledError:
        if not made.cancelled():
            raise
        return "CANCELLED"


async def assail(callers: list[Caller], count: int, rng: random.Random) -> tuple[Counter[tuple[str, str]], int]:
    """Sends `count` messages, spread over the callers and their calls. Returns how the calls ended."""
    ended: Counter[tuple[str, str]] = Counter()
    sent = 0

    async def one(caller: Caller, method: str, messages: Sequence[bytes], ending: str) -> None:
        try:
            ended[method, await call(caller.channel, method, messages, ending)] += 1
        finally:
            caller.turn.release()

    async with asyncio.TaskGroup() as group:
        while sent < count:
            caller = rng.choice(callers)
            # Conversations four times as often as single requests: there is more to get wrong in them.
            often = [name for name in caller.calls if name.endswith(("Submit", "SubmitRun"))]
            method = rng.choice([*caller.calls, *3 * often])
            messages = caller.calls[method](rng)
            # What never ends by itself is left by its caller.
            ending = "deaf" if method.endswith("/WatchRun") else rng.choice(("done",) * 12 + ("cancel", "deaf", "gzip"))
            await caller.turn.acquire()
            group.create_task(one(caller, method, messages, ending))
            sent += len(messages)
    return ended, sent


def channel(files: MemberFiles | AdminFiles) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(files.ca, private_key_pem(files.tls_key), files.certificate)
    return grpc.aio.secure_channel(files.address, credentials)


def stream_of(messages: Sequence[Message]) -> Say:
    """A conversation: in order or not, whole or not, with mutations in it or without."""

    def say(rng: random.Random) -> list[bytes]:
        kind = rng.random()
        if kind < 0.05:
            return [b""] * rng.randrange(3)
        chosen = list(messages)
        if kind < 0.2:
            rng.shuffle(chosen)
        elif kind < 0.35:
            chosen = chosen[: rng.randrange(1, len(chosen) + 1)]
        elif kind < 0.45:
            chosen = chosen * 2
        victim = rng.randrange(len(chosen))
        return [mutated(one, rng) if i == victim else one.SerializeToString() for i, one in enumerate(chosen)]

    return say


def single(*messages: Message) -> Say:
    """A call with one request, like one of these; now and then with none or with two."""

    def say(rng: random.Random) -> list[bytes]:
        return [mutated(rng.choice(messages), rng) for _ in range(rng.choice((1,) * 18 + (0, 2)))]

    return say


USUAL: dict[str, Any] = {
    "run": "victim-0",
    "round": 0,
    "client_id": "nobody",
    "name": "nobody",
    "reason": "none",
    "lifetime_seconds": 60,
    "tags": admin.Tags(tags=["north"]),
    "all": True,
    "page_size": 3,
    "page_token": "1",
    "payloads": True,
    "skip_blobs": True,
}

# --- the scene


@dataclass
class Scene:
    fed: Federation
    pid: int
    alice: Member
    mallory: Member
    orders: list[SignedEnvelope]  # what mallory was asked for

    @property
    def memory(self) -> int:
        """Resident memory of the coordinator, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


def in_pieces(name: str, task: str = "digits") -> list[admin.SubmitRunRequest]:
    """What submits a run of this name."""
    return submission(SPEC.format(name=name, task=task).encode(), MODEL, chunk=100)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with federation(tmp_path_factory.mktemp("fuzz")) as fed:
        process = fed.serve(program=UNLIMITED)
        alice, mallory = fed.enroll("alice"), fed.enroll("mallory")
        stream = mallory.attend(digits=10)
        stream.next()
        with fed.administrator() as operator:
            for number in range(RUNS):
                AdminStub(operator).SubmitRun(iter(in_pieces(f"victim-{number}")), timeout=SECONDS)
        orders = [stream.assignment() for _ in range(RUNS)]
        stream.close()
        yield Scene(fed, process.popen.pid, alice, mallory, orders)


def enrollment_calls(scene: Scene) -> dict[str, Say]:
    secret = JoinStringFields.decode(scene.fed.join_string("newcomer")).secret
    request = EnrollRequest(secret=secret, csr=bytes(200), signing_key=bytes(32), proof=bytes(64), software="test")
    stranger = EnrollRequest(secret=bytes(32), csr=b"\x30\x82\xff\xff", signing_key=bytes(32), proof=bytes(64))
    eve = AdminFiles.load(scene.fed.home / "admin").name
    manifest = common.LoginManifest(federation_id="federation", name=eve, csr=make_csr(new_tls_key()))
    manifest.created.GetCurrentTime()
    keys = [load_admin_key(scene.fed.home / "admin"), Ed25519PrivateKey.generate()]
    logins = [LoginRequest(login=sign(manifest, key)) for key in keys]
    return {
        "/federation.v1.Enrollment/Enroll": single(request, stranger),
        "/federation.v1.Enrollment/Login": single(*logins),
    }


def federation_calls(scene: Scene) -> dict[str, Say]:
    mallory = scene.mallory
    layout = common.TaskLayout(digest=digest(b""), tensors=2, elements=9)
    offers = [wire.TaskOffer(task="other", samples=9, layout=layout)]
    limits = wire.WorkLimits(samples=9, max_epochs=0.5)
    hello = wire.AttendRequest(hello=wire.Hello(software="t", tasks=offers, limits=limits, paused=True))
    name = common.AssignmentManifest.FromString(scene.orders[0].manifest).assignment_id
    beat = wire.AttendRequest(heartbeat=wire.Heartbeat(assignment_id=name, progress=0.5))
    decline = wire.AttendRequest(decline=mallory.declined("0" * 32, "no-data", "none"))

    def reply(rng: random.Random) -> list[bytes]:
        """An update of mallory's, wrong somewhere: in what she signs, in how she signs it, in what she uploads."""
        order = mallory.open(rng.choice(scene.orders))
        payload = mallory.payload(order, rng.randrange(2**32))
        manifest = mallory.manifest(order, payload)
        if rng.random() < 0.3:
            payload = spoil(payload, rng)
            if rng.random() < 0.5:
                manifest.payload, manifest.payload_bytes = digest(payload), len(payload)
        if rng.random() < 0.5:
            warp(manifest, rng)
        envelope = sign(manifest, mallory.files.signing_key)
        if rng.random() < 0.3:
            warp(envelope, rng)
        starts = range(0, len(payload), 97)
        chunks = [wire.SubmitRequest(chunk=payload[start : start + 97], offset=start) for start in starts]
        return stream_of([wire.SubmitRequest(reply=envelope), *chunks])(rng)

    right = common.ModelManifest(client_id="mallory", model=digest(MODEL))
    right.created.GetCurrentTime()
    blob = wire.FetchBlobRequest(digest=digest(MODEL), offset=5)
    granted = wire.FetchBlobRequest(digest=digest(MODEL), grant=sign(right, mallory.files.signing_key))
    csr = make_csr(new_tls_key())
    proof = prove_renewal(mallory.files.signing_key, csr)
    facts: dict[str, Any] = {"federation_id": mallory.files.federation_id, "client_id": mallory.files.client_id}
    facts |= {"number": 2, "now": mallory.files.not_after}  # the next one is 1: its key stays
    rotation = rotate(mallory.files.signing_key, Ed25519PrivateKey.generate(), **facts)
    return {
        "/federation.v1.Federation/Attend": stream_of([hello, beat, decline, beat]),
        "/federation.v1.Federation/FetchBlob": single(
            blob, granted, wire.FetchBlobRequest(digest="blake3:" + "0" * 64)
        ),
        "/federation.v1.Federation/LocateBlob": single(wire.LocateBlobRequest(digest=blob.digest)),
        "/federation.v1.Federation/Submit": reply,
        "/federation.v1.Federation/Renew": single(wire.RenewRequest(csr=csr, proof=proof), wire.RenewRequest(csr=csr)),
        "/federation.v1.Federation/RotateKey": single(
            wire.RotateKeyRequest(rotation=rotation, csr=csr, proof=proof), wire.RotateKeyRequest(csr=csr)
        ),
        "/federation.v1.Federation/GetModel": single(
            wire.GetModelRequest(run="victim-0", nonce=bytes(16), best="loss", split="test")
        ),
    }


def admin_calls(scene: Scene) -> dict[str, Say]:
    officer, key = {"federation_id": "federation", "officer": "admin"}, load_admin_key(scene.fed.home / "admin")
    asked = common.RequestManifest(**officer, action="revoke", subject="nobody")  # type: ignore[arg-type]
    decision = common.DecisionManifest(**officer, request=digest(b""), consent=True)  # type: ignore[arg-type]
    for manifest in (asked, decision):
        manifest.created.GetCurrentTime()
    signed = sign(asked, key), sign(decision, key)
    others: dict[str, Say] = {
        "RequestAction": single(admin.RequestActionRequest(request=signed[0])),
        "DecideRequest": single(admin.DecideRequestRequest(decision=signed[1])),
        "SubmitRun": stream_of(in_pieces("another")),
        "StopRun": single(admin.StopRunRequest(run="victim-1", reason="none")),
        "ListReplies": single(admin.ListRepliesRequest(run="victim-0", round=0, client_id="mallory")),
        "ListAudit": single(admin.ListAuditRequest(actor="mallory")),
    }
    names = [method for method in RULES if ".Admin/" in method]
    return {name: others.get(name.rpartition("/")[2]) or single(usual(PROBES[short(name)].request)) for name in names}


def usual(request: Message) -> Message:
    """A request of this kind, about what there is to ask for."""
    return type(request)(**{one.name: USUAL[one.name] for one in request.DESCRIPTOR.fields if one.name in USUAL})


def is_well(scene: Scene) -> None:
    """It serves; it has noticed nothing but refusals; nobody's work is lost."""
    fed = scene.fed
    for service in ("", "federation.v1.Enrollment", "federation.v1.Federation", "federation.v1.Admin"):
        answer = HealthStub(scene.alice.channel).Check(HealthCheckRequest(service=service), timeout=SECONDS)
        assert answer.status == HealthCheckResponse.SERVING
    # Alerts tell of runs that failed, since mallory's reply was refused: `states` below.
    lines = fed.serving.text.splitlines(True)
    log = "".join(line for line in lines if "coordinator.alerts.maker: alert: run" not in line)
    for symptom in ("Traceback", "ERROR", "never retrieved", "incident"):
        assert symptom not in log, log[log.index(symptom) - 200 :][:3000]
    assert fed.query("select actor, action, detail from audit_log where outcome = 'internal'") == []
    states = fed.query("select name, reason from runs where state = 'FAILED'")
    assert [reason for _, reason in states if "rounds in a row" not in reason and "quorum: 0 of" not in reason] == []


def works(scene: Scene, name: str) -> None:
    """A run from its submission to its end, by honest hands, and an operator who looks at it."""
    fed = scene.fed

    def alone() -> bool:
        return not any(client.get("attending") for client in fed.admin("clients")["clients"])

    wait_for(alone, "mallory to be gone")
    stream = scene.alice.attend(**{name: 10})
    stream.next()
    with fed.administrator() as operator:
        stub = AdminStub(operator)
        run = stub.SubmitRun(iter(in_pieces(name, task=name)), timeout=SECONDS).run.run_id
        for _ in ("train", "evaluate"):
            assert scene.alice.answer(stream.assignment()).accepted
        fed.wait_completed(run)
        listed = stub.ListRuns(admin.ListRunsRequest(), timeout=SECONDS).runs
        assert run in {one.run_id for one in listed}
        parts = stub.GetRound(admin.GetRoundRequest(run=run, round=0), timeout=SECONDS).participations
        assert [(part.client_id, part.weight) for part in parts] == [("alice", 1.0)]
    stream.close()


# --- the tests


async def assail_everybody(scene: Scene, count: int) -> dict[str, tuple[Counter[tuple[str, str]], int]]:
    files = AdminFiles.load(scene.fed.home / "admin")
    alice = scene.alice.files
    enrollment = JoinStringFields.decode(scene.fed.join_string("somebody-else")).address
    newcomer = grpc.aio.secure_channel(enrollment, grpc.ssl_channel_credentials(alice.ca))
    operator, member = channel(files), channel(scene.mallory.files)
    enroll, federate, administer = enrollment_calls(scene), federation_calls(scene), admin_calls(scene)
    # In front of the right door stand those who belong there; at times also those who do not.
    groups = {
        "Enrollment": [Caller(newcomer, enroll)] * 3 + [Caller(member, enroll)],
        "Federation": [Caller(member, federate)] * 7 + [Caller(operator, federate), Caller(newcomer, federate)],
        "Admin": [Caller(operator, administer)] * 7 + [Caller(member, administer), Caller(newcomer, administer)],
    }
    turns: dict[grpc.aio.Channel, asyncio.Semaphore] = {}
    for caller in [caller for group in groups.values() for caller in group]:
        caller.turn = turns.setdefault(caller.channel, caller.turn)  # the limit is the caller's, whatever they call
    try:
        assaults = [assail(callers, count, random.Random(f"{SEED}/{name}")) for name, callers in groups.items()]
        ended = await asyncio.gather(*assaults)
    finally:
        for one in turns:
            await one.close()
    return dict(zip(groups, ended, strict=True))


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_so_many_spoilt_messages_against_each_service_leave_it_healthy(scene: Scene, count: int) -> None:
    before = scene.memory
    ended = asyncio.run(assail_everybody(scene, count))
    for service, (statuses, sent) in ended.items():
        assert sent >= count, service
        alarming = {kind for kind in statuses if kind[1].partition(":")[0] in ALARMING}
        # Spoilt, it may ask to follow the log, which has no end.
        alarming -= {kind for kind in alarming if kind[0].endswith("/ListAudit") and "DEADLINE" in kind[1]}
        assert not alarming, (service, alarming)
    # They came as far as they should: there are all kinds of answers.
    found = {status for _, status in sum((statuses for statuses, _ in ended.values()), Counter())}
    assert found >= {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"}
    # These are rare.
    rare = {"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ALREADY_EXISTS", "ABORTED", "OUT_OF_RANGE"}
    assert count < 10_000 or found >= rare
    assert scene.memory - before < GROWTH
    is_well(scene)
    works(scene, f"after-{count}")


@pytest.mark.parametrize(
    "method",
    ["/federation.v1.Admin/Nothing", "/federation.v1.Federation/", "/federation.v2.Enrollment/Enroll", "/a/b/c", "//"],
)
def test_a_method_that_does_not_exist_is_unimplemented(scene: Scene, method: str) -> None:
    stub: Any = scene.mallory.channel.unary_unary(method)
    with pytest.raises(grpc.RpcError, check=lambda error: error.code() is grpc.StatusCode.UNIMPLEMENTED):
        stub(b"x", timeout=SECONDS)
    is_well(scene)


def test_a_message_that_inflates_beyond_the_limit_is_refused_at_every_service(scene: Scene) -> None:
    before = scene.memory
    with scene.fed.administrator() as operator:
        for channel_, method in (
            (operator, "/federation.v1.Admin/SubmitRun"),
            (operator, "/federation.v1.Admin/GetRun"),
            (scene.mallory.channel, "/federation.v1.Federation/Submit"),
            (scene.mallory.channel, "/federation.v1.Federation/Attend"),
            (scene.mallory.channel, "/federation.v1.Enrollment/Enroll"),
        ):
            stream: Any = channel_.stream_stream(method)
            call = stream(iter([bytes(BOMB)]), timeout=SECONDS, compression=grpc.Compression.Gzip)
            with pytest.raises(grpc.RpcError, check=lambda error: error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED):
                list(call)
    assert scene.memory - before < GROWTH
    is_well(scene)
    works(scene, "after-the-bombs")
