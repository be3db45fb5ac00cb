import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import pytest

from storage import blob_directory
from storage.blob_directory import DirectoryStore
from tests.few import few
from tests.storage.scene import blob_file, stored


def leftovers(store: DirectoryStore) -> list[Path]:
    return [path for path in (store.root / "tmp").rglob("*") if path.is_file() and path.name != "lock"]


def test_an_upload_that_nobody_holds_any_more_is_removed(blobs: DirectoryStore) -> None:
    writer = blobs.writer()
    assert len(leftovers(blobs)) == 1
    del writer
    assert leftovers(blobs) == []


def test_the_directories_above_a_store_are_made(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "home" / "blobs")
    assert store.read(store.put(b"hello")) == b"hello"


def test_storing_a_blob_again_changes_neither_its_file_nor_its_bytes_but_makes_it_young(blobs: DirectoryStore) -> None:
    name = blobs.put(b"hello")
    before = blob_file(blobs, name).stat()
    os.utime(blob_file(blobs, name), (0, 0))
    assert blobs.put(b"hello") == name
    assert blob_file(blobs, name).stat().st_ino == before.st_ino
    assert blobs.stat(name).modified >= before.st_mtime
    assert leftovers(blobs) == []


def test_blobs_that_are_deleted_while_they_are_listed_are_left_out(blobs: DirectoryStore) -> None:
    names = sorted(blobs.put(bytes([i])) for i in range(3))
    listed = blobs.scan()
    assert next(listed).digest == names[0]
    blobs.delete(names[1])
    assert [blob.digest for blob in listed] == names[2:]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of the blobs that were checked, in order."""
    digests = []
    check = blob_directory._check

    def count(digest: str, file: FileIO) -> None:
        digests.append(digest)
        check(digest, file)

    monkeypatch.setattr(blob_directory, "_check", count)
    return digests


def test_of_many_threads_that_want_a_new_blob_at_once_one_checks_it(blobs: DirectoryStore, checked: list[str]) -> None:
    name = DirectoryStore(blobs.root).put(bytes(4_000_000))
    together = threading.Barrier(8)

    def ask(_: int) -> None:
        together.wait()
        blobs.local(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert checked == [name]


def test_a_blob_that_was_hashed_on_its_way_is_not_checked_again_nor_when_it_becomes_young(
    blobs: DirectoryStore, checked: list[str]
) -> None:
    name = blobs.put(b"hello")
    blobs.claim(name)
    assert blobs.put(b"hello") == name
    blobs.local(name)
    assert checked == []
    other = DirectoryStore(blobs.root)
    other.claim(name)
    other.local(name)
    assert checked == [name]


def test_a_blob_that_was_checked_is_checked_again_once_too_many_others_were(
    blobs: DirectoryStore, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_directory, "MAX_VERIFIED", 2)
    other = DirectoryStore(blobs.root)
    one, two, three = (other.put(bytes([i])) for i in range(3))
    for name in (one, two, one, two, three, three, one):
        blobs.local(name)
    assert checked == [one, two, three, one]


def test_only_the_owner_may_read(blobs: DirectoryStore) -> None:
    name = blobs.put(b"hello")
    with blobs.writer():
        assert [path.stat().st_mode & 0o777 for path in leftovers(blobs)] == [0o600]
    assert blob_file(blobs, name).stat().st_mode & 0o777 == 0o600
    assert all(path.stat().st_mode & 0o077 == 0 for path in [blobs.root, *blobs.root.rglob("*")])


@pytest.mark.parametrize("options", [{}, {"durable": False}])
def test_a_blobs_bytes_and_the_directories_above_it_reach_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    store = DirectoryStore(tmp_path / "blobs", **options)
    durable = options.get("durable", True)
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(store.root)
        synced.append("upload" if path.parts[:1] == ("tmp",) else str(path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    name = store.put(b"hello")
    algorithm, _, value = name.partition(":")
    made = [".", algorithm, "upload", f"{algorithm}/{value[:2]}"]
    assert synced == (made if durable else [])
    synced.clear()
    store.put(b"hello")
    assert synced == ([f"{algorithm}/{value[:2]}"] if durable else []), "the first writer may not have synced it yet"


WRITE_FOR_EVER = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from storage.blob_directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
for number in range(1_000_000):
    with store.writer() as writer:
        for piece in range(20):
            writer.write(f"{number} ".encode() * 5_000)
            print("wrote", flush=True)
        print("commit", writer.commit(), flush=True)
"""


@few(1, 21, 63)
@pytest.mark.parametrize("lines", [1, 7, 20, 21, 50, 63, 105])
def test_a_writer_killed_at_any_point_leaves_whole_blobs_and_the_sweep_takes_the_rest(
    blobs: DirectoryStore, lines: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, blobs.root], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(lines)]
        assert blobs.sweep_temporary() == 0, "it lives"
        process.send_signal(signal.SIGKILL)
    committed = {words[1] for words in said if words[0] == "commit"}
    assert committed <= set(stored(blobs))
    for name in stored(blobs):
        blobs.verify(name)
    blobs.sweep_temporary()
    assert leftovers(blobs) == []
    assert committed <= set(stored(blobs))


def test_the_sweep_goes_on_after_uploads_of_living_writers(blobs: DirectoryStore) -> None:
    with blobs.writer(), blobs.writer():
        dead = [blobs.root / "tmp" / name for name in "abcdefghij"]
        for path in dead:
            path.write_bytes(b"left by a writer that died")
        assert blobs.sweep_temporary() == len(dead)
        assert len(leftovers(blobs)) == 2
