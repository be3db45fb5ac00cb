"""The costs of connections: of idle members that attend, and of the front listener.

`idle`: `--members` attend with TLS 1.3 and a certificate each, and send heartbeats; one process holds the members'
side of all of them. CPU and memory are those of the coordinator and of its front listener together; a share of 1 is
one core. The scenario fails if one of the members does not attend at the end.

`front`: a gRPC server over TLS in another process receives a stream of `--gigabytes` in messages of 256 KiB and answers
`--calls` small calls, in turns directly and through the front listener. CPU-seconds are those of the server and of the
front listener. 0 members, or 0 gigabytes, leave a part out.
"""

import asyncio
import os
import statistics
import time
import timeit
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from bare import bare_channel, bare_server, pieces
from measuring import Document, cpu_seconds, in_a_process, least, lone_coordinator, progress, temporary_federation

from coordinator.front.connection_limits import ConnectionLimits, raise_descriptor_limit
from coordinator.front.listener import Front
from federation.transport.channels import refusal_from_rpc_error, server_verified_channel
from federation.trust.join_string import JoinStringFields, fetch_ca
from federation.trust.keys import private_key_pem
from federation.trust.member_files import MemberFiles
from federation.v1.admin_pb2 import CreateJoinStringRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.federation_pb2 import AttendRequest, Heartbeat, Hello, TaskOffer
from federation.v1.federation_pb2_grpc import FederationStub
from tests.harness import Applicant, Federation, enrolled

FORMS = {
    "full": {"members": 1000, "seconds": 30.0, "gigabytes": 4.0, "calls": 2000, "turns": 3},
    "quick": {"members": 100, "seconds": 10.0, "gigabytes": 0.5, "calls": 300, "turns": 1},
    "smallest": {"members": 2, "seconds": 0.1, "gigabytes": 1 / 128, "calls": 5, "turns": 1},
}
WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20))
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
LONGEST_SECONDS = 1200.0  # until all are enrolled; strangers of one address may make 300 calls, then 5 a second
AT_A_TIME = 32  # handshakes: an address may have 64 connections that have shown no certificate yet
HELLO = AttendRequest(hello=Hello(software="bench", tasks=[TaskOffer(task="digits", samples=100)], device="cpu"))


def measure(members: int, seconds: float, gigabytes: float, calls: int, turns: int) -> Document:
    result: Document = {"load": psutil.getloadavg()[0]}
    if members:
        with temporary_federation() as fed:
            pid = lone_coordinator(fed).popen.pid
            # In a process that a signal kills: an exception inside grpc.aio, as a signal raises it here, can crash it.
            result["idle"] = in_a_process(idle, fed.directory, pid, members, seconds)
    if gigabytes:
        with temporary_federation() as fed:
            result["front"] = asyncio.run(compare(fed.home, gigabytes, calls, turns))
    return result


# --- idle members


def idle(directory: Path, pid: int, members: int, seconds: float) -> Document:
    """Enrolls members, who then attend, at the federation of a directory, whose coordinator has this process id."""
    raise_descriptor_limit()
    alone, fed = memory(pid), Federation(directory)
    return asyncio.run(attended(fed, enrolled_members(fed, members), pid, alone, seconds))


async def attended(fed: Federation, everyone: list[MemberFiles], pid: int, alone: float, seconds: float) -> Document:
    """All attend; measures the coordinator of this process, which had this memory before."""
    members, breaks = len(everyone), list[str]()
    places, welcomes = asyncio.Semaphore(AT_A_TIME), [asyncio.Future[float]() for _ in everyone]
    async with asyncio.TaskGroup() as group:  # a member that fails ends all
        tasks = [group.create_task(stay(*one, places, breaks)) for one in zip(everyone, welcomes, strict=True)]
        for number, welcome in enumerate(welcomes, 1):
            interval = await welcome
            if number % 100 == 0:
                progress(f"{number} of {members} members attend")
        before, began = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)  # idling is measured
        share = (cpu_seconds(pid) - before) / (time.monotonic() - began)
        together = memory(pid)
        clients = (await asyncio.to_thread(fed.admin, "clients"))["clients"]
        for task in tasks:
            task.cancel()
    attending = sum(bool(client.get("attending")) for client in clients)
    if attending != members:
        raise RuntimeError(f"{attending} of {members} members attended at the end")
    return {
        "members": members,
        "heartbeat_seconds": interval,
        "cpu_share": share,
        "breaks": len(breaks),
        "memory_mb": together / 1e6,
        "bytes_per_member": (together - alone) / members,
    }


def enrolled_members(fed: Federation, count: int) -> list[MemberFiles]:
    """Enrolls members as fast as one address may, over a connection that is made again when its time is over."""
    members, requests = [], [CreateJoinStringRequest(client_id=f"member-{i:04}") for i in range(count)]
    with fed.administrator() as admin:
        stub = AdminStub(admin)
        joins = [JoinStringFields.decode(stub.CreateJoinString(request).join_string) for request in requests]
    end = time.monotonic() + LONGEST_SECONDS
    ca = fetch_ca(joins[0].address, joins[0].ca_fingerprint, timeout=10)
    with server_verified_channel(joins[0].address, ca) as channel:
        for join in joins:
            applicant = Applicant()
            while True:
                try:
                    members.append(enrolled(join, channel, applicant))
                    break
                except grpc.RpcError as error:
                    refusal = refusal_from_rpc_error(error)
                    if refusal.reason not in ("limit:rate", "unreachable") or time.monotonic() > end:
                        raise
                    time.sleep(max(refusal.retry_seconds, 0.05))  # as long as the coordinator asks a caller to wait
            if len(members) % 100 == 0:
                progress(f"{len(members)} of {count} members are enrolled")
    return members


async def stay(
    files: MemberFiles, welcome: asyncio.Future[float], places: asyncio.Semaphore, breaks: list[str]
) -> None:
    """Attends until it is cancelled, again after each stream that breaks, of which `breaks` is told.

    Raises:
        grpc.RpcError: the coordinator refused it.
    """
    while True:
        try:
            await attend(files, welcome, places)
        except* grpc.aio.AioRpcError as errors:
            refusal = refusal_from_rpc_error(first_of(errors))
            if refusal.reason != "unreachable":
                raise
            breaks.append(f"{files.client_id}: {refusal.message}")
            await asyncio.sleep(1.0)  # as a worker pauses


def first_of(errors: BaseExceptionGroup[Any]) -> Any:
    """The first error in a group and the groups in it."""
    error = errors.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


async def attend(files: MemberFiles, welcome: asyncio.Future[float], places: asyncio.Semaphore) -> None:
    """Attends until it is cancelled; tells the interval of its heartbeats.

    Raises:
        grpc.RpcError: the coordinator ended the stream with an error.
        RuntimeError: it ended the stream without one.
    """
    credentials = grpc.ssl_channel_credentials(files.ca, private_key_pem(files.tls_key), files.certificate)
    async with grpc.aio.secure_channel(files.address, credentials, options=OPTIONS) as channel:
        async with places:
            call: Any = FederationStub(channel).Attend()  # it connects at once
            await call.write(HELLO)
            interval = (await call.read()).welcome.heartbeat_seconds
        if not welcome.done():
            welcome.set_result(interval)

        async def beat() -> None:
            with suppress(asyncio.InvalidStateError):  # the stream has ended, and its reader says why
                while True:
                    await call.write(AttendRequest(heartbeat=Heartbeat()))
                    await asyncio.sleep(interval)

        async with asyncio.TaskGroup() as group:
            group.create_task(beat())
            while await call.read() is not grpc.aio.EOF:
                pass
            raise RuntimeError(f"{files.client_id}: the coordinator ended the attendance")


def memory(pid: int) -> float:
    """The resident memory of a process and all that it has started, in bytes."""
    process = psutil.Process(pid)
    return float(sum(one.memory_info().rss for one in (process, *process.children(recursive=True))))


# --- the front listener


def costs_of(port: int, home: Path, pids: list[int], gigabytes: float, calls: int) -> dict[str, float]:
    size = int(gigabytes * (1 << 30))
    with bare_channel(home, port) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Bare/Answer")
        take_all: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/Bare/Take")
        latency = statistics.median(timeit.repeat(lambda: call(b"x"), number=1, repeat=calls))
        before = cpu_seconds(*pids)
        assert int(take_all(pieces(size))) == size
        return {"cpu_per_gb": (cpu_seconds(*pids) - before) / gigabytes, "latency_us": latency * 1e6}


async def fail(actor: str, reason: str, times: int) -> None:
    raise RuntimeError(f"{actor} was refused: {reason}")


async def compare(home: Path, gigabytes: float, calls: int, turns: int) -> Document:
    limits = ConnectionLimits(connections=100, unverified=50, verified_seconds=3600, idle_seconds=3600)
    front = Front(limits, fail)
    public = front.listen("127.0.0.1", 0, "members")
    inner = os.path.realpath(front.inner("members").removeprefix("unix:"))  # the path in the other process, too
    results: dict[str, list[dict[str, float]]] = {"direct": [], "front": []}
    with bare_server(home, ["127.0.0.1:0", f"unix:{inner}"], WINDOW) as (server, direct):
        await front.start()
        assert front._process is not None
        given = (home, [server, front._process.pid], gigabytes, calls)
        try:
            for turn in range(turns):
                progress(f"front listener: turn {turn + 1} of {turns}")
                for name, port in (("direct", direct), ("front", public)):
                    results[name].append(await asyncio.to_thread(costs_of, port, *given))
        finally:
            await front.stop()
    return {name: least(found) for name, found in results.items()}
