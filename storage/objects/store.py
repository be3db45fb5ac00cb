"""Blobs as objects in a bucket, with a local cache: aggregation reads files.

The keys are the paths of `storage.blob_directory`, so that a directory and a bucket can be copied into each other.

    PREFIX/blake3/ab/cdef...   a blob: blake3:abcdef...
    PREFIX/federation          names the federation that the objects belong to
    CACHE/blake3/ab/cdef...    the same blob, if it is cached
    CACHE/tmp/, CACHE/partial/ uploads, which are sent when they are committed

The bucket is the store; the cache may be lost. No request depends on a condition, since storages differ there: a name
is the digest of verified bytes, so that two uploads of one name are the same. `storage.objects.claims` has the times of
`put` and `claim`.
"""

import logging
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from federation import digests
from federation.vectors import File
from storage.blob_directory import DirectoryStore, DirectoryWriter, NamedDirectoryWriter
from storage.blobs import (
    BlobCorrupt,
    BlobMissing,
    BlobStat,
    BlobStore,
    BlobStoreUnavailable,
    BlobWriter,
    NamedWriter,
    PartialUpload,
)
from storage.objects.bucket import Object, ObjectBucket
from storage.objects.claims import Claims, FileClaims

log = logging.getLogger(__name__)

MAX_VERSIONS = 100_000  # the most objects whose version is remembered
_MARK = "federation"
_KEY = re.compile(r"(blake3|sha256)/([0-9a-f]{2})/([0-9a-f]{62})")
_AFTER_EVICTION = 0.9  # how full the cache is then, so that not every new blob needs a look at all of it


class ObjectStore(BlobStore):
    """The blobs of a federation in a bucket.

    Args:
        bucket: holds nothing but these blobs below its prefix.
        cache: a directory of this machine; made if it is missing.
        limit: the bytes of blobs that the cache keeps. Blobs in use stay beyond it, and uploads do not count.
        federation: identifies the federation; a bucket of another one is refused by `probe`.
        claims: those of all processes that use the bucket; by default files in the cache, which these have to share.
        url_seconds: how long a URL of `download_url` holds; 0: there are none.
    """

    def __init__(
        self,
        bucket: ObjectBucket,
        cache: Path,
        *,
        limit: int,
        federation: str,
        claims: Claims | None = None,
        url_seconds: int = 0,
    ) -> None:
        self._bucket = bucket
        self._cache = DirectoryStore(cache, durable=False)  # a copy that a loss of power damages is fetched again
        self._claims = claims or FileClaims(cache)
        self._limit = limit
        self._federation = federation
        self._url_seconds = url_seconds
        self._lock = threading.Lock()
        self._versions: dict[str, str | None] = {}  # of the objects that this process has stored or checked, by digest
        self._files: WeakValueDictionary[str, _CachedFile] = WeakValueDictionary()  # those in use
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._held = limit  # an estimate of the bytes in the cache; the first look makes it exact
        self._look_at = 0.0  # the bytes in the cache at which the next look follows

    def writer(self, *, algorithm: str = digests.DEFAULT_ALGORITHM, hash: bool = True) -> BlobWriter:  # noqa: A002
        return _Upload(self, self._cache.writer(hash=False), algorithm, hash)

    def resume(self, name: str) -> NamedWriter:
        return _NamedUpload(self, self._cache.resume(name))

    def partial_uploads(self) -> list[PartialUpload]:
        return self._cache.partial_uploads()

    def drop(self, name: str) -> bool:
        return self._cache.drop(name)

    def local(self, digest: str) -> File:
        _key(digest)
        with self._lock:
            file = self._files.setdefault(digest, _CachedFile(self, digest))  # first, so that it is not evicted
        self.cached(digest)
        with suppress(BlobMissing):  # another process has evicted it already
            self._cache.claim(digest)  # the cache evicts what was not used for the longest time
        return file

    def stat(self, digest: str) -> BlobStat:
        found, claimed = self._head(digest), self._claims.last(digest)
        return BlobStat(digest, found.size, _modified(found, claimed))

    def scan(self) -> Iterator[BlobStat]:
        blobs, claimed = [], self._claims.times()
        for found in self._bucket.list(""):
            if (match := _KEY.fullmatch(found.key)) is not None:
                digest = f"{match[1]}:{match[2]}{match[3]}"
                blobs.append(BlobStat(digest, found.size, _modified(found, claimed.get(digest))))
        return iter(sorted(blobs, key=lambda blob: blob.digest))

    def verify(self, digest: str) -> None:
        algorithm, _ = digests.parse(digest)
        actual = ""
        for _ in range(2):  # bytes that were changed on their way are right the second time
            found, state = self._head(digest), digests.hasher(algorithm)
            for piece in self._bucket.pieces(found):
                state.update(piece)
            actual = f"{algorithm}:{state.hexdigest()}"
            if actual == digest:
                return self._note_version(digest, found.version)
        raise BlobCorrupt(digest, actual)

    def claim(self, digest: str) -> None:
        _key(digest)
        self._claims.note(digest)
        self._head(digest)

    def delete(self, digest: str, *, older_than: float | None = None) -> int | None:
        key = _key(digest)
        with self._claims.deletion(digest) as deletion:
            found = self._bucket.head(key)
            if found is not None and older_than is not None and _modified(found, deletion.claimed) >= older_than:
                return None
            if found is not None:
                if not deletion.begin():
                    return None
                self._bucket.delete(key)
                deletion.finish()
            self._cache.delete(digest)
        with self._lock:
            self._versions.pop(digest, None)
        return None if found is None else found.size

    def download_url(self, digest: str) -> str:
        return self._bucket.download_url(_key(digest), self._url_seconds) if self._url_seconds else ""

    def sweep_temporary(self) -> int:
        return self._cache.sweep_temporary()

    def free_bytes(self) -> int | None:
        return None

    def probe(self, *, takes_new: bool = False) -> None:
        if self._url_seconds:
            self._bucket.download_url(_MARK, self._url_seconds)
        self._check_ours(takes_new=takes_new)
        key, content = f"probe/{secrets.token_hex(16)}", secrets.token_bytes(32)
        self._bucket.put(key, content)
        try:
            if (found := self._bucket.read(key, 7, 13)) != content[7:20]:
                raise self._wrong("returned other bytes than were stored", found)
            if key not in (listed := [found.key for found in self._bucket.list("probe")]):
                raise self._wrong("does not list an object that was stored", listed)
        finally:
            self._bucket.delete(key)
        if self._bucket.head(key) is not None:
            raise self._wrong("still has an object that was removed", key)

    def _check_ours(self, *, takes_new: bool) -> None:
        ours = self._federation.encode()
        mark = self._bucket.head(_MARK)
        if mark is None:
            if not takes_new:
                raise self._unmarked()
            self._bucket.put(_MARK, ours)
            mark = self._bucket.head(_MARK)
        if mark is None or mark.size != len(ours) or self._bucket.read(_MARK, 0, mark.size) != ours:
            raise BlobStoreUnavailable(
                f"{self._bucket.url} holds the blobs of another federation, which its object {_MARK!r} names: give "
                "each federation a prefix of its own"
            )

    def _unmarked(self) -> BlobStoreUnavailable:
        return BlobStoreUnavailable(
            f"{self._bucket.url} has lost its object {_MARK!r}: the bucket was emptied or replaced, or the prefix is "
            "another one"
        )

    def _wrong(self, problem: str, found: object) -> BlobStoreUnavailable:
        return BlobStoreUnavailable(f"{self._bucket.url} {problem}: {str(found)[:100]}")

    def send(self, upload: DirectoryWriter, digest: str) -> None:
        """Stores the bytes of an upload in the bucket, unless this process knows that they are there."""
        self._claims.note(digest)  # first, so that it is not deleted from now on
        known = self._versions.get(digest)
        if known is not None:
            found = self._bucket.head(_key(digest))
            if found is not None and found.version == known:
                return
        self._note_version(digest, self._bucket.put(_key(digest), upload.flushed()))
        self._make_room(upload.written)

    def cached(self, digest: str) -> File:
        """The file of a blob in the cache, which is fetched if it is not there; it may be evicted at any time."""
        with self._lock:
            turn = self._turns.setdefault(digest, threading.Lock())
        with turn:  # many callers ask for a new model at once: one of them fetches it
            try:
                return self._cache.local(digest)
            except BlobCorrupt:
                log.warning("the copy of blob %s in the cache is damaged: it is fetched again", digest)
                self._cache.delete(digest)
            except BlobMissing:
                pass
            self._fetch(digest)
            return self._cache.local(digest)

    def _fetch(self, digest: str) -> None:
        try:
            self._download(digest)
        except BlobCorrupt:  # bytes that were changed on their way are right the second time
            self._download(digest)

    def _download(self, digest: str) -> None:
        algorithm, _ = digests.parse(digest)
        found = self._head(digest)
        self._make_room(found.size)
        with self._cache.writer(algorithm=algorithm) as writer:
            for piece in self._bucket.pieces(found):
                writer.write(piece)
            writer.commit(digest)
        self._note_version(digest, found.version)

    def _make_room(self, size: int) -> None:
        """Evicts blobs from the cache before one of `size` bytes comes in."""
        with self._lock:
            self._held += size
            if self._held <= self._look_at:
                return
            blobs = sorted(self._cache.scan(), key=lambda blob: blob.modified)
            held = size + sum(blob.size for blob in blobs)
            for blob in blobs if held > self._limit else []:
                if held <= self._limit * _AFTER_EVICTION:
                    break
                if blob.digest not in self._files:
                    held -= self._cache.delete(blob.digest) or 0
            if held > self._limit:
                log.warning(
                    "the blobs in use take %.1f GB, more than the cache has: raise blob_cache_bytes", held / 1e9
                )
            self._held, self._look_at = held, max(self._limit, held + self._limit // 10)

    def _head(self, digest: str) -> Object:
        found = self._bucket.head(_key(digest))
        if found is None:
            if self._bucket.head(_MARK) is None:  # a bucket that is gone looks the same
                raise self._unmarked()
            raise BlobMissing(digest)
        return found

    def _note_version(self, digest: str, version: str | None) -> None:
        with self._lock:
            if len(self._versions) >= MAX_VERSIONS:
                self._versions.clear()
            self._versions[digest] = version


class _Upload(BlobWriter):
    def __init__(self, store: ObjectStore, file: DirectoryWriter, algorithm: str, hashed: bool) -> None:
        super().__init__(algorithm, hashed)
        self._objects = store
        self._file = file

    def discard(self) -> None:
        self._file.discard()

    def _append(self, data: memoryview) -> None:
        self._file.write(data)

    def _store(self, digest: str) -> None:
        self._objects.send(self._file, digest)
        self._file.commit(digest)


class _NamedUpload(_Upload, NamedWriter):
    def __init__(self, store: ObjectStore, file: NamedDirectoryWriter) -> None:
        super().__init__(store, file, digests.DEFAULT_ALGORITHM, hashed=False)
        self._named = file
        self.written = file.written

    def suspend(self) -> None:
        self._named.suspend()

    def arrived(self) -> Iterator[bytes]:
        return self._named.arrived()


@dataclass(frozen=True)
class _CachedFile:
    """A blob in use: not evicted by this process while it is referenced, and fetched again if it is gone."""

    store: ObjectStore
    digest: str

    def open(self, mode: Literal["rb"], buffering: Literal[0]) -> FileIO:
        while True:
            file = self.store.cached(self.digest)
            with suppress(BlobMissing):  # another process, such as a backup, has evicted it
                return file.open(mode, buffering)


def _key(digest: str) -> str:
    """The key of a blob's object. Raises ValueError if it is not a digest."""
    algorithm, value = digests.parse(digest)
    return f"{algorithm}/{value[:2]}/{value[2:]}"


def _modified(found: Object, claimed: float | None) -> float:
    """When a blob was last stored or claimed; an old claim may be forgotten."""
    return found.modified if claimed is None else claimed
