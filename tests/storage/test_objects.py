"""A store in a bucket: its cache, its probe, and the faults that a proxy before a real bucket makes."""

import http.client
import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from federation.digests import digest
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt, BlobMissing, BlobStoreUnavailable
from storage.faults import StorageFault, fault_of
from storage.objects.bucket import PART, PIECE, ObjectBucket, Patience
from storage.objects.store import ObjectStore
from tests.few import few
from tests.running import wait_for
from tests.storage import buckets
from tests.storage.buckets import BUCKET, SECRET, Proxy, Storage, environment
from tests.storage.scene import overwrite, stored

DATA = secrets.token_bytes(100_000)
NAME = digest(DATA)


storage, _line, line = buckets.storage, buckets._line, buckets.line  # fixtures


@pytest.fixture
def blobs(line: Proxy, tmp_path: Path) -> ObjectStore:
    return line.store(tmp_path / "cache", secrets.token_hex(8))


def another(blobs: ObjectStore, cache: Path, limit: int = 1 << 30) -> ObjectStore:
    """A store on the same bucket, of a process with an empty cache."""
    return ObjectStore(blobs._bucket, cache, limit=limit, federation="tests")


def cached(blobs: ObjectStore) -> set[str]:
    return {blob.digest for blob in blobs._cache.scan()}


def requested(method: str, url: str, **headers: str) -> tuple[int, bytes]:
    """The status and the body that a request gets."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc)
    connection.request(method, f"{parts.path}?{parts.query}", headers=headers)
    response = connection.getresponse()
    return response.status, response.read()


def of_blobs(method: str) -> Callable[[str, str], bool]:
    return lambda asked, path: asked == method and "/blake3/" in path


# --- the cache


def test_a_blob_is_read_from_the_cache_and_fetched_once_where_it_is_not_there(
    blobs: ObjectStore, line: Proxy, tmp_path: Path
) -> None:
    blobs.put(DATA)
    line.seen.clear()
    assert blobs.read(NAME) == DATA
    assert line.seen == []
    other = another(blobs, tmp_path / "other")
    assert [other.read(NAME) for _ in range(3)] == [DATA] * 3
    assert [method for method, _ in line.seen] == ["HEAD", "GET"]


def test_a_blob_that_was_stored_is_not_sent_again_by_the_same_process(blobs: ObjectStore, line: Proxy) -> None:
    blobs.put(DATA)
    line.seen.clear()
    blobs.put(DATA)
    assert [method for method, _ in line.seen] == ["HEAD"]


def test_a_blob_of_several_parts_is_sent_and_fetched(storage: Storage, tmp_path: Path) -> None:
    blobs = storage.store(tmp_path / "cache", secrets.token_hex(8), patience=Patience())
    data = secrets.token_bytes(PART + PIECE + 1)
    assert another(blobs, tmp_path / "other").read(blobs.put(data)) == data


def test_the_cache_evicts_what_was_not_used_for_the_longest_time(blobs: ObjectStore, tmp_path: Path) -> None:
    small = another(blobs, tmp_path / "small", limit=10_000)
    names = [small.put(bytes([i]) * 3000) for i in range(3)]
    small.read(names[0])
    names.append(small.put(bytes([3]) * 3000))
    assert cached(small) == {names[0], names[2], names[3]}
    assert small.read(names[1]) == bytes([1]) * 3000
    assert names[1] in cached(small)
    assert sum(blob.size for blob in small._cache.scan()) <= 10_000
    assert stored(small) == sorted(names)


def test_the_cache_keeps_what_is_in_use_also_beyond_its_limit(
    blobs: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = another(blobs, tmp_path / "small", limit=10_000)
    files = [small.local(small.put(bytes([i]) * 3000)) for i in range(6)]
    assert len(cached(small)) == 6
    assert "raise blob_cache_bytes" in caplog.text
    for i, file in enumerate(files):
        with file.open("rb", 0) as opened:
            assert opened.read() == bytes([i]) * 3000
    files.clear()
    small.put(b"x" * 3000)
    assert sum(blob.size for blob in small._cache.scan()) <= 10_000


def test_a_file_in_use_that_another_process_evicts_is_fetched_again(blobs: ObjectStore) -> None:
    file = blobs.local(blobs.put(DATA))
    blobs._cache.delete(NAME)
    with file.open("rb", 0) as opened:
        assert opened.read() == DATA


def test_a_copy_that_is_damaged_is_fetched_again(blobs: ObjectStore, tmp_path: Path) -> None:
    blobs.put(DATA)
    other = another(blobs, tmp_path / "cache")
    path = tmp_path / "cache" / "blake3" / NAME[7:9] / NAME[9:]
    path.write_bytes(b"what a loss of power left")
    assert other.read(NAME) == DATA


def test_a_cache_that_is_lost_loses_no_blob(blobs: ObjectStore, tmp_path: Path) -> None:
    names = sorted(blobs.put(bytes([i])) for i in range(5))
    other = another(blobs, tmp_path / "other")
    assert stored(other) == names
    for name in names:
        other.verify(name)
    assert cached(other) == set()


# --- the probe


def test_the_probe_leaves_nothing_and_names_what_fails(blobs: ObjectStore, line: Proxy) -> None:
    blobs.probe()
    assert [found.key for found in blobs._bucket.list("")] == ["federation"]
    for concerns, action in (
        (lambda method, path: method == "PUT", "store probe/"),
        (lambda method, path: method == "GET" and "/probe/" in path, "return bytes 7 to 20 of probe/"),
        (lambda method, path: method == "GET" and "list-type" in path, "list its objects"),
        (lambda method, path: method == "DELETE", "remove probe/"),
    ):
        line.disturb("403", concerns)
        with pytest.raises(BlobStoreUnavailable, match=rf"^s3://\S+ cannot {action}.*: 403") as caught:
            blobs.probe()
        assert fault_of(caught.value) is StorageFault.BLOB_STORE
        line.calm()


def test_the_bucket_of_another_federation_is_refused(blobs: ObjectStore, tmp_path: Path) -> None:
    other = ObjectStore(blobs._bucket, tmp_path / "other", limit=1, federation="another")
    with pytest.raises(BlobStoreUnavailable, match="holds the blobs of another federation"):
        other.probe(takes_new=True)


def test_a_wrong_key_a_wrong_bucket_and_an_empty_one_are_named(storage: Storage, tmp_path: Path) -> None:
    def store(name: str = BUCKET, secret: str = SECRET) -> ObjectStore:
        bucket = storage.bucket("some", name=name, secret=secret)
        return ObjectStore(bucket, tmp_path / "cache", limit=1, federation="tests")

    with pytest.raises(BlobStoreUnavailable, match="403"):
        store(secret="another secret").probe(takes_new=True)
    with pytest.raises(BlobStoreUnavailable, match="404 NoSuchBucket"):
        store(name="nowhere").probe(takes_new=True)
    with pytest.raises(BlobStoreUnavailable, match="was emptied or replaced"):
        store().probe()
    with pytest.raises(BlobStoreUnavailable, match="was emptied or replaced"):  # and not: the blob is missing
        store().read(NAME)


# --- faults


@few("away", "503", "cut", "short")
@pytest.mark.parametrize("kind", ["away", "silent", "403", "500", "503", "cut", "short"])
def test_a_bucket_that_fails_is_unavailable_and_no_blob_counts_as_damaged(
    blobs: ObjectStore, line: Proxy, tmp_path: Path, kind: str
) -> None:
    blobs.put(DATA)
    other = another(blobs, tmp_path / "other")
    line.disturb(kind, lambda method, path: method == "GET")
    with pytest.raises(BlobStoreUnavailable):
        other.read(NAME)
    assert cached(other) == set()
    if kind not in ("cut", "short"):  # these are answers with a body
        line.disturb(kind)
        for access in (other.stat, other.claim, other.verify, other.delete, lambda name: other.put(b"new")):
            with pytest.raises(BlobStoreUnavailable):
                access(NAME)
    line.calm()
    assert other.read(NAME) == DATA
    other.put(b"new")


@pytest.mark.parametrize("kind", ["away", "503", "cut", "changed"])
def test_one_request_that_fails_or_whose_bytes_were_changed_on_their_way_is_repeated(
    blobs: ObjectStore, line: Proxy, tmp_path: Path, kind: str
) -> None:
    blobs.put(DATA)
    line.disturb(kind, of_blobs("GET"), times=1)
    assert another(blobs, tmp_path / "other").read(NAME) == DATA
    line.disturb(kind, of_blobs("GET"), times=1)
    blobs.verify(NAME)


def test_an_object_that_was_changed_is_corrupt_and_one_that_was_removed_is_missing(
    blobs: ObjectStore, tmp_path: Path
) -> None:
    blobs.put(DATA)
    overwrite(blobs, NAME, DATA[::-1])
    other = another(blobs, tmp_path / "other")
    for access in (other.read, other.verify):
        with pytest.raises(BlobCorrupt, match=NAME):
            access(NAME)
    assert cached(other) == set()
    blobs.delete(NAME)
    for access in (other.read, other.verify):
        with pytest.raises(BlobMissing, match=NAME):
            access(NAME)


def test_a_commit_that_the_bucket_refuses_stores_nothing_and_succeeds_later(blobs: ObjectStore, line: Proxy) -> None:
    writer = blobs.resume("one")
    writer.write(DATA)
    line.disturb("503", lambda method, path: method in ("PUT", "POST"))
    with pytest.raises(BlobStoreUnavailable):
        writer.commit(NAME)
    writer.suspend()
    line.calm()
    assert stored(blobs) == []
    again = blobs.resume("one")
    assert again.written == len(DATA)
    assert again.commit(NAME) == NAME
    assert blobs.partial_uploads() == []
    assert blobs.read(NAME) == DATA


# --- URLs


def test_with_a_url_anybody_gets_one_blob_for_a_while_and_nothing_else(line: Proxy, tmp_path: Path) -> None:
    bucket = line.bucket("urls")
    blobs = ObjectStore(bucket, tmp_path / "cache", limit=1 << 30, federation="tests", url_seconds=600)
    blobs.probe(takes_new=True)
    blobs.put(DATA)
    other = blobs.put(b"other")
    url = blobs.download_url(NAME)
    assert requested("GET", url) == (200, DATA)
    assert requested("GET", url, Range="bytes=7-19") == (206, DATA[7:20])
    for method in ("PUT", "DELETE"):
        assert requested(method, url)[0] == 403
    changed = url.replace(urlsplit(url).path, urlsplit(blobs.download_url(other)).path)
    assert requested("GET", changed)[0] == 403
    blobs.verify(NAME)
    brief = bucket.download_url(f"blake3/{NAME[7:9]}/{NAME[9:]}", 1)
    wait_for(lambda: requested("GET", brief)[0] == 403, "the URL to end")


def test_without_the_option_and_with_a_directory_there_are_no_urls(blobs: ObjectStore, tmp_path: Path) -> None:
    blobs.put(DATA)
    assert blobs.download_url(NAME) == DirectoryStore(tmp_path / "directory").download_url(NAME) == ""


def test_a_probe_names_that_the_credentials_sign_no_urls(tmp_path: Path) -> None:
    with environment({"AZURE_STORAGE_ACCOUNT_NAME": "tests", "AZURE_STORAGE_SAS_TOKEN": "sv=2023&sig=abc"}):
        bucket = ObjectBucket("az://container/x")
    blobs = ObjectStore(bucket, tmp_path / "cache", limit=1 << 30, federation="tests", url_seconds=600)
    with pytest.raises(BlobStoreUnavailable, match="az://container/x cannot sign a URL of federation: "):
        blobs.probe(takes_new=True)
