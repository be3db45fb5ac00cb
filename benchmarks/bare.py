"""A bare gRPC server over TLS in a process of its own, to compare ours with: it gives, takes and answers."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

CHUNK = bytes(1 << 20)  # as large as those of workers and coordinator


def pieces(size: int) -> Iterator[bytes]:
    """This many bytes."""
    for start in range(0, size, len(CHUNK)):
        yield CHUNK[: size - start]


def serve(addresses: Sequence[str], pair: tuple[bytes, bytes], options: Any, ready: Connection) -> None:
    """Listens on each address until its process is ended."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Give": grpc.unary_stream_rpc_method_handler(lambda size, _: pieces(int(size))),
        "Take": grpc.stream_unary_rpc_method_handler(lambda requests, _: str(sum(map(len, requests))).encode()),
        "Answer": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
    }
    server = grpc.server(ThreadPoolExecutor(32), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", methods),))
    credentials = grpc.ssl_server_credentials([pair])
    ready.send([server.add_secure_port(address, credentials) for address in addresses])
    server.start()
    server.wait_for_termination()


def bare_channel(home: Path, port: int) -> grpc.Channel:
    """A connection of its own to a port that has the certificate of a coordinator's directory."""
    credentials = grpc.ssl_channel_credentials((home / "ca.pem").read_bytes())
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=[("grpc.use_local_subchannel_pool", 1)])


@contextmanager
def bare_server(home: Path, addresses: Sequence[str], options: Any = ()) -> Iterator[tuple[int, int]]:
    """Starts it with a coordinator's certificate; yields the id of its process, and the port of its first address."""
    context = multiprocessing.get_context("forkserver")
    key, certificate = ((home / name).read_bytes() for name in ("server.key", "server.pem"))
    near, far = context.Pipe()
    server = context.Process(target=serve, args=(addresses, (key, certificate), options, far), daemon=True)
    server.start()
    try:
        yield server.pid or 0, near.recv()[0]
    finally:
        server.terminate()
