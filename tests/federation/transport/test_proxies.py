"""The way through proxies: real ones, as processes, that take HTTP CONNECT; which one is chosen; what failures say."""

import base64
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from federation.transport.channels import refusal_from_rpc_error, server_verified_channel
from federation.transport.proxies import DIRECT, Proxy, ProxyError, RouteError, choose_proxy, dial
from federation.trust.certificates import fingerprint, pem
from federation.trust.join_string import JoinStringFields, fetch_ca
from federation.v1.enrollment_pb2 import EnrollRequest
from federation.v1.enrollment_pb2_grpc import EnrollmentStub
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.main import app
from fedpareto.processes import forked
from tests.federation.transport.connect_proxy import connect_proxy
from tests.running import Running, wait_for
from worker.config import WorkerConfig

HOST = "coordinator.example"  # a name that only the proxies know
SECRET = "p@ss:wörd %41"
CREDENTIALS = f"hospital a:{SECRET}"
IN_URL = "hospital%20a:p%40ss%3Aw%C3%B6rd%20%2541@"


SETTINGS = {"hosts": [HOST, "localhost"]}


@pytest.fixture
def proxies(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def join_string(served: Running, client: str) -> JoinStringFields:
    address = f"{HOST}:{served.coordinator.enrollment_port}"
    return JoinStringFields((address,), fingerprint(served.home.ca), served.join_secret(client), client)


def environment(**values: str) -> dict[str, str]:
    unset = ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY")
    return {**{name: text for name, text in os.environ.items() if name not in unset}, **values}


def test_a_member_joins_renews_and_attends_and_an_administrator_asks_through_a_proxy_with_credentials(
    served: Running, proxies: ExitStack, tmp_path: Path
) -> None:
    log, home = tmp_path / "log", tmp_path / "ann"
    first = proxies.enter_context(connect_proxy(log, "--credentials", CREDENTIALS, "--delay", "0.2"))
    url = f"http://{IN_URL}{first}"
    members, newcomers = (
        f"{HOST}:{port} 200\n" for port in (served.coordinator.federation_port, served.coordinator.enrollment_port)
    )
    (tmp_path / "proxy").write_text(f"{url}\n")
    arguments = ["worker", "join", "--home", str(home), "--proxy", f"@{tmp_path / 'proxy'}"]
    done = CliRunner().invoke(app, arguments, input=join_string(served, "ann").encode())
    assert "ann is a member of test" in done.output, done.exception
    assert log.read_text() == newcomers * 2, "the CA, and the enrollment"

    # `join` has noted the proxy in worker.toml, which wins over the environment.
    assert WorkerConfig.load(home / "worker.toml").proxy == f"@{tmp_path / 'proxy'}"
    env = {"https_proxy": "http://nowhere.invalid:1", "no_proxy": ""}
    done = CliRunner().invoke(app, ["worker", "renew", "--home", str(home)], env=env)
    assert "ann has a new certificate" in done.output, done.exception
    assert log.read_text() == newcomers * 2 + members

    shutil.copytree(served.home.admin_dir, tmp_path / "admin")  # as on another machine
    given = ["--home", str(tmp_path / "admin"), "--proxy", f"@{tmp_path / 'proxy'}"]
    done = CliRunner().invoke(app, ["admin", *given, "clients", "--json"])
    assert '"ann"' in done.output, done.exception
    assert log.read_text() == newcomers * 2 + members * 2

    (tmp_path / "out").touch()
    (tmp_path / "own.toml").write_text('format = 1\ntasks = ["digits"]\nthreads = 1\n')
    worker = forked.Forked(
        ["-m", "fedpareto", "worker", "run", "--home", str(home), "--config", str(tmp_path / "own.toml")],
        tmp_path / "out",
        cwd=tmp_path,
        env=environment(https_proxy=url),
    )

    def said(text: str) -> bool:
        return text in (tmp_path / "out").read_text()

    try:
        wait_for(lambda: said("attending federation test"), "the worker to attend")
        assert log.read_text() == newcomers * 2 + members * 3
        proxies.close()
        wait_for(lambda: said(f"the proxy http://{first}"), "the worker to name the hop that failed")
        port = int(first.rpartition(":")[2])
        proxies.enter_context(connect_proxy(log, "--credentials", CREDENTIALS, port=port))
        wait_for(lambda: (tmp_path / "out").read_text().count("attending federation") == 2, "it to attend again")
    finally:
        worker.send(15)
        worker.wait(60)
    written = (tmp_path / "out").read_text()
    for word in (SECRET, IN_URL, base64.b64encode(CREDENTIALS.encode()).decode()):
        assert word not in written


def test_a_password_is_no_argument(served: Running, tmp_path: Path) -> None:
    arguments = ["worker", "join", "--home", str(tmp_path / "a"), "--proxy", f"http://{IN_URL}127.0.0.1:1"]
    done = CliRunner().invoke(app, arguments, input=join_string(served, "bob").encode())
    assert isinstance(done.exception, CommandFailure)
    assert (done.exception.code, "--proxy @FILE" in done.exception.message) == (USAGE, True)
    assert IN_URL not in done.exception.message


REFUSALS = {
    "credentials": (["--credentials", "a:b"], "it asks for user and password: give them in the URL"),
    "forbidden": (["--status", "403"], "it does not allow a connection to {}: ask the network department to allow"),
    "unreachable": (["--status", "502"], "it cannot reach {}. The coordinator is not running, or its name"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_of_the_proxy_names_it_and_says_what_to_do(
    kind: str, served: Running, proxies: ExitStack, tmp_path: Path
) -> None:
    options, words = REFUSALS[kind]
    at = proxies.enter_context(connect_proxy(tmp_path / "log", *options))
    proxy, join = Proxy.parse(at, "test"), join_string(served, f"c-{kind}")
    begin = f"the proxy http://{at} answered {(tmp_path / 'log').read_text()[-4:-1]}".strip()
    with pytest.raises(RouteError) as caught:
        fetch_ca(join.address, join.ca_fingerprint, 30, proxy)
    assert str(caught.value).startswith(begin)
    assert words.format(join.address) in str(caught.value)
    assert words.format("the coordinator") in said_by_grpc(served, proxy)


def said_by_grpc(served: Running, proxy: Proxy, host: str = HOST) -> str:
    """What the user is told when a call through a proxy fails."""
    address = f"{host}:{served.coordinator.enrollment_port}"
    with server_verified_channel(address, pem(served.home.ca), proxy=proxy) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            EnrollmentStub(channel).Enroll(EnrollRequest(), timeout=30)
        refusal = refusal_from_rpc_error(caught.value, proxy=proxy)
    assert refusal.reason == "unreachable", refusal
    return refusal.message


def test_wrong_credentials_and_other_schemes_are_told_apart(proxies: ExitStack, tmp_path: Path) -> None:
    at = proxies.enter_context(connect_proxy(tmp_path / "a", "--credentials", "a:b"))
    with pytest.raises(RouteError, match="does not accept the user and password") as caught:
        dial("c:1", Proxy.parse(f"http://{IN_URL}{at}", "test"), 30)
    assert SECRET not in str(caught.value)
    assert IN_URL not in str(caught.value)
    at = proxies.enter_context(connect_proxy(tmp_path / "b", "--credentials", "a:b", "--scheme", "Negotiate"))
    with pytest.raises(RouteError, match="answered 407: it asks for Negotiate, and only Basic is supported"):
        dial("c:1", Proxy.parse(at, "test"), 30)


def test_a_proxy_that_is_away_silent_or_no_proxy_is_named(served: Running, proxies: ExitStack, tmp_path: Path) -> None:
    at = proxies.enter_context(connect_proxy(tmp_path / "log", "--delay", "600"))
    with pytest.raises(RouteError, match=f"the proxy http://{at} takes connections, but did not connect to c:1 in"):
        dial("c:1", Proxy.parse(at, "test"), 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"SSH-2.0-x\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RouteError, match=f"what listens at {nobody} is no HTTP proxy: it answered with something"):
            dial("c:1", Proxy.parse(nobody, "test"), 30)
        assert f"what listens at {nobody} is no HTTP proxy" in said_by_grpc(served, Proxy.parse(nobody, "test"))
    with pytest.raises(RouteError, match=rf"the proxy {nobody} does not answer \(Connection refused\)"):
        dial("c:1", Proxy.parse(nobody, "test"), 30)
    assert f"the proxy {nobody} does not answer" in said_by_grpc(served, Proxy.parse(nobody, "test"))


@pytest.mark.full
def test_grpc_gives_up_on_a_silent_proxy_and_the_message_names_it(
    served: Running, proxies: ExitStack, tmp_path: Path
) -> None:
    at = proxies.enter_context(connect_proxy(tmp_path / "log", "--delay", "600"))
    message = said_by_grpc(served, Proxy.parse(at, "test"))
    assert f"the proxy http://{at} takes connections, but nothing came through it in time" in message


def test_behind_the_proxy_a_name_that_the_certificate_lacks_is_not_the_coordinator(
    served: Running, proxies: ExitStack, tmp_path: Path
) -> None:
    at = proxies.enter_context(connect_proxy(tmp_path / "log"))
    assert "a device on the way inspects TLS" in said_by_grpc(served, Proxy.parse(at, "test"), host="other.example")


def test_a_direct_way_that_fails_says_where() -> None:
    with pytest.raises(RouteError, match=r"the name nowhere\.invalid has no address on this machine .* --proxy"):
        dial("nowhere.invalid:1", None, 30)
    with pytest.raises(RouteError, match=r"the name nowhere\.invalid has no address on this machine"):
        dial("c:1", Proxy("nowhere.invalid", 1), 30)
    for address in ("c", "c:x", "c:70000", "c d:1", "c:1\r\nHost: x:1"):
        with pytest.raises(RouteError, match="is not the address of a coordinator"):
            dial(address, Proxy("127.0.0.1", 1), 30)


@pytest.mark.parametrize(
    ("address", "given", "variables", "chosen"),
    [
        ("fl.example.org:7443", None, {}, None),
        ("fl.example.org:7443", None, {"https_proxy": "http://p:3128"}, "http://p:3128"),
        ("fl.example.org:7443", None, {"HTTPS_PROXY": "p:3128"}, "http://p:3128"),
        ("fl.example.org:7443", None, {"https_proxy": " ", "HTTPS_PROXY": "http://[::1]:8"}, "http://[::1]:8"),
        ("fl.example.org:7443", None, {"http_proxy": "http://p:3128", "all_proxy": "http://p:3128"}, None),
        ("fl.example.org:7443", "http://q", {"https_proxy": "http://p:3128"}, "http://q:80"),
        ("fl.example.org:7443", DIRECT, {"https_proxy": "http://p:3128"}, None),
        ("fl.example.org:7443", "http://q", {"no_proxy": "a, .Example.ORG"}, None),
        ("fl.example.org:7443", "http://q", {"NO_PROXY": "*"}, None),
        ("example.org:7443", "http://q", {"no_proxy": ".example.org"}, None),
        ("fl.example.org:7443", "http://q", {"no_proxy": "example.com,, fl.example.org.evil"}, "http://q:80"),
        ("10.1.2.3:7443", "http://q", {"no_proxy": "10.0.0.0/8"}, None),
        ("[fd00::7]:7443", "http://q", {"no_proxy": "fd00::/16"}, None),
        ("11.1.2.3:7443", "http://q", {"no_proxy": "10.0.0.0/8"}, "http://q:80"),
        *[(at, None, {"https_proxy": "http://p:3128"}, None) for at in ("localhost:1", "127.0.0.9:1", "[::1]:1")],
        ("localhost:1", "http://q", {}, "http://q:80"),
    ],
)
def test_the_proxy_is_chosen(address: str, given: str | None, variables: dict[str, str], chosen: str | None) -> None:
    proxy = choose_proxy(address, given, variables)
    assert (None if proxy is None else str(proxy)) == chosen


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://u:secret@p:1", "begins with https://: expected http://HOST:PORT"),
        ("socks5://u:secret@p:1", "begins with socks5://"),
        ("http://u:secret@", "is not the URL of a proxy"),
        ("http://u:secret@p:x", "is not the URL of a proxy"),
        ("http://u:secret@[p", "is not the URL of a proxy"),
        ("http://u:secret@p:1/path", "is not the URL of a proxy"),
        ("http://u:secret%0d%0aHost:%20x@p:1", "hold a character that cannot be printed"),
    ],
)
def test_a_url_that_is_no_proxys_is_refused_and_not_repeated(url: str, problem: str) -> None:
    with pytest.raises(ProxyError) as caught:
        choose_proxy("c:1", None, {"https_proxy": url})
    assert str(caught.value).startswith("https_proxy")
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_credentials_are_in_the_url_for_grpc_alone() -> None:
    proxy = Proxy.parse(f"http://{IN_URL}[::1]:3128", "test")
    assert (proxy.credentials, proxy.url) == (CREDENTIALS, f"http://{IN_URL}[::1]:3128")
    assert str(proxy) == "http://[::1]:3128"
    assert SECRET not in repr(proxy)


def test_without_a_proxy_grpc_takes_none_from_the_environment(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with served.newcomer() as channel, pytest.raises(grpc.RpcError) as caught:
        EnrollmentStub(channel).Enroll(EnrollRequest(), timeout=30)
    assert refusal_from_rpc_error(caught.value).reason == "join-string-invalid", "the coordinator has answered"
