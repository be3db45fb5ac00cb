"""A proxy that takes HTTP CONNECT, as a process of its own: asks for credentials, refuses, is slow, or says nothing.

Every name leads to this machine, so that a test can give the coordinator a name that only the proxy knows.
"""

import asyncio
import base64
import contextlib
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def connect_proxy(log: Path, *options: str, port: int = 0) -> Iterator[str]:
    """Runs one; yields its "127.0.0.1:port". The log has a line for each request: its target, and the answer."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, str(log), "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    with process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, options: Namespace) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *fields = head.splitlines()
        method, target, _ = line.split()
        host, _, port = target.rpartition(":")
        status, extra = options.status, ""
        if options.credentials:
            word = base64.b64encode(options.credentials.encode()).decode()
            if f"Proxy-Authorization: Basic {word}" not in fields:
                status, extra = 407, f"Proxy-Authenticate: {options.scheme}\r\n"
        if method != "CONNECT" or not host:
            status = 405
        with options.log.open("a") as log:
            log.write(f"{target} {status}\n")
        await asyncio.sleep(options.delay)
        if status != 200:
            writer.write(f"HTTP/1.1 {status} Words\r\n{extra}Content-Length: 0\r\n\r\n".encode())
            await writer.drain()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _main(options: Namespace) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: _serve(reader, writer, options), "127.0.0.1", options.port
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--credentials", default="")
    parser.add_argument("--scheme", default='Basic realm="x"')
    parser.add_argument("--status", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.0)
    asyncio.run(_main(parser.parse_args()))
