"""Models that a worker downloads from a bucket, and the faults after which the coordinator sends them."""

import secrets
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.digests import digest
from federation.training.trainer import Trainer
from federation.transport.proxies import Proxy as HttpProxy
from federation.transport.proxies import no_proxy
from federation.trust.certificates import pem
from federation.trust.keys import new_tls_key, private_key_pem
from federation.trust.member_files import MemberFiles
from federation.vectors import Layout, to_bytes
from storage.objects.bucket import ObjectBucket
from storage.states import RunState
from tests.federation.transport.connect_proxy import connect_proxy
from tests.federation.trust.scene import Authority
from tests.few import few
from tests.stage import Stage, stage
from tests.storage import buckets
from tests.storage.buckets import BRIEF, BUCKET, SERVERS, Proxy, Storage, environment, proxy
from tests.worker.scene import Running, command, policy_refused, soon
from worker.connection import downloads
from worker.connection.downloads import BlobUrl, DownloadFailed, download
from worker.home import WorkerHome
from worker.results import fetched_model
from worker.site.policy_file import Policy
from worker.work import fetching

DATA = secrets.token_bytes(100_000)
SIZE = len(DATA)
Model = tuple[Layout, bytes]


@pytest.fixture(scope="module", params=["juicefs", pytest.param("moto", marks=pytest.mark.full)])
def storage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Storage]:
    with SERVERS[request.param](tmp_path_factory.mktemp("storage")) as made, environment(made.environment):
        yield made


_line, line = buckets._line, buckets.line  # fixtures


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, _line: Proxy) -> Iterator[Stage]:
    home = tmp_path_factory.mktemp("coordinator") / "home"
    chosen = {"blobs": f"s3://{BUCKET}/federation", "blobs_endpoint": _line.endpoint, "blob_urls_seconds": 600}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.objects.bucket.Patience", lambda: BRIEF)
        with stage(home, "sqlite:///coordinator.db", **chosen) as made:
            yield made


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts") / "starts.json"


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory, federation: Stage) -> MemberFiles:
    return federation.served.joined(tmp_path_factory.mktemp("member") / "home", "ann", ago=timedelta())


class Site:
    """A worker with an empty cache, and runs in which it works alone."""

    def __init__(
        self, federation: Stage, member: MemberFiles, offers: dict[str, Trainer], home: Path, starts: Path
    ) -> None:
        self.federation, self.member, self.offers, self.home = federation, member, offers, WorkerHome(home)
        self.home.starts = starts  # one worker after another starts here, so no home is a copy
        self.running: Running | None = None
        self.run = ""

    def work(self, model: Model, *hosts: str, rounds: int = 1) -> Running:
        """Begins a run with a model that no other run has, and a worker that allows these hosts."""
        layout, _ = model
        vector = np.random.default_rng(secrets.randbits(64)).standard_normal(layout.size).astype(np.float32)
        document = f"""
            name = "{secrets.token_hex(4)}"
            task = "digits"
            rounds = {rounds}
            algorithm.name = "fedavg"
            train.steps = 1
            evaluate.every = 0
            selection.minimum = 1
        """
        self.running = Running(self.home, self.member, self.offers, policy=Policy(downloads_from=hosts), uniform=soon)
        self.run = self.federation.submit(document.encode(), model=to_bytes(layout, vector))
        return self.running

    def completed(self) -> None:
        self.federation.wait_state(self.run, RunState.COMPLETED)


@pytest.fixture
def site(
    federation: Stage,
    member: MemberFiles,
    offers: dict[str, Trainer],
    tmp_path: Path,
    starts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    monkeypatch.setattr(fetching, "LEAST_BYTES", 1)
    monkeypatch.setattr(downloads, "SILENCE_SECONDS", 0.3)
    made = Site(federation, member, offers, tmp_path / "home", starts)
    yield made
    if made.running is not None:
        made.running.stop()


def signed(method: str, path: str) -> bool:
    return method == "GET" and "X-Amz-Signature=" in path


def asked(line: Proxy) -> int:
    """How many requests the bucket has got by URL."""
    return sum(signed(method, path) for method, path in line.seen)


def host(line: Proxy) -> str:
    return line.endpoint.partition("://")[2]


def test_a_worker_downloads_a_model_from_the_bucket_if_its_owner_allows_the_host(
    site: Site, line: Proxy, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def from_coordinator(*arguments: Any) -> Iterator[memoryview]:
        sent.append(arguments)
        return iter(())

    monkeypatch.setattr(fetching.Fetcher, "_from_coordinator", from_coordinator)
    running = site.work(model, host(line), rounds=2)
    site.completed()
    assert (sent, asked(line), running.events("bucket-failed")) == ([], 3, []), "one more model is evaluated at the end"


@few("403", "changed", "cut", "silent")
@pytest.mark.parametrize("kind", ["403", "307", "changed", "cut", "short", "away", "silent"])
def test_after_a_fault_of_the_bucket_the_coordinator_sends_the_model_and_the_owner_is_told_once(
    site: Site, line: Proxy, model: Model, kind: str
) -> None:
    words = {
        "403": "answered 403",
        "307": "answered 307: a redirect is not followed",
        "changed": "what was downloaded is not the blob",
        "cut": "bytes before its end",
        "short": "not bytes 0-",
        "away": "closed connection without response",
        "silent": "timed out",
    }
    line.disturb(kind, signed)
    running = site.work(model, host(line), rounds=2)
    site.completed()
    [event] = running.events("bucket-failed")
    assert words[kind] in event["message"], event
    assert "X-Amz" not in running.out.getvalue()
    assert asked(line) == 1, "the bucket is left alone for a while"


def test_a_host_that_the_owner_does_not_name_gets_no_request(site: Site, line: Proxy, model: Model) -> None:
    running = site.work(model, "bucket.example.org")
    site.completed()
    [event] = running.events("bucket-failed")
    assert f"the URL is of {host(line)}, which downloads_from in policy.toml does not name" in event["message"]
    assert asked(line) == 0


def test_without_a_host_in_the_policy_a_worker_asks_for_no_url(site: Site, line: Proxy, model: Model) -> None:
    running = site.work(model)
    site.completed()
    assert (asked(line), running.events("bucket-failed")) == (0, [])


def test_a_model_below_a_mebibyte_comes_from_the_coordinator(
    site: Site, line: Proxy, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LEAST_BYTES", 1 << 20)
    running = site.work(model, host(line))
    site.completed()
    assert (asked(line), running.events("bucket-failed")) == (0, [])


def test_the_bucket_is_tried_again_later_and_a_fault_that_lasts_is_told_once(
    site: Site, line: Proxy, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "PAUSE_SECONDS", 0.0)
    line.disturb("403", signed)
    running = site.work(model, host(line), rounds=3)
    site.completed()
    assert (asked(line), len(running.events("bucket-failed"))) == (4, 1), "one more model is evaluated at the end"


def test_worker_model_downloads_from_the_bucket_and_after_a_fault_the_coordinator_sends_the_model(
    site: Site, line: Proxy, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetched_model, "LEAST_BYTES", 1)
    site.work(model)
    site.completed()
    home, out = tmp_path / "member", tmp_path / "model.safetensors"
    site.member.save(home)
    for kind, hosts in (("", host(line)), ("403", host(line)), ("changed", host(line)), ("", "bucket.example.org")):
        line.calm()
        if kind:
            line.disturb(kind, signed)
        (home / "policy.toml").write_text(f'downloads_from = ["{hosts}"]\n')
        before = asked(line)
        told = command("model", site.run, "--home", str(home), "--out", str(out), "--force")
        assert asked(line) - before == (hosts == host(line)), kind
        assert ("the coordinator sends the bytes" in told) == (bool(kind) or hosts != host(line)), told
        assert "X-Amz" not in told
        [fetched] = (home / "models").glob("*.safetensors")
        assert digest(fetched.read_bytes()) == site.federation.run(site.run).model
        fetched.unlink()


# --- one download


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory, storage: Storage) -> Iterator[tuple[Proxy, Path]]:
    """The bucket behind https, and the file of the CA."""
    directory, authority, key = tmp_path_factory.mktemp("tls"), Authority("bucket"), new_tls_key()
    (directory / "ca.pem").write_bytes(pem(authority.ca))
    (directory / "server.pem").write_bytes(private_key_pem(key) + pem(authority.issue([], ("localhost",), key)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.pem")
    with proxy(storage, tls=context) as made:
        storage.bucket("encrypted").put("blob", DATA)
        yield made, directory / "ca.pem"


def url_of(line: Proxy, key: str = "blob") -> str:
    return ObjectBucket(f"s3://{BUCKET}/encrypted", endpoint=line.endpoint).download_url(key, 600)


def got(text: str, line: Proxy, *, offset: int = 0, size: int = SIZE, seconds: float = 60.0, **options: Any) -> bytes:
    url = BlobUrl.parse(text, {host(line)})
    options = {"proxy": no_proxy, "stopped": lambda: False, **options}
    return b"".join(download(url, offset=offset, size=size, seconds=seconds, **options))


def test_a_download_by_https_goes_on_where_it_ended_also_through_a_proxy(
    encrypted: tuple[Proxy, Path], tmp_path: Path
) -> None:
    line, ca = encrypted
    with environment({"SSL_CERT_FILE": str(ca)}):
        assert got(url_of(line), line) == DATA
        assert got(url_of(line), line, offset=70_000) == DATA[70_000:]
        with connect_proxy(tmp_path / "log") as address:
            assert got(url_of(line), line, proxy=lambda _: HttpProxy.parse(address, "test")) == DATA
        assert (tmp_path / "log").read_text() == f"{host(line)} 200\n"
        refusal = "403 " if line.checks_signatures else "404 "
        with pytest.raises(DownloadFailed, match=f"answered {refusal}"):
            got(url_of(line).replace("/blob?", "/other?"), line)
        with pytest.raises(DownloadFailed, match="answered 404 "):
            got(url_of(line, "missing"), line)
        for size in (SIZE - 1, SIZE + 1):
            with pytest.raises(DownloadFailed, match=f"has bytes 0-.*, not bytes 0-{size - 1}/{size}"):
                got(url_of(line), line, size=size)


def test_a_bucket_with_a_certificate_of_an_unknown_authority_gets_no_request(encrypted: tuple[Proxy, Path]) -> None:
    line, _ = encrypted
    line.seen.clear()
    with pytest.raises(DownloadFailed, match="CERTIFICATE_VERIFY_FAILED"):
        got(url_of(line), line)
    assert line.seen == []


def test_a_download_ends_when_its_time_is_over_or_it_is_not_wanted_any_more(encrypted: tuple[Proxy, Path]) -> None:
    line, ca = encrypted
    line.disturb("silent")
    with environment({"SSL_CERT_FILE": str(ca)}):
        with pytest.raises(DownloadFailed, match="took longer than 0 s"):
            got(url_of(line), line, seconds=0.0)
        with pytest.raises(DownloadFailed, match=r"closed connection|EOF"):  # and not that it timed out
            got(url_of(line), line, stopped=lambda: True)
    line.calm()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://bucket.example.org/x", ""),
        ("https://BUCKET.example.org:443/x?a=b%20c", ""),
        ("http://127.0.0.1:9000/x", ""),
        ("https://bucket.example.org:8443/x", "does not name"),
        ("https://bucket.example.org.evil.example/x", "does not name"),
        ("https://169.254.169.254/latest", "does not name"),
        ("http://bucket.example.org:443/x", "only https"),
        ("https://bucket.example.org@evil.example/x", "no https URL"),
        ("https://bucket.example.org", "no https URL"),
        ("https://bucket.example.org/x y", "no https URL"),
        ("https://bucket.example.org/x\r\nHost: evil.example", "no https URL"),
        ("https://bucket.example.org/x\n", "no https URL"),
        ("file:///etc/passwd", "no https URL"),
        ("ftp://bucket.example.org/x", "no https URL"),
        ("https://bucket.example.org/" + "x" * 9000, "no https URL"),
        ("", "no https URL"),
    ],
)
def test_a_url_that_the_owner_does_not_allow_is_refused(text: str, problem: str) -> None:
    allowed = Policy(downloads_from=("Bucket.example.org", "127.0.0.1:9000")).download_addresses
    if not problem:
        assert BlobUrl.parse(text, allowed).address in allowed
        return
    with pytest.raises(DownloadFailed, match=problem):
        BlobUrl.parse(text, allowed)


def test_a_policy_names_hosts_without_scheme_path_or_pattern(tmp_path: Path) -> None:
    for entry in ("https://bucket.example.org", "bucket.example.org/x", "*.example.org", "", "a:b", "u@b"):
        told = policy_refused(tmp_path / "policy.toml", f"downloads_from = [{entry!r}]")
        assert "downloads_from" in told
        assert "neither HOST nor HOST:PORT" in told
