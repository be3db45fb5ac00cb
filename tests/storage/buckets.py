"""Object storages on this machine for tests: real servers of other projects, and a proxy that disturbs them."""

import http.client
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_connection, socket

import pytest

from storage.objects.bucket import ObjectBucket, Patience
from storage.objects.claims import Claims
from storage.objects.store import ObjectStore
from tests.paths import ROOT

KEY, SECRET = "federation", "a secret of the tests"
BUCKET = "blobs"
BRIEF = Patience(connect=1.0, silence=0.5, request=2.0, retries=1, total=2.0)


@dataclass
class Storage:
    """An S3 service, or a proxy before it.

    Attributes:
        endpoint: its URL.
        checks_signatures: whether it refuses requests that a wrong key has signed.
    """

    endpoint: str
    checks_signatures: bool

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a coordinator is let in."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}

    def bucket(
        self, prefix: str, *, name: str = BUCKET, patience: Patience = BRIEF, secret: str = SECRET
    ) -> ObjectBucket:
        changed = {**self.environment, "AWS_SECRET_ACCESS_KEY": secret}
        with environment(changed):
            return ObjectBucket(f"s3://{name}/{prefix}", endpoint=self.endpoint, patience=patience)

    def store(
        self, cache: Path, prefix: str, *, patience: Patience = BRIEF, claims: Claims | None = None
    ) -> ObjectStore:
        """A store of its own below the prefix, which is marked as the federation's."""
        bucket = self.bucket(prefix, patience=patience)
        made = ObjectStore(bucket, cache, limit=1 << 30, federation="tests", claims=claims)
        made.probe(takes_new=True)
        return made


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process's environment for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextmanager
def juicefs(directory: Path) -> Iterator[Storage]:
    """JuiceFS's gateway, which is MinIO's code: it checks signatures, and ignores If-None-Match."""
    program = _program("juicefs", "the extra `dev` installs it")
    meta = f"sqlite3://{directory / 'meta.db'}"
    options = {"HOME": str(directory), "MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
    command = [program, "format", "--no-update", "--trash-days", "0", "--storage", "file"]
    subprocess.run(
        [*command, "--bucket", f"{directory / 'objects'}/", meta, BUCKET],
        env=os.environ | options,
        check=True,
        capture_output=True,
    )
    port = _free_port()
    quiet = ["--no-banner", "--no-bgjob", "--backup-meta", "0", "--no-usage-report", "--keep-etag"]
    places = ["--cache-dir", str(directory / "cache"), "--log", str(directory / "log")]
    with _served([program, "gateway", *quiet, *places, meta, f"127.0.0.1:{port}"], port, options, directory):
        yield Storage(f"http://127.0.0.1:{port}", checks_signatures=True)


@contextmanager
def moto(directory: Path) -> Iterator[Storage]:
    """moto's server: it honours If-None-Match, and checks no signatures."""
    with environment({"PATH": f"{ROOT / '.venv-moto' / 'bin'}:{os.environ['PATH']}"}):
        program = _program("moto_server", "`make test-full` installs it into .venv-moto")
    port = _free_port()
    with _served([program, "-H", "127.0.0.1", "-p", str(port)], port, {}, directory):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield Storage(f"http://127.0.0.1:{port}", checks_signatures=False)


_CODES = {"307": "TemporaryRedirect", "403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}
SERVERS = {"juicefs": juicefs, "moto": moto}


def _program(name: str, remedy: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: {remedy}")
    return found


def _free_port() -> int:
    with socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _served(command: list[str], port: int, variables: Mapping[str, str], directory: Path) -> Iterator[None]:
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
        try:
            end = time.monotonic() + 60
            while True:
                with suppress(OSError), create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, (directory / "output").read_text()
                assert time.monotonic() < end, f"{command[0]} does not listen"
                time.sleep(0.02)
            yield
        finally:
            process.kill()
            process.wait()


@dataclass
class Disturbance:
    """What the proxy does with the requests that it concerns.

    Attributes:
        kind: "" forwards them; "away" closes the connection; "silent" never answers; a status, such as "503", is
            answered, and 307 with the storage's own place; "cut" closes within the body; "short" returns half of the
            body as if it were all; "changed" returns other bytes.
        concerns: whether a request is disturbed, by its method and its path with the query.
        times: how many are disturbed.
    """

    kind: str = ""
    concerns: Callable[[str, str], bool] = lambda method, path: True
    times: int = 1 << 30


@dataclass
class Proxy(Storage):
    """A proxy before a storage."""

    disturbance: Disturbance = field(default_factory=Disturbance)
    seen: list[tuple[str, str]] = field(default_factory=list)  # methods and paths

    def disturb(self, kind: str, concerns: Callable[[str, str], bool] | None = None, times: int = 1 << 30) -> None:
        self.disturbance = Disturbance(kind, concerns or (lambda method, path: True), times)

    def calm(self) -> None:
        self.disturbance = Disturbance()


@contextmanager
def proxy(behind: Storage, *, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """A proxy of its own, with https if it is given `tls`. It forwards the Host header, which is signed."""
    ended = threading.Event()
    target = behind.endpoint.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def handle_any(self) -> None:
            body = self._body()
            made.seen.append((self.command, self.path))
            kind = self._kind()
            if kind in ("away", "silent"):
                if kind == "silent":
                    ended.wait()
                self.close_connection = True
                return
            if kind.isdigit():
                code = _CODES[kind]
                text = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
                place = [("Location", behind.endpoint + self.path)] if kind == "307" else []
                return self._answer(int(kind), place, b"" if self.command == "HEAD" else text)
            connection = http.client.HTTPConnection(target)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            data, headers = response.read(), response.getheaders()
            connection.close()
            if self.command == "HEAD":
                return self._answer(response.status, headers, b"", length=response.getheader("Content-Length"))
            if kind == "cut":
                self.close_connection = True
                return self._answer(response.status, headers, data[: len(data) // 2], length=str(len(data)))
            if kind == "short":
                data = data[: len(data) // 2]
            if kind == "changed":
                data = bytes(byte ^ 1 for byte in data)
            self._answer(response.status, headers, data)

        def _kind(self) -> str:
            wanted = made.disturbance
            if wanted.times <= 0 or not wanted.concerns(self.command, self.path):
                return ""
            wanted.times -= 1
            return wanted.kind

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                raise AssertionError("the client sends no chunks")
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(
            self, status: int, headers: list[tuple[str, str]], data: bytes, *, length: str | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if length is not None else str(len(data)))
            self.end_headers()
            with suppress(OSError):  # a client that has given up
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that has given up

    server = Server(("127.0.0.1", 0), Handler)
    port, place = server.server_address[1], "http://127.0.0.1"
    if tls is not None:
        server.socket, place = tls.wrap_socket(server.socket, server_side=True), "https://localhost"
    made = Proxy(f"{place}:{port}", behind.checks_signatures)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with juicefs(tmp_path_factory.mktemp("juicefs")) as made:
        yield made


@pytest.fixture(scope="module")
def _line(storage: Storage) -> Iterator[Proxy]:
    with proxy(storage) as made:
        yield made


@pytest.fixture
def line(_line: Proxy) -> Iterator[Proxy]:
    """The line to the storage, which disturbs nothing at first."""
    _line.seen.clear()
    yield _line
    _line.calm()
