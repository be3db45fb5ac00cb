"""A bare gRPC server over TLS in a process of its own, to compare ours with: it gives, takes and answers."""

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc

CHUNK = bytes(1 << 18)  # as large as those of workers and coordinator


def pieces(size: int) -> Iterator[bytes]:
    """This many bytes."""
    for start in range(0, size, len(CHUNK)):
        yield CHUNK[: size - start]


def give(request: bytes, context: Any) -> Iterator[bytes]:
    return pieces(int(request))


def take(requests: Iterable[bytes], context: Any) -> bytes:
    return str(sum(map(len, requests))).encode()


def answer(request: bytes, context: Any) -> bytes:
    return request


def serve(addresses: Sequence[str], pair: tuple[bytes, bytes], options: Any, ready: Connection) -> None:
    """Listens on each address until its process is ended."""
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Give": grpc.unary_stream_rpc_method_handler(give),
        "Take": grpc.stream_unary_rpc_method_handler(take),
        "Answer": grpc.unary_unary_rpc_method_handler(answer),
    }
    server = grpc.server(ThreadPoolExecutor(32), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", methods),))
    credentials = grpc.ssl_server_credentials([pair])
    ready.send([server.add_secure_port(address, credentials) for address in addresses])
    server.start()
    server.wait_for_termination()


@contextmanager
def bare_server(
    addresses: Sequence[str], key: bytes, certificate: bytes, options: Any = ()
) -> Iterator[tuple[int, int]]:
    """Starts it; yields the id of its process, and the port of its first address."""
    context = multiprocessing.get_context("forkserver")
    near, far = context.Pipe()
    server = context.Process(target=serve, args=(addresses, (key, certificate), options, far), daemon=True)
    server.start()
    try:
        yield server.pid or 0, near.recv()[0]
    finally:
        server.terminate()
