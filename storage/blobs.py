"""The blob store: content-addressed bytes, and the contract of every implementation.

A blob is named by its digest (`federation.digests`). It is stored whole or not at all, and never changes. Callers see
no paths. A coordinator uses the implementation in `storage.blob_directory`, or the one in `storage.objects`.

An upload that may be interrupted has a name until it is committed. The bytes that have arrived remain when its writer
or the process ends, until `resume` continues the upload or `drop` removes it.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from types import TracebackType
from typing import BinaryIO, Self

from federation import digests
from federation.errors import Error
from federation.vectors import File


class BlobMissing(Error, LookupError):
    """No blob of this digest is stored."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"there is no blob {digest} in this store")
        self.digest = digest


class BlobCorrupt(Error, ValueError):
    """The bytes have another digest."""

    def __init__(self, digest: str, found: str) -> None:
        super().__init__(f"the bytes of blob {digest} have the digest {found}")
        self.digest = digest


class BlobStoreUnavailable(Error, OSError):
    """The store does not answer, or refuses to work; the message says where, what failed, and why."""


@dataclass(frozen=True, slots=True)
class BlobStat:
    """The facts about a blob that a store knows without reading it."""

    digest: str
    size: int  # in bytes
    modified: float  # when it was last stored or claimed, in seconds since the epoch


@dataclass(frozen=True, slots=True)
class PartialUpload:
    """The state of a named upload."""

    name: str
    size: int  # bytes that have arrived


_NAME = re.compile(r"[0-9a-z][0-9a-z.-]{0,199}")


def check_upload_name(name: str) -> str:
    """Returns the name of an upload.

    Raises:
        ValueError: it is not 1 to 200 lower-case letters, digits, dots and hyphens, the first a letter or a digit.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"not the name of an upload: {name[:80]!r}")
    return name


class BlobWriter(ABC):
    """An upload of one blob: a context manager that ends with `discard`. `written` counts its bytes.

    Calls may come from different threads, one at a time.
    """

    def __init__(self, algorithm: str, hashed: bool) -> None:
        self._algorithm = algorithm
        self._hasher = digests.hasher(algorithm) if hashed else None
        self.written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def write(self, data: bytes | memoryview) -> None:
        """Appends a piece."""
        view = memoryview(data).cast("B")
        if self._hasher is not None:
            self._hasher.update(view)
        self._append(view)
        self.written += len(view)

    def commit(self, digest: str | None = None) -> str:
        """Stores the blob durably, and returns its digest; a blob that is stored already counts as new.

        Args:
            digest: the expected digest. Required, and trusted, if this writer does not hash.

        Raises:
            BlobCorrupt: the bytes have another digest; nothing was stored.
            ValueError: no digest to store under, or not a digest.
        """
        if digest is not None:
            digests.parse(digest)
        if self._hasher is not None:
            actual = f"{self._algorithm}:{self._hasher.hexdigest()}"
            if digest not in (None, actual):
                raise BlobCorrupt(str(digest), actual)
            digest = actual
        if digest is None:
            raise ValueError("this writer does not hash: commit needs the digest")
        self._store(digest)
        return digest

    @abstractmethod
    def discard(self) -> None:
        """Ends the upload; removes its bytes unless they were committed."""

    @abstractmethod
    def _append(self, data: memoryview) -> None:
        """Appends bytes to the upload."""

    @abstractmethod
    def _store(self, digest: str) -> None:
        """Makes the upload the blob of this digest, as `commit` says."""


class NamedWriter(BlobWriter):
    """The writer of an upload with a name, which ends with `commit`, `discard` or `suspend`."""

    @abstractmethod
    def suspend(self) -> None:
        """Ends this writer, unless it has ended; keeps the bytes that `written` counts."""

    @abstractmethod
    def arrived(self) -> Iterator[bytes]:
        """The bytes so far, in pieces."""


class BlobStore(ABC):
    """Content-addressed blobs, for several threads and processes at once.

    Methods that take a digest raise ValueError for a text that is not one. With a store that is reached over a network,
    every method may raise BlobStoreUnavailable, and an error of the database if its claims are there.
    """

    def put(self, data: bytes | memoryview, *, algorithm: str = digests.DEFAULT_ALGORITHM) -> str:
        """Stores `data`, durably, and returns its digest."""
        with self.writer(algorithm=algorithm) as writer:
            writer.write(data)
            return writer.commit()

    @abstractmethod
    def writer(
        self,
        *,
        algorithm: str = digests.DEFAULT_ALGORITHM,
        hash: bool = True,  # noqa: A002  # no mutant: each store has its own default
    ) -> BlobWriter:
        """Begins the upload of a blob, which others see after its commit.

        Args:
            algorithm: of the digest, "blake3" or "sha256".
            hash: if true, the writer hashes. Otherwise the caller hashes the bytes, and gives the digest to `commit`.
        """

    @abstractmethod
    def resume(self, name: str) -> NamedWriter:
        """Continues the upload of this name, or begins it; `written` is the number of bytes that have arrived.

        The writer does not hash. Bytes survive the death of the process, but not always a loss of power: the caller
        compares all of them with their digest before the commit.

        Raises:
            BlockingIOError: another writer holds it.
            ValueError: not a name (`check_upload_name`).
        """

    @abstractmethod
    def partial_uploads(self) -> list[PartialUpload]:
        """All named uploads that are neither committed nor discarded, in the order of names."""

    @abstractmethod
    def drop(self, name: str) -> bool:
        """Removes a named upload unless a writer holds it. Returns True if it was removed.

        Raises:
            ValueError: not a name.
        """

    @abstractmethod
    def local(self, digest: str) -> File:
        """A blob as a file on this machine, which callers read with `pread` or map, and never write.

        The bytes are checked unless this process has stored them, and again after a change of the file.

        Raises:
            BlobMissing: it is not stored. Opening the file raises it too, if the blob was deleted in the meantime.
            BlobCorrupt: its bytes have another digest.
        """

    def open_range(self, digest: str, offset: int = 0, length: int | None = None) -> BinaryIO:
        """Opens a part of a blob for reading, from `offset`, of at most `length` bytes; the caller closes it.

        Raises:
            BlobMissing, BlobCorrupt: as `local`.
            ValueError: the offset is outside the blob; its end gives an empty range.
        """
        file = self.local(digest).open("rb", 0)  # no mutant: mypy takes no other number
        size = file.seek(0, os.SEEK_END)
        if not 0 <= offset <= size:
            file.close()
            raise ValueError(f"blob {digest} has {size} bytes; byte {offset} is not one of them")
        file.seek(offset)
        return file if length is None else BufferedReader(_Range(file, length))

    def read(self, digest: str, limit: int | None = None) -> bytes:
        """The bytes of a blob.

        Raises:
            BlobMissing, BlobCorrupt: as `local`.
            ValueError: it has more than `limit` bytes.
        """
        if limit is not None and (size := self.stat(digest).size) > limit:
            raise ValueError(f"blob {digest} has {size} bytes, more than the {limit} that fit here")
        with self.open_range(digest) as file:
            return file.read()

    @abstractmethod
    def stat(self, digest: str) -> BlobStat:
        """The size and the age of a blob.

        Raises:
            BlobMissing: it is not stored.
        """

    def exists(self, digest: str) -> bool:
        """True if a blob is stored."""
        try:
            self.stat(digest)
        except BlobMissing:
            return False
        return True

    @abstractmethod
    def scan(self) -> Iterator[BlobStat]:
        """All blobs, in the order of digests; blobs that are stored or deleted meanwhile may be missing."""

    @abstractmethod
    def verify(self, digest: str) -> None:
        """Reads and checks a stored blob, in one streaming pass.

        Raises:
            BlobMissing: it is not stored.
            BlobCorrupt: its bytes have another digest.
        """

    @abstractmethod
    def claim(self, digest: str) -> None:
        """Marks a stored blob as new, so that garbage collection keeps it until a row refers to it.

        Raises:
            BlobMissing: it is not stored.
        """

    @abstractmethod
    def delete(self, digest: str, *, older_than: float | None = None) -> int | None:
        """Removes a blob, and returns the number of bytes freed; None if it is not stored or too young.

        It is removed only if it was last stored or claimed before `older_than` (seconds since the epoch). The check and
        the removal are one step, so that no other process can store or claim it in between.
        """

    def download_url(self, digest: str) -> str:
        """A URL with which anybody can download a blob for a while; empty if this store gives none.

        The blob need not be stored.
        """
        return ""

    @abstractmethod
    def sweep_temporary(self) -> int:
        """Removes the uploads of dead writers, and returns their number; uploads of living writers stay."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """The number of bytes that the store can still take; None if it knows no limit."""

    def probe(self, *, takes_new: bool = False) -> None:  # noqa: B027 - a directory needs no probe
        """Checks that the store takes, returns, lists and removes bytes, and that it belongs to this federation.

        If it gives URLs, it must be able to sign one.

        `takes_new` says that a store that belongs to no federation yet is taken.

        Raises:
            BlobStoreUnavailable: one of these fails; the message says which.
        """


class _Range(RawIOBase):
    """The next `length` bytes of a file; closing the range closes the file."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file = file
        self._left = length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # called by BufferedReader alone
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
