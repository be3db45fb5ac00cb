import hashlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from federation.digests import digest
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore

ABSENT = digest(b"never stored")


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]


def leftovers(store: BlobStore) -> list[Path]:
    return files(store.root / "tmp")


def test_a_blob_is_read_back_by_its_digest(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert name == digest(b"hello")
    assert blobs.exists(name)
    assert blobs.size(name) == 5
    assert blobs.read(name) == b"hello"
    assert blobs.path(name).read_bytes() == b"hello"
    blobs.verify(name)
    assert list(blobs.digests()) == [name]


def test_a_blob_may_be_named_by_sha_256(blobs: BlobStore) -> None:
    name = blobs.put(b"hello", algorithm="sha256")
    assert name == "sha256:" + hashlib.sha256(b"hello").hexdigest()
    assert blobs.read(name) == b"hello"
    blobs.verify(name)
    assert not blobs.exists(digest(b"hello"))


def test_a_writer_takes_pieces_and_buffers_of_any_kind(blobs: BlobStore) -> None:
    data = os.urandom(3_000_000)
    with blobs.writer() as writer:
        writer.write(data[:10])
        writer.write(memoryview(data)[10:2_000_000])
        writer.write(memoryview(bytearray(data[2_000_000:])).cast("I"))
        assert writer.written == len(data)
        assert blobs.read(writer.commit()) == data
    assert leftovers(blobs) == []


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
    assert list(blobs.digests()) == []
    assert leftovers(blobs) == []


def test_what_is_not_committed_is_gone_when_the_writer_is_left(blobs: BlobStore) -> None:
    with blobs.writer() as writer:
        writer.write(b"half")
    assert files(blobs.root) == []
    with pytest.raises(RuntimeError, match="cut"), blobs.writer() as writer:
        raise RuntimeError("cut")
    assert files(blobs.root) == []


def test_storing_a_blob_again_changes_neither_its_file_nor_its_bytes_but_makes_it_young(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    before = blobs.path(name).stat()
    os.utime(blobs.path(name), (0, 0))
    assert blobs.put(b"hello") == name
    assert blobs.path(name).stat().st_ino == before.st_ino
    assert blobs.modified(name) >= before.st_mtime
    assert leftovers(blobs) == []


def test_a_truncated_blob_is_mended_by_storing_it_again(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    os.truncate(blobs.path(name), 2)
    blobs.put(b"hello")
    assert blobs.read(name) == b"hello"


def test_a_blob_whose_bytes_have_changed_is_found_out_by_name(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    blobs.path(name).write_bytes(b"hellO")
    for check in (blobs.read, blobs.verify):
        with pytest.raises(BlobCorrupt, match=name) as caught:
            check(name)
        assert caught.value.digest == name


def test_a_blob_that_is_not_stored_is_missing_by_name(blobs: BlobStore) -> None:
    assert not blobs.exists(ABSENT)
    for access in (blobs.path, blobs.size, blobs.read, blobs.verify, blobs.modified, blobs.claim):
        with pytest.raises(BlobMissing, match=ABSENT) as caught:
            access(ABSENT)
        assert caught.value.digest == ABSENT
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
def test_nothing_but_a_digest_becomes_a_path(blobs: BlobStore, name: str) -> None:
    for access in (blobs.path, blobs.size, blobs.exists, blobs.read, blobs.verify, blobs.delete, blobs.claim):
        with pytest.raises(ValueError, match="not a digest"):
            access(name)
    with blobs.writer(hash=False) as writer, pytest.raises(ValueError, match="not a digest"):
        writer.commit(name)
    with blobs.writer() as writer, pytest.raises(ValueError, match="not a digest"):
        writer.commit(name)
    assert files(blobs.root) == []


def test_a_blob_longer_than_the_limit_is_not_read(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert blobs.read(name, limit=5) == b"hello"
    with pytest.raises(ValueError, match="5 bytes, more than the 4"):
        blobs.read(name, limit=4)


def test_only_the_owner_may_read(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    with blobs.writer() as writer:
        assert writer.path.stat().st_mode & 0o777 == 0o600
    assert blobs.path(name).stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o077 == 0 for path in [blobs.root, *blobs.root.rglob("*")])


def test_a_deleted_blob_is_gone_and_its_size_told(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    assert blobs.delete(name, older_than=blobs.modified(name)) is None
    assert blobs.delete(name, older_than=blobs.modified(name) + 1) == 5
    assert not blobs.exists(name)


def test_threads_that_store_the_same_blobs_at_once_all_succeed(blobs: BlobStore) -> None:
    contents = [str(i % 5).encode() * 1000 for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(blobs.put, contents))
    assert names == [digest(content) for content in contents]
    assert len(list(blobs.digests())) == 5
    assert leftovers(blobs) == []


def test_a_blob_stored_while_others_delete_it_is_there_when_it_is_young(blobs: BlobStore) -> None:
    # As garbage collection does it: only what is old. Each round the blob is made old, then stored and deleted at once.
    name = blobs.put(b"hello")
    for _ in range(200):
        os.utime(blobs.path(name), (0, 0))
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


WRITE_FOR_EVER = """
import sys
from pathlib import Path
from storage.blobs import BlobStore
store = BlobStore(Path(sys.argv[1]))
for number in range(1_000_000):
    with store.writer() as writer:
        for piece in range(20):
            writer.write(f"{number} ".encode() * 5_000)
            print("wrote", flush=True)
        print("commit", writer.commit(), flush=True)
"""


@pytest.mark.parametrize("lines", [1, 7, 20, 21, 50, 63, 105])
def test_a_writer_killed_at_any_point_leaves_whole_blobs_and_the_sweep_takes_the_rest(
    blobs: BlobStore, lines: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, blobs.root], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
    committed = {words[1] for words in said if words[0] == "commit"}
    assert committed <= set(blobs.digests())
    for name in blobs.digests():
        blobs.verify(name)
    blobs.sweep_temporary()
    assert leftovers(blobs) == []
    assert committed <= set(blobs.digests())


def test_the_sweep_removes_what_a_killed_writer_left(blobs: BlobStore) -> None:
    script = "import sys; exec(sys.stdin.readline())"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(
            "from pathlib import Path; from storage.blobs import BlobStore; "
            f"w = BlobStore(Path({str(blobs.root)!r})).writer(); w.write(b'x' * 100000); print('ready', flush=True); "
            "sys.stdin.read()\n"
        )
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        assert blobs.sweep_temporary() == 0, "its writer lives"
        assert len(leftovers(blobs)) == 1
        process.send_signal(signal.SIGKILL)
    assert blobs.sweep_temporary() == 1
    assert leftovers(blobs) == []


def test_the_sweep_leaves_a_living_writer_of_this_process_alone(blobs: BlobStore) -> None:
    with blobs.writer() as writer:
        writer.write(b"hel")
        assert blobs.sweep_temporary() == 0
        writer.write(b"lo")
        name = writer.commit()
    assert blobs.read(name) == b"hello"


def test_a_second_store_on_the_same_directory_sees_the_same_blobs(blobs: BlobStore) -> None:
    name = blobs.put(b"hello")
    again = BlobStore(blobs.root)
    assert list(again.digests()) == [name]
    assert again.read(name) == b"hello"
