"""Blobs in a directory: the blob store of a coordinator, and the cache of one whose blobs are objects in a bucket.

A blob is written to a temporary file, fsynced and renamed into place, and its directory is fsynced: the store has the
whole blob or none of it, after `kill -9` and after loss of power. Names come from `federation.digests.parse` alone, so
that no text from the wire becomes a path.

    ROOT/blake3/ab/cdef...     a blob: blake3:abcdef...
    ROOT/tmp/...               blobs being written, each flocked by its writer while the writer lives
    ROOT/partial/NAME          the same for named uploads, which outlive their writer
    ROOT/lock                  held for the instants in which a blob is claimed (shared) or deleted (exclusive)
"""

import errno
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Literal
from weakref import WeakValueDictionary

from blake3 import blake3

from federation import digests
from federation.durable_files import make_directories, sync_directory
from federation.vectors import File
from storage.blobs import (
    BlobCorrupt,
    BlobMissing,
    BlobStat,
    BlobStore,
    BlobWriter,
    NamedWriter,
    PartialUpload,
    check_upload_name,
)

_PIECE = 1 << 20  # bytes read at a time  # no mutant: any size gives the same digest
MAX_VERIFIED = 10_000  # the most blobs that are remembered as checked  # no mutant: any number will do


class DirectoryStore(BlobStore):
    """A directory of blobs.

    Args:
        root: the directory; created with mode 0700 if it is missing.
        durable: if true, a blob survives a loss of power; otherwise only the death of the process.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._lock = threading.Lock()
        self._verified: set[bytes] = set()  # a `_mark` of each file that was checked, in its version
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        make_directories(root, 0o700)
        for name in ("tmp", "partial"):
            (root / name).mkdir(mode=0o700, exist_ok=True)

    def writer(
        self,
        *,
        algorithm: str = digests.DEFAULT_ALGORITHM,
        hash: bool = True,  # noqa: A002
    ) -> "DirectoryWriter":
        return DirectoryWriter(self, algorithm, hash)

    def resume(self, name: str) -> "NamedDirectoryWriter":
        return NamedDirectoryWriter(self, self.root / "partial" / check_upload_name(name))

    def partial_uploads(self) -> list[PartialUpload]:
        uploads = []
        for path in sorted((self.root / "partial").iterdir()):
            with suppress(FileNotFoundError):  # it was committed a moment ago
                uploads.append(PartialUpload(path.name, path.stat().st_size))
        return uploads

    def drop(self, name: str) -> bool:
        path = self.root / "partial" / check_upload_name(name)
        with self._locked(fcntl.LOCK_EX):
            return _remove_abandoned(path)

    def local(self, digest: str) -> File:
        blob = _BlobFile(digest, self._path(digest))
        with blob.open("rb", 0) as file:  # no mutant: mypy takes no other number
            with self._lock:
                turn = self._turns.setdefault(digest, threading.Lock())
            with turn:  # many callers ask for a new model at once: one of them checks it
                mark = _mark(digest, os.fstat(file.fileno()))
                if mark not in self._verified:
                    _check(digest, file)
                    self._note_verified(mark)
        return blob

    def stat(self, digest: str) -> BlobStat:
        path = self._path(digest)
        with _missing(digest, path):
            status = path.stat()
        return BlobStat(digest, status.st_size, status.st_mtime)

    def scan(self) -> Iterator[BlobStat]:
        for algorithm in ("blake3", "sha256"):
            for directory in sorted((self.root / algorithm).glob("[0-9a-f][0-9a-f]")):
                for name in sorted(os.listdir(directory)):
                    with suppress(BlobMissing):
                        yield self.stat(f"{algorithm}:{directory.name}{name}")

    def verify(self, digest: str) -> None:
        with _BlobFile(digest, self._path(digest)).open("rb", 0) as file:  # no mutant: mypy takes no other number
            _check(digest, file)

    def claim(self, digest: str) -> None:
        with self._locked(fcntl.LOCK_SH), _missing(digest, self._path(digest)):
            self._touch(digest)

    def delete(self, digest: str, *, older_than: float | None = None) -> int | None:
        with self._locked(fcntl.LOCK_EX):
            try:
                status = self.stat(digest)
            except BlobMissing:
                return None
            if older_than is not None and status.modified >= older_than:
                return None
            self._path(digest).unlink()
            return status.size

    def sweep_temporary(self) -> int:
        with self._locked(fcntl.LOCK_EX):
            return sum(_remove_abandoned(path) for path in (self.root / "tmp").iterdir())

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def _path(self, digest: str) -> Path:
        algorithm, value = digests.parse(digest)
        return self.root / algorithm / value[:2] / value[2:]

    def _place(self, descriptor: int, temporary: Path, digest: str) -> None:
        path = self._path(digest)
        _make_directory(path.parent, self.root, durably=self._durable)
        with self._locked(fcntl.LOCK_SH):
            # A stored blob keeps its file, which readers may have mapped, and only gets a new age. A damaged one is
            # replaced.
            try:
                self.local(digest)
            except (BlobCorrupt, BlobMissing):
                if self._durable:
                    os.fsync(descriptor)
                temporary.replace(path)
                self._note_verified(_mark(digest, path.stat()))  # the writer has hashed its bytes
            else:
                self._touch(digest)
        if self._durable:
            sync_directory(path.parent)  # in both cases: the first writer may not have come this far yet

    def _touch(self, digest: str) -> None:
        """Sets the age of a blob to zero; a checked blob stays checked."""
        path = self._path(digest)
        checked = _mark(digest, path.stat()) in self._verified
        os.utime(path)
        if checked:
            self._note_verified(_mark(digest, path.stat()))

    def _note_verified(self, mark: bytes) -> None:
        with self._lock:
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.clear()
            self._verified.add(mark)

    def _locked(self, mode: int) -> AbstractContextManager[None]:
        return locked(self.root / "lock", mode)


@contextmanager
def locked(path: Path, mode: int) -> Iterator[None]:
    """Holds the flock of a file, LOCK_SH or LOCK_EX of `fcntl`; the file is made if it is missing."""
    # Opened each time: flock then excludes threads as well as processes, and ends with its holder.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, mode)
        yield
    finally:
        os.close(descriptor)


class DirectoryWriter(BlobWriter):
    """The upload of a blob into a directory."""

    def __init__(self, store: DirectoryStore, algorithm: str, hashed: bool) -> None:
        super().__init__(algorithm, hashed)
        self._directory = store
        with store._locked(fcntl.LOCK_SH):  # otherwise the sweep could find the file before it is flocked
            descriptor, name = tempfile.mkstemp(dir=store.root / "tmp")  # mode 0600
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._path = Path(name)

    def __del__(self) -> None:
        # An upload that a thread opened for an abandoned call has no other owner that could discard it.
        if hasattr(self, "_path"):
            self.discard()

    def discard(self) -> None:
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # the rest that a full disk did not take is no longer needed
                self._file.close()

    def flushed(self) -> Path:
        """The file of the upload, with all bytes so far; for another store, which copies it."""
        self._file.flush()
        return self._path

    def _append(self, data: memoryview) -> None:
        self._file.write(data)

    def _store(self, digest: str) -> None:
        self._file.flush()
        self._directory._place(self._file.fileno(), self._path, digest)


class NamedDirectoryWriter(DirectoryWriter, NamedWriter):
    """An upload whose file remains when its writer ends."""

    def __init__(self, store: DirectoryStore, path: Path) -> None:
        BlobWriter.__init__(self, digests.DEFAULT_ALGORITHM, hashed=False)
        self._directory = store
        with store._locked(fcntl.LOCK_SH):  # otherwise `drop` could remove the file before it is flocked
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise
        self._file = os.fdopen(descriptor, "r+b")
        self._path = path
        self.written = self._file.seek(0, os.SEEK_END)

    def __del__(self) -> None:
        if hasattr(self, "_path"):
            self.suspend()

    def suspend(self) -> None:
        if not self._file.closed:
            with suppress(OSError):  # a full disk may keep a part of the last piece; the digest detects it
                self._file.truncate(self.written)
            with suppress(OSError):
                self._file.close()

    def arrived(self) -> Iterator[bytes]:
        for start in range(0, self.written, _PIECE):
            yield os.pread(self._file.fileno(), min(_PIECE, self.written - start), start)

    def _append(self, data: memoryview) -> None:
        self._file.write(data)
        self._file.flush()  # so that it survives this process

    def _store(self, digest: str) -> None:
        super()._store(digest)
        self.discard()


@dataclass(frozen=True)
class _BlobFile:
    """The file of a blob, which may be deleted before it is opened."""

    digest: str
    path: Path

    def open(self, mode: Literal["rb"], buffering: Literal[0]) -> FileIO:
        with _missing(self.digest, self.path):
            return FileIO(self.path)


def _mark(digest: str, status: os.stat_result) -> bytes:
    """Identifies a blob, its file, and the content of that file: by inode, size and change time (nanoseconds)."""
    return blake3(f"{digest} {status.st_ino} {status.st_size} {status.st_ctime_ns}".encode()).digest(length=16)


def _remove_abandoned(path: Path) -> bool:
    """Removes the file of an upload unless a writer holds it; True if it did. The caller holds the store's lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


@contextmanager
def _missing(digest: str, path: Path) -> Iterator[None]:
    """Turns the error that the file of a blob is missing into BlobMissing, unless the whole store is missing."""
    try:
        yield
    except FileNotFoundError:
        root = path.parents[2]
        if not (root / "tmp").is_dir():  # which is made with the store
            raise FileNotFoundError(errno.ENOENT, "the directory of the blobs is gone", str(root)) from None
        raise BlobMissing(digest) from None


def _check(digest: str, file: FileIO) -> None:
    algorithm, _ = digests.parse(digest)
    state = digests.hasher(algorithm)
    while piece := file.read(_PIECE):
        state.update(piece)
    actual = f"{algorithm}:{state.hexdigest()}"
    if actual != digest:
        raise BlobCorrupt(digest, actual)


def _make_directory(directory: Path, root: Path, *, durably: bool) -> None:
    if directory != root and not directory.is_dir():
        _make_directory(directory.parent, root, durably=durably)
        directory.mkdir(mode=0o700, exist_ok=True)
        if durably:
            sync_directory(directory.parent)
