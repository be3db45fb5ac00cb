"""A blob store in memory: the second implementation, which shows that callers need no directory."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from typing import Literal

from federation import digests
from federation.vectors import File
from storage import blobs


class MemoryStore(blobs.BlobStore):
    """Blobs of one process.

    Args:
        capacity: how many bytes it takes.

    Attributes:
        contents: the bytes of each blob.
        modified: when each was last stored or claimed.
        uploads: those that have begun and not ended.
        partial: the bytes of each upload with a name.
    """

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.contents: dict[str, bytes] = {}
        self.modified: dict[str, float] = {}
        self.uploads: set[blobs.BlobWriter] = set()
        self.partial: dict[str, bytearray] = {}
        self._capacity = capacity
        self._verified: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def writer(self, *, algorithm: str = digests.DEFAULT_ALGORITHM, hash: bool = True) -> blobs.BlobWriter:  # noqa: A002
        return _Upload(self, algorithm, hash)

    def resume(self, name: str) -> blobs.NamedWriter:
        with self._lock:
            return _NamedUpload(self, blobs.check_upload_name(name))

    def partial_uploads(self) -> list[blobs.PartialUpload]:
        with self._lock:
            return [blobs.PartialUpload(name, len(data)) for name, data in sorted(self.partial.items())]

    def drop(self, name: str) -> bool:
        with self._lock:
            return not self.written_by(blobs.check_upload_name(name)) and self.partial.pop(name, None) is not None

    def written_by(self, name: str) -> bool:
        return any(isinstance(upload, _NamedUpload) and upload.name == name for upload in self.uploads)

    def local(self, digest: str) -> File:
        data = self.content(digest)
        if self._verified.get(digest) is not data:
            self.verify(digest)
            self._verified[digest] = data
        return _MemoryFile(self, digest)

    def stat(self, digest: str) -> blobs.BlobStat:
        with self._lock:
            return blobs.BlobStat(digest, len(self.content(digest)), self.modified[digest])

    def scan(self) -> Iterator[blobs.BlobStat]:
        with self._lock:
            return iter([self.stat(digest) for digest in sorted(self.contents)])

    def verify(self, digest: str) -> None:
        algorithm, _ = digests.parse(digest)
        found = digests.digest(self.content(digest), algorithm)
        if found != digest:
            raise blobs.BlobCorrupt(digest, found)

    def claim(self, digest: str) -> None:
        with self._lock:
            self.content(digest)
            self.modified[digest] = time.time()

    def delete(self, digest: str, *, older_than: float | None = None) -> int | None:
        digests.parse(digest)
        with self._lock:
            if digest not in self.contents or (older_than is not None and self.modified[digest] >= older_than):
                return None
            del self.modified[digest]
            return len(self.contents.pop(digest))

    def sweep_temporary(self) -> int:
        return 0  # uploads end with the process

    def free_bytes(self) -> int:
        with self._lock:
            return self._capacity - sum(map(len, self.contents.values()))

    def content(self, digest: str) -> bytes:
        digests.parse(digest)
        try:
            return self.contents[digest]
        except KeyError:
            raise blobs.BlobMissing(digest) from None

    def keep(self, digest: str, data: bytes) -> None:
        with self._lock:
            self.contents[digest] = data
            self.claim(digest)


class _Upload(blobs.BlobWriter):
    def __init__(self, store: MemoryStore, algorithm: str, hashed: bool) -> None:
        super().__init__(algorithm, hashed)
        self._memory = store
        self._data = bytearray()
        store.uploads.add(self)

    def discard(self) -> None:
        self._memory.uploads.discard(self)

    def _append(self, data: memoryview) -> None:
        if self not in self._memory.uploads:
            raise ValueError("this upload has ended")
        self._data += data

    def _store(self, digest: str) -> None:
        self._memory.keep(digest, bytes(self._data))


class _NamedUpload(_Upload, blobs.NamedWriter):
    def __init__(self, store: MemoryStore, name: str) -> None:
        if store.written_by(name):
            raise BlockingIOError(f"another writer has the upload {name}")
        super().__init__(store, digests.DEFAULT_ALGORITHM, False)
        self.name = name
        self._data = store.partial.setdefault(name, bytearray())
        self.written = len(self._data)

    def discard(self) -> None:
        if self in self._memory.uploads:
            del self._memory.partial[self.name]
            super().discard()

    def suspend(self) -> None:
        super().discard()

    def arrived(self) -> Iterator[bytes]:
        return iter([bytes(self._data)])

    def _store(self, digest: str) -> None:
        super()._store(digest)
        self.discard()


@dataclass(frozen=True)
class _MemoryFile:
    store: MemoryStore
    digest: str

    def open(self, mode: Literal["rb"], buffering: Literal[0]) -> FileIO:
        file = FileIO(os.memfd_create(self.digest), "r+b")
        file.write(self.store.content(self.digest))
        file.seek(0)
        return file
