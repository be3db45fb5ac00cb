"""What every blob store promises: the directory, a store in memory, and buckets of two S3 services."""

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.aggregation import streaming
from federation.aggregation.gram import combine, gram
from federation.digests import digest
from federation.vectors import to_bytes, update_layout, update_rows
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore, PartialUpload
from storage.database import Database
from storage.objects.store import ObjectStore
from storage.table_claims import TableClaims
from tests.conftest import Postgres, postgresql_database
from tests.few import few_of
from tests.storage.buckets import SERVERS, Storage
from tests.storage.memory_blobs import MemoryStore
from tests.storage.scene import date_back, overwrite, stored

ABSENT = digest(b"never stored")
SEVERAL = "juicefs, for several coordinators"


@pytest.fixture(scope="module")
def storages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Storage]]:
    """The S3 services, each started when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def started(name: str) -> Storage:
            return stack.enter_context(SERVERS[name](tmp_path_factory.mktemp(name)))

        yield started


@pytest.fixture(scope="module")
def record(postgres: Postgres) -> Iterator[Database]:
    """The record of several coordinators."""
    with postgresql_database(postgres) as url, closing(Database.open(url)) as database:
        database.migrate()
        yield database


@pytest.fixture(params=few_of(("directory", "memory", "juicefs", "moto", SEVERAL), "directory", "memory", "juicefs"))
def blobs(request: pytest.FixtureRequest, tmp_path: Path, storages: Callable[[str], Storage]) -> Iterator[BlobStore]:
    store: Any
    directory, service = tmp_path / "blobs", "juicefs" if request.param == SEVERAL else request.param
    if service in SERVERS:
        claims = TableClaims(request.getfixturevalue("record")) if request.param == SEVERAL else None
        store = storages(service).store(directory, secrets.token_hex(8), claims=claims)
    else:
        store = DirectoryStore(directory) if service == "directory" else MemoryStore()
    yield store
    assert not (store.uploads if service == "memory" else list((directory / "tmp").iterdir())), "uploads left"
    assert not store.partial_uploads()


def test_a_blob_is_read_back_by_its_digest(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert name == digest(b"hello")
    assert blobs.exists(name)
    assert blobs.stat(name).size == 5
    assert blobs.read(name) == b"hello"
    assert list(blobs.scan()) == [blobs.stat(name)]
    blobs.verify(name)


def test_a_blob_may_be_named_by_sha_256(blobs: BlobStore) -> None:
    name = blobs.put(b"hello", algorithm="sha256")
    assert name == "sha256:" + hashlib.sha256(b"hello").hexdigest()
    assert blobs.read(name) == b"hello"
    blobs.verify(name)
    assert stored(blobs) == [name]


def test_all_blobs_are_listed_in_the_order_of_their_digests(blobs: BlobStore) -> None:
    names = [blobs.put(bytes([i]), algorithm=kind) for i in range(20) for kind in ("blake3", "sha256")]
    assert stored(blobs) == sorted(names)


def test_a_range_of_a_blob_is_read_from_its_offset_to_its_length_or_to_the_end(blobs: BlobStore) -> None:
    data = os.urandom(100_000)
    name = blobs.put(data)
    for offset, length in ((0, None), (7, None), (100_000, None), (0, 10), (5, 70_000), (99_990, 50), (3, 0)):
        with blobs.open_range(name, offset, length) as file:
            pieces = list(iter(lambda: file.read(999), b""))
        assert b"".join(pieces) == data[offset : None if length is None else offset + length]
    for offset in (100_001, -1):
        with pytest.raises(ValueError, match=f"100000 bytes; byte {offset} is not one of them"):
            blobs.open_range(name, offset)


def test_a_writer_takes_pieces_and_buffers_of_any_kind(blobs: BlobStore) -> None:
    data = os.urandom(3_000_000)
    with blobs.writer() as writer:
        writer.write(data[:10])
        writer.write(memoryview(data)[10:2_000_000])
        writer.write(memoryview(bytearray(data[2_000_000:])).cast("I"))
        assert writer.written == len(data)
        assert stored(blobs) == []
        assert blobs.read(writer.commit()) == data


def test_a_writer_that_does_not_hash_trusts_the_digest_of_its_caller(blobs: BlobStore) -> None:
    with blobs.writer(hash=False) as writer:
        writer.write(b"hello")
        assert writer.commit(digest(b"hello")) == digest(b"hello")
    with blobs.writer(hash=False) as writer, pytest.raises(ValueError, match="commit needs the digest"):
        writer.commit()


def test_a_writer_that_hashes_refuses_another_digest_and_stores_nothing(blobs: BlobStore) -> None:
    with blobs.writer() as writer:
        writer.write(b"hello")
        with pytest.raises(BlobCorrupt, match=ABSENT):
            writer.commit(ABSENT)
    assert stored(blobs) == []


def test_an_upload_that_is_not_committed_leaves_no_blob(blobs: BlobStore) -> None:
    with blobs.writer() as writer:
        writer.write(b"half")
    with pytest.raises(RuntimeError, match="cut"), blobs.writer() as writer:
        raise RuntimeError("cut")
    assert stored(blobs) == []


def test_the_sweep_leaves_the_uploads_of_living_writers_alone(blobs: BlobStore) -> None:
    with blobs.writer() as writer:
        writer.write(b"hel")
        assert blobs.sweep_temporary() == 0
        writer.write(b"lo")
        name = writer.commit()
    assert blobs.read(name) == b"hello"


def test_an_upload_with_a_name_goes_on_where_it_was_suspended(blobs: BlobStore) -> None:
    data = os.urandom(3_000_000)
    first = blobs.resume("one")
    first.write(data[:2_000_000])
    first.suspend()
    first.suspend()
    assert blobs.partial_uploads() == [PartialUpload("one", 2_000_000)]
    second = blobs.resume("one")
    assert second.written == 2_000_000
    assert b"".join(second.arrived()) == data[:2_000_000]
    second.write(data[2_000_000:])
    assert b"".join(second.arrived()) == data
    assert second.commit(digest(data)) == digest(data)
    second.suspend()
    assert blobs.read(digest(data)) == data
    assert blobs.partial_uploads() == []


def test_an_upload_with_a_name_that_is_discarded_begins_anew(blobs: BlobStore) -> None:
    with blobs.resume("one") as writer:
        writer.write(b"half")
    with blobs.resume("one") as writer:
        assert writer.written == 0
    assert blobs.partial_uploads() == []


def test_an_upload_with_a_name_has_one_writer_at_a_time(blobs: BlobStore) -> None:
    with blobs.resume("one") as writer, blobs.resume("two") as other:
        with pytest.raises(BlockingIOError):
            blobs.resume("one")
        assert not blobs.drop("one")
        other.write(b"x")
        writer.write(b"hello")
        writer.commit(digest(b"hello"))
    assert blobs.partial_uploads() == []
    assert blobs.read(digest(b"hello")) == b"hello"


def test_an_upload_whose_blob_is_there_already_leaves_nothing_when_it_is_committed(blobs: BlobStore) -> None:
    blobs.put(b"hello")
    writer = blobs.resume("one")
    writer.write(b"hello")
    writer.commit(digest(b"hello"))
    assert blobs.partial_uploads() == []
    assert stored(blobs) == [digest(b"hello")]


def test_an_upload_that_nobody_writes_is_dropped_and_the_sweep_leaves_it(blobs: BlobStore) -> None:
    writer = blobs.resume("one")
    writer.write(b"half")
    writer.suspend()
    assert blobs.sweep_temporary() == 0
    assert stored(blobs) == []
    assert blobs.drop("one")
    assert not blobs.drop("one")
    assert blobs.partial_uploads() == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".a", "A", "a" * 201, "a\n", "a\0"])
def test_the_name_of_an_upload_is_no_path(blobs: BlobStore, name: str) -> None:
    for access in (blobs.resume, blobs.drop):
        with pytest.raises(ValueError, match="not the name of an upload"):
            access(name)


@pytest.mark.parametrize("renew", ["put", "claim"])
def test_a_blob_that_is_stored_again_or_claimed_counts_as_new(blobs: BlobStore, renew: str) -> None:
    name = blobs.put(b"hello")
    before = blobs.stat(name).modified
    date_back(blobs, name)
    assert blobs.stat(name).modified == 0
    blobs.put(b"hello") if renew == "put" else blobs.claim(name)
    assert blobs.stat(name).modified >= before


def test_a_damaged_blob_is_reported_by_name_each_time_until_it_is_stored_again(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert blobs.read(name) == b"hello"
    for damaged in (b"HELLO, WORLD", b"he"):
        overwrite(blobs, name, damaged)
        for check in (blobs.read, blobs.verify, blobs.local, blobs.open_range) * 2:
            with pytest.raises(BlobCorrupt, match=name, check=lambda error: error.digest == name):
                check(name)
        assert blobs.stat(name).size == len(damaged)
    blobs.put(b"hello")
    assert blobs.read(name) == b"hello"
    blobs.verify(name)
    overwrite(blobs, name, b"hellO")  # of the right size, and nobody has looked at it
    blobs.put(b"hello")
    assert blobs.read(name) == b"hello"


def open_files() -> int:
    """The number of open descriptors; a store may keep connections to its bucket."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(not target.startswith("socket:") for target in targets)


def test_ranges_that_were_closed_and_uploads_that_ended_hold_no_descriptor(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    before = open_files()
    ranges = [blobs.open_range(name, 1, length) for length in (None, 2)]
    for file in ranges:
        file.close()
    assert all(file.closed for file in ranges)
    with blobs.writer() as writer:
        writer.write(b"half")
    blobs.put(b"another")
    assert open_files() == before


def accesses(blobs: BlobStore) -> list[Callable[[str], object]]:
    return [blobs.local, blobs.open_range, blobs.stat, blobs.read, blobs.verify, blobs.claim]


def test_a_blob_that_is_not_stored_is_missing_by_name(blobs: BlobStore) -> None:
    for access in accesses(blobs):
        with pytest.raises(BlobMissing, match=f"^there is no blob {ABSENT} in this store$") as caught:
            access(ABSENT)
        assert caught.value.digest == ABSENT
    assert not blobs.exists(ABSENT)
    assert blobs.delete(ABSENT) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../../etc/passwd",
        "blake3:../../../etc/passwd",
        "blake3:" + "A" * 64,
        "md5:" + "0" * 64,
        ABSENT + "\n",
        "tmp/x",
    ],
)
def test_nothing_but_a_digest_names_a_blob(blobs: BlobStore, name: str) -> None:
    for access in (*accesses(blobs), blobs.exists, blobs.delete):
        with pytest.raises(ValueError, match="not a digest"):
            access(name)
    for hashed in (False, True):
        with blobs.writer(hash=hashed) as writer, pytest.raises(ValueError, match="not a digest"):
            writer.commit(name)
    assert stored(blobs) == []


def test_a_blob_longer_than_the_limit_is_not_read(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert blobs.read(name, limit=5) == b"hello"
    with pytest.raises(ValueError, match="5 bytes, more than the 4"):
        blobs.read(name, limit=4)


def test_a_deleted_blob_is_gone_and_its_size_told(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    file = blobs.local(name)
    assert blobs.delete(name, older_than=blobs.stat(name).modified) is None
    assert blobs.delete(name, older_than=blobs.stat(name).modified + 1) == 5
    assert stored(blobs) == []
    with pytest.raises(BlobMissing, match=name):
        file.open("rb", 0)


def test_threads_that_store_the_same_blobs_at_once_all_succeed(blobs: BlobStore) -> None:
    contents = [str(i % 5).encode() * 1000 for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(blobs.put, contents))
    assert names == [digest(content) for content in contents]
    assert len(stored(blobs)) == 5


def test_a_blob_stored_while_others_delete_it_is_there_when_it_is_young(blobs: BlobStore) -> None:
    # As garbage collection does it: only what is old. Each round the blob is made old, then stored and deleted at once.
    name = blobs.put(b"hello")
    for _ in range(30 if isinstance(blobs, ObjectStore) else 200):
        date_back(blobs, name)
        start = threading.Barrier(2)

        def delete(start: threading.Barrier = start) -> None:
            start.wait()
            blobs.delete(name, older_than=1.0)

        thread = threading.Thread(target=delete)
        thread.start()
        start.wait()
        blobs.put(b"hello")
        thread.join()
        assert blobs.read(name) == b"hello"


def test_the_space_that_is_left_is_known_or_known_to_have_no_limit(blobs: BlobStore) -> None:
    free = blobs.free_bytes()
    assert free is None or free > 1 << 20


@pytest.mark.parametrize(
    ("m", "open_files"),
    [(3, 256), (3, 2), pytest.param(300, 256, marks=pytest.mark.full)],
    ids=["files stay open", "more rows than files may be open", "hundreds of rows"],
)
def test_aggregation_streams_rows_from_any_store(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, m: int, open_files: int
) -> None:
    monkeypatch.setattr(streaming, "_OPEN_FILES", open_files)
    U = np.random.default_rng(m).standard_normal((m, 5000)).astype(np.float32)
    layout = update_layout([("loss", 5000)])
    rows = [update_rows(blobs.local(blobs.put(to_bytes(layout, u))))["loss"] for u in U]
    c = np.linspace(-1, 1, m)
    np.testing.assert_array_equal(rows[1].read(), U[1])
    assert gram(rows).tobytes() == gram(list(U)).tobytes()
    assert np.concatenate(list(combine(c, rows))).tobytes() == np.concatenate(list(combine(c, list(U)))).tobytes()
