"""The costs of the front listener: CPU per GB, and latency, compared with gRPC without it.

    python benchmarks/front.py [--gigabytes 4] [--calls 2000] [--quick] [--json]

A gRPC server over TLS in another process receives a stream of messages of 256 KiB and answers small calls, in turns
directly and through the front listener. CPU seconds are those of the server and of the front listener.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from federation.line.tls import require_tls13

require_tls13()

import grpc  # noqa: E402

from coordinator.front.connection_limits import ConnectionLimits  # noqa: E402
from coordinator.front.listener import Front  # noqa: E402
from federation.trust.certificates import issue_certificate, make_ca, pem  # noqa: E402
from federation.trust.keys import new_tls_key, private_key_pem  # noqa: E402

CHUNK = bytes(1 << 18)
WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 20))
LOCAL = (("grpc.use_local_subchannel_pool", 1),)


def take(requests: Any, context: Any) -> bytes:
    return str(sum(map(len, requests))).encode()


def answer(request: bytes, context: Any) -> bytes:
    return request


def serve(addresses: list[str], key: bytes, certificate: bytes, ready: Connection) -> None:
    """Listens on each address until its process is ended."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Take": grpc.stream_unary_rpc_method_handler(take),
        "Answer": grpc.unary_unary_rpc_method_handler(answer),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=WINDOW)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bench", methods),))
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    ports = [server.add_secure_port(address, credentials) for address in addresses]
    server.start()
    ready.send(ports)
    server.wait_for_termination()


def measure(port: int, ca: bytes, processes: list[psutil.Process], gigabytes: float, calls: int) -> dict[str, float]:
    credentials = grpc.ssl_channel_credentials(ca)
    count = int(gigabytes * (1 << 30)) // len(CHUNK)

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    with grpc.secure_channel(f"localhost:{port}", credentials, options=LOCAL) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/Bench/Answer")
        take_all: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/Bench/Take")
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            call(b"x")
            times.append(time.perf_counter() - began)
        before, began = spent(), time.perf_counter()
        taken = take_all(CHUNK for _ in range(count))
        assert int(taken) == count * len(CHUNK)
        return {
            "cpu_per_gb": (spent() - before) / gigabytes,
            "wall_per_gb": (time.perf_counter() - began) / gigabytes,
            "latency_us": statistics.median(times) * 1e6,
        }


async def fail(actor: str, reason: str, times: int) -> None:
    raise RuntimeError(f"{actor} was refused: {reason}")


async def run(gigabytes: float, calls: int, turns: int) -> dict[str, list[dict[str, float]]]:
    now, ca_key, key = datetime.now(UTC), new_tls_key(), new_tls_key()
    ca = make_ca(ca_key, "bench", now)
    certificate = issue_certificate(
        ca=ca,
        ca_key=ca_key,
        public_key=key.public_key(),
        federation_id="bench",
        common_name="server",
        uris=["fedpareto://bench/server"],
        now=now,
        lifetime=timedelta(days=1),
        hosts=["localhost"],
    )
    limits = ConnectionLimits(connections=100, unverified=50, verified_seconds=3600, idle_seconds=3600)
    front = Front(limits, fail)
    public = front.listen("127.0.0.1", 0, "members")
    context = multiprocessing.get_context("forkserver")
    near, far = context.Pipe()
    addresses = ["127.0.0.1:0", front.inner("members")]
    server = context.Process(target=serve, args=(addresses, private_key_pem(key), pem(certificate), far), daemon=True)
    server.start()
    direct = (await asyncio.to_thread(near.recv))[0]
    await front.start()
    assert front._process is not None
    assert server.pid is not None
    processes = [psutil.Process(server.pid), psutil.Process(front._process.pid)]
    results: dict[str, list[dict[str, float]]] = {"direct": [], "front": []}
    try:
        for _ in range(turns):
            for name, port in (("direct", direct), ("front", public)):
                costs = await asyncio.to_thread(measure, port, pem(ca), processes, gigabytes, calls)
                results[name].append(costs)
    finally:
        server.terminate()
        await front.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="0.5 GB and 300 calls, once")
    parser.add_argument("--smallest", action="store_true", help="8 MB and 5 calls, once")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.gigabytes, arguments.calls, arguments.turns = 0.5, 300, 1
    if arguments.smallest:
        arguments.gigabytes, arguments.calls, arguments.turns = 1 / 128, 5, 1
    results = asyncio.run(run(arguments.gigabytes, arguments.calls, arguments.turns))
    best = {name: {key: min(turn[key] for turn in turns) for key in turns[0]} for name, turns in results.items()}
    if arguments.json:
        print(json.dumps(best))
        return
    for name, costs in best.items():
        rates = f"{costs['cpu_per_gb']:.2f} CPU-s/GB  {costs['wall_per_gb']:.2f} s/GB"
        print(f"{name:7} {rates}  {costs['latency_us']:.0f} us a call")
    direct, front = best["direct"], best["front"]
    print(
        f"the front listener adds {front['cpu_per_gb'] - direct['cpu_per_gb']:.2f} CPU-s/GB "
        f"({front['cpu_per_gb'] / direct['cpu_per_gb']:.2f} times direct gRPC at the server) and "
        f"{front['latency_us'] - direct['latency_us']:.0f} us a call"
    )


if __name__ == "__main__":
    main()
