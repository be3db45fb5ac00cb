"""A bucket: the requests to an object storage that a blob store needs, and their errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from storage.blobs import BlobStoreUnavailable

if TYPE_CHECKING:  # obstore has its types in stubs alone
    from obstore.store import AzureStore, GCSStore, S3Config, S3Store

PIECE = 8 << 20  # bytes of a download that are requested, and in memory, at once
PART = 8 << 20  # bytes of a part of an upload; S3 takes 10,000 parts of one object
PARTS = 4  # of one upload that are sent at once

_ERROR = re.compile(r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_STATUS = re.compile(r"status code: (\d{3})")


@dataclass(frozen=True)
class Patience:
    """How long a request may take. It is repeated if it times out, its connection breaks, or the answer is 5xx.

    Between repetitions is a pause, of 0.1 s at first, which doubles.

    Attributes:
        connect: seconds until there is a connection.
        silence: seconds until the answer begins, in which up to `PART` bytes are sent, or without a byte of it.
        request: seconds of a whole request.
        retries: the largest number of repetitions.
        total: seconds after which no repetition begins.
    """

    connect: float = 5.0
    silence: float = 30.0
    request: float = 120.0
    retries: int = 8
    total: float = 30.0


@dataclass(frozen=True)
class Object:
    """An object in a bucket.

    Attributes:
        key: its name, without the prefix of the bucket's URL.
        size: in bytes.
        modified: when it was stored, by the clock of the storage, in seconds since the epoch.
        version: its ETag, which changes with the content; None if the storage has none.
    """

    key: str
    size: int
    modified: float
    version: str | None


class ObjectBucket:
    """A bucket, or what is below a prefix in it. Its methods may be called from several threads and processes.

    The library reads credentials and the region from the environment, such as AWS_ACCESS_KEY_ID and AWS_REGION, or asks
    the machine for those of its role.

    Args:
        url: "s3://BUCKET/PREFIX", or the same with gs or az.
        endpoint: the URL of an S3 service, such as "https://minio.example"; empty for that of the cloud.
        patience: how long requests may take.

    Raises:
        BlobStoreUnavailable: the environment does not say how the bucket is reached.
    """

    def __init__(self, url: str, *, endpoint: str = "", patience: Patience | None = None) -> None:
        self.url = url
        chosen = patience or Patience()
        # A bulk deletion is not understood everywhere, and where it is, its answer is not the same everywhere.
        s3: S3Config = {"disable_bulk_delete": True}
        if endpoint:
            s3["endpoint"] = endpoint
        with self._explained("be opened"):
            self._store = from_url(
                url,
                config=s3 if url.startswith("s3:") else None,
                client_options={
                    "allow_http": endpoint.startswith("http:"),
                    "connect_timeout": timedelta(seconds=chosen.connect),
                    "read_timeout": timedelta(seconds=chosen.silence),
                    "timeout": timedelta(seconds=chosen.request),
                },
                retry_config={"max_retries": chosen.retries, "retry_timeout": timedelta(seconds=chosen.total)},
            )

    def head(self, key: str) -> Object | None:
        """The facts about an object; None if there is none."""
        with self._explained(f"look up {key}"):
            try:
                meta = obstore.head(self._store, key)
            except FileNotFoundError:
                return None
        return Object(key, meta["size"], meta["last_modified"].timestamp(), meta["e_tag"])

    def read(self, key: str, start: int, length: int) -> bytes | None:
        """A part of an object; None if there is no such object."""
        with self._explained(f"return bytes {start} to {start + length} of {key}"):
            try:
                data = bytes(obstore.get_range(self._store, key, start=start, length=length))
            except FileNotFoundError:
                return None
        if len(data) != length:
            raise BlobStoreUnavailable(f"{self.url} returned {len(data)} bytes of {key} instead of {length}")
        return data

    def pieces(self, found: Object) -> Iterator[bytes]:
        """The bytes of an object, in pieces.

        Raises:
            BlobStoreUnavailable: also if the object is removed meanwhile.
        """
        for start in range(0, found.size, PIECE):
            piece = self.read(found.key, start, min(PIECE, found.size - start))
            if piece is None:
                raise BlobStoreUnavailable(f"{self.url}: {found.key} was removed while it was read")
            yield piece

    def put(self, key: str, content: Path | bytes) -> str | None:
        """Stores an object as a whole or not at all, and replaces one of the same key. Returns its version."""
        with self._explained(f"store {key}"):
            result = obstore.put(self._store, key, content, chunk_size=PART, max_concurrency=PARTS)
        return result["e_tag"]

    def download_url(self, key: str, seconds: int) -> str:
        """A URL with which anybody can get an object, whole or in ranges, for `seconds`; it need not exist."""
        store = cast("AzureStore | GCSStore | S3Store", self._store)
        with self._explained(f"sign a URL of {key}"):
            return obstore.sign(store, "GET", key, timedelta(seconds=seconds))

    def list(self, prefix: str) -> Iterator[Object]:
        """All objects whose keys begin with PREFIX/; every one if the prefix is empty."""
        with self._explained("list its objects"):
            for page in obstore.list(self._store, prefix or None):
                for meta in page:
                    yield Object(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"])

    def delete(self, key: str) -> None:
        """Removes an object if it is there."""
        with self._explained(f"remove {key}"):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise BlobStoreUnavailable(f"{self.url} cannot {action}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The status and the message of the storage, or else the first line of the library's message."""
    text = str(error)
    status, told = _STATUS.search(text), _ERROR.search(text)
    if status is None:
        return text.partition("\n")[0][:300]
    return status.group(1) + (f" {told.group(1)}: {told.group(2)}" if told is not None else "")
