"""The blob store: bytes on a directory, named by their digest.

A blob is written to a temporary name, fsynced, renamed into place, and its directory fsynced: it is there whole or not
at all, after `kill -9` and after loss of power. Names come from `federation.digests.parse` alone, so that no text from
the wire becomes a path.

    ROOT/blake3/ab/cdef...     a blob: blake3:abcdef...
    ROOT/tmp/...               blobs being written, each flocked by its writer for as long as that lives
    ROOT/lock                  held for the instants in which a blob is claimed (shared) or deleted (exclusive)
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from weakref import WeakValueDictionary

from federation import digests

_PIECE = 1 << 20  # bytes read at a time
MAX_VERIFIED = 10_000  # blobs that are remembered as checked


class BlobMissing(LookupError):
    """No blob of this digest is stored.

    Attributes:
        digest: the digest that was asked for.
    """

    def __init__(self, digest: str) -> None:
        super().__init__(f"there is no blob {digest} in this store")
        self.digest = digest


class BlobCorrupt(ValueError):
    """The bytes are not what the digest says.

    Attributes:
        digest: the digest that they should have.
    """

    def __init__(self, digest: str, found: str) -> None:
        super().__init__(f"the bytes of blob {digest} have the digest {found}")
        self.digest = digest
        self.found = found


class BlobWriter:
    """One blob on its way in: a context manager; what is not committed on leaving is removed.

    Plain file writes without a lock held between calls: the calls may come from different threads, one at a time.

    Attributes:
        written: bytes taken in so far.
    """

    def __init__(self, store: "BlobStore", algorithm: str, hashed: bool) -> None:
        self._store = store
        self._algorithm = algorithm
        self._hasher = digests.hasher(algorithm) if hashed else None
        self.written = 0
        with store._locked(fcntl.LOCK_SH):  # or the sweep could find the file before it is flocked
            descriptor, name = tempfile.mkstemp(dir=store.root / "tmp")  # mode 0600
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._file = os.fdopen(descriptor, "wb")
        self.path = Path(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def __del__(self) -> None:
        # Made in a thread for a call that was given up meanwhile, it reaches nobody who could discard it.
        if hasattr(self, "path"):
            self.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Appends a piece."""
        view = memoryview(data).cast("B")
        if self._hasher is not None:
            self._hasher.update(view)
        self._file.write(view)
        self.written += len(view)

    def flush(self) -> None:
        """Hands everything to the operating system, so that `path` can be read before the commit."""
        self._file.flush()

    def commit(self, digest: str | None = None) -> str:
        """Puts the blob in place, durably; a blob that is there already is left as it is and counts as new.

        Args:
            digest: what the bytes must hash to. Needed, and trusted, when this writer does not hash.

        Returns:
            The digest.

        Raises:
            BlobCorrupt: the bytes have another digest; nothing was stored.
            ValueError: no digest to store under, or not a digest.
        """
        if self._hasher is not None:
            found = f"{self._algorithm}:{self._hasher.hexdigest()}"
            if digest is not None and digest != found:
                digests.parse(digest)
                raise BlobCorrupt(digest, found)
            digest = found
        if digest is None:
            raise ValueError("this writer does not hash: commit needs the digest")
        self._file.flush()
        self._store._place(self._file.fileno(), self.path, digest, self.written)
        self.discard()
        return digest

    def discard(self) -> None:
        """Gives the blob up; nothing happens after a commit."""
        if not self._file.closed:
            self.path.unlink(missing_ok=True)
            with suppress(OSError):  # what it could not write to a full disk is not wanted any more
                self._file.close()


class BlobStore:
    """A directory of content-addressed blobs, for several threads and processes at once.

    Args:
        root: the directory; made, with mode 0700, if it is missing.
        durable: whether a blob outlives a loss of power; without it (a simulation), only the death of the process.
    """

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._lock = threading.Lock()
        self._verified: dict[str, tuple[int, int, int]] = {}  # what a blob's file was when its bytes were right
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "tmp").mkdir(mode=0o700, exist_ok=True)

    def writer(self, *, algorithm: str = digests.DEFAULT_ALGORITHM, hash: bool = True) -> BlobWriter:  # noqa: A002
        """Begins a blob.

        Args:
            algorithm: that of the digest, "blake3" or "sha256"; unused without `hash`.
            hash: whether the writer hashes. Whoever has the digest from another pass over the same bytes says no, and
                gives it to `commit`.
        """
        return BlobWriter(self, algorithm, hash)

    def put(self, data: bytes | memoryview, *, algorithm: str = digests.DEFAULT_ALGORITHM) -> str:
        """Stores `data`, durably, and returns its digest."""
        with self.writer(algorithm=algorithm) as writer:
            writer.write(data)
            return writer.commit()

    def path(self, digest: str) -> Path:
        """Where a blob lies, to be read and never written.

        Raises:
            BlobMissing: it is not stored.
            ValueError: not a digest.
        """
        path = self._name(digest)
        if not path.is_file():
            raise BlobMissing(digest)
        return path

    def exists(self, digest: str) -> bool:
        """Whether a blob is stored."""
        return self._name(digest).is_file()

    def size(self, digest: str) -> int:
        """The length of a blob in bytes.

        Raises:
            BlobMissing: it is not stored.
        """
        with _missing(digest):
            return self._name(digest).stat().st_size

    def modified(self, digest: str) -> float:
        """When a blob was last stored or claimed, in seconds since the epoch.

        Raises:
            BlobMissing: it is not stored.
        """
        with _missing(digest):
            return self._name(digest).stat().st_mtime

    def claim(self, digest: str) -> None:
        """Makes a stored blob count as new, so that garbage collection spares it until a row refers to it.

        Raises:
            BlobMissing: it is not stored.
        """
        with self._locked(fcntl.LOCK_SH), _missing(digest):
            os.utime(self._name(digest))

    def read(self, digest: str, limit: int | None = None) -> bytes:
        """The bytes of a blob, checked.

        Args:
            digest: its name.
            limit: the most bytes that the caller can take.

        Raises:
            BlobMissing: it is not stored.
            BlobCorrupt: its bytes have another digest.
            ValueError: it is longer than `limit`.
        """
        algorithm, _ = digests.parse(digest)
        if limit is not None and (size := self.size(digest)) > limit:
            raise ValueError(f"blob {digest} has {size} bytes, more than the {limit} that fit here")
        with _missing(digest):
            data = self._name(digest).read_bytes()
        found = digests.digest(data, algorithm)
        if found != digest:
            raise BlobCorrupt(digest, found)
        return data

    def verify(self, digest: str) -> None:
        """Checks a blob of any size in one streaming pass.

        Raises:
            BlobMissing: it is not stored.
            BlobCorrupt: its bytes have another digest.
        """
        with _missing(digest), self._name(digest).open("rb", buffering=0) as file:
            _check(digest, file)

    def open(self, digest: str) -> BinaryIO:
        """Opens a blob whose bytes are right, to be read and closed by the caller.

        The bytes are checked when a blob is opened for the first time, and again when its file has changed since.

        Raises:
            BlobMissing: it is not stored.
            BlobCorrupt: its bytes have another digest.
            ValueError: not a digest.
        """
        with _missing(digest):
            file = self._name(digest).open("rb")
        try:
            with self._lock:
                turn = self._turns.setdefault(digest, threading.Lock())
            with turn:  # many ask for a new model at the same time: one of them checks it
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_size, status.st_ctime_ns)
                if self._verified.get(digest) != seen:
                    _check(digest, file)
                    with self._lock:
                        if len(self._verified) >= MAX_VERIFIED:
                            self._verified.clear()
                        self._verified[digest] = seen
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def delete(self, digest: str, *, older_than: float | None = None) -> int | None:
        """Removes a blob.

        Args:
            digest: its name.
            older_than: remove it only if it was last stored or claimed before this time (seconds since the epoch);
                checked together with the removal, so that nobody can store or claim it in between.

        Returns:
            The bytes freed; nothing if it was not there or is too young.
        """
        path = self._name(digest)
        with self._locked(fcntl.LOCK_EX):
            try:
                status = path.stat()
            except FileNotFoundError:
                return None
            if older_than is not None and status.st_mtime >= older_than:
                return None
            path.unlink()
            return status.st_size

    def digests(self) -> Iterator[str]:
        """The digest of every blob, in order."""
        for algorithm in ("blake3", "sha256"):
            for path in sorted((self.root / algorithm).glob("[0-9a-f][0-9a-f]/*")):
                yield f"{algorithm}:{path.parent.name}{path.name}"

    def sweep_temporary(self) -> int:
        """Removes what writers that died left behind, and returns how many; living writers keep theirs."""
        removed = 0
        with self._locked(fcntl.LOCK_EX):
            for path in (self.root / "tmp").iterdir():
                with path.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    path.unlink()
                    removed += 1
        return removed

    def _name(self, digest: str) -> Path:
        algorithm, value = digests.parse(digest)
        return self.root / algorithm / value[:2] / value[2:]

    def _place(self, descriptor: int, temporary: Path, digest: str, size: int) -> None:
        path = self._name(digest)
        _make(path.parent, self.root, durably=self._durable)
        with self._locked(fcntl.LOCK_SH):
            # A blob that is there keeps its file, which readers may have mapped, and only becomes young again. One that
            # is damaged gives way.
            if path.is_file() and path.stat().st_size == size and self._is_whole(digest):
                os.utime(path)
            else:
                if self._durable:
                    os.fsync(descriptor)
                temporary.replace(path)
        if self._durable:
            _fsync_directory(path.parent)  # in both cases: whoever was first may not have come this far yet

    def _is_whole(self, digest: str) -> bool:
        try:
            self.open(digest).close()
        except (BlobCorrupt, BlobMissing):
            return False
        return True

    @contextmanager
    def _locked(self, mode: int) -> Iterator[None]:
        # Opened each time: flock then excludes threads as well as processes, and dies with its holder.
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, mode)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def _missing(digest: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BlobMissing(digest) from None


def _check(digest: str, file: BinaryIO) -> None:
    algorithm, _ = digests.parse(digest)
    state = digests.hasher(algorithm)
    while piece := file.read(_PIECE):
        state.update(piece)
    found = f"{algorithm}:{state.hexdigest()}"
    if found != digest:
        raise BlobCorrupt(digest, found)


def _make(directory: Path, root: Path, *, durably: bool) -> None:
    if directory != root and not directory.is_dir():
        _make(directory.parent, root, durably=durably)
        directory.mkdir(mode=0o700, exist_ok=True)
        if durably:
            _fsync_directory(directory.parent)


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
