"""A bundle: the record of a run as one file (`record.proto` describes its entries). This module reads it.

Entries are stored, not compressed, so that a row of an update is read in place and no update is held in memory. This
module trusts nothing in a bundle: it checks the format and the digests of blobs. It verifies no signature.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from federation import digests
from federation.errors import Error
from federation.refusals import Refusal
from federation.text import escaped
from federation.v1.common_pb2 import KeyRotation
from federation.v1.record_pb2 import Bundle, Consents, DescribedData, LogRecord, Rotations, RoundRecord, Withdrawals
from federation.vectors import FLOATS, LENGTH_BYTES, Layout, RowFile, header_length, parse_header

FORMAT = 1
MANIFEST = "bundle.json"
SPECIFICATION = "specification.toml"
CA = "certificates/ca.der"
LOG = "log.pb"
CONSENTS = "consents.pb"
WITHDRAWALS = "withdrawals.pb"
STATISTICS = "statistics.pb"
ROTATIONS = "rotations.pb"
_ROUND = re.compile(r"rounds/([0-9]{6,})\.pb")
_CERTIFICATE = re.compile(r"certificates/[0-9a-f]{1,40}\.der")
_BLOB = re.compile(r"blobs/(blake3|sha256)-([0-9a-f]{64})")
_SMALL = 1 << 20  # bytes of an entry that is neither a round nor a blob
_LARGE = 1 << 30  # bytes of a round or of the log
_PIECE = 1 << 18  # bytes that are hashed at once: a core's own cache holds them

MessageT = TypeVar("MessageT", bound=Message)


class BundleError(Error):
    """The file is not a bundle, or is damaged; the message, of one line, names the entry or the byte."""

    def __init__(self, message: str) -> None:
        super().__init__(escaped(message))  # it quotes the file


class BlobAbsent(Error, LookupError):
    """A blob is not in the bundle."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"{digest} is not in the bundle")
        self.digest = digest


def certificate_entry(serial: str) -> str:
    """The name of the entry of a certificate, by its serial number in hexadecimal."""
    return f"certificates/{serial}.der"


def round_entry(number: int) -> str:
    """The name of the entry of a round."""
    return f"rounds/{number:06d}.pb"


def blob_entry(digest: str) -> str:
    """The name of the entry of a blob. Raises ValueError for a text that is not a digest."""
    return "blobs/{}-{}".format(*digests.parse(digest))


@dataclass(frozen=True, slots=True)
class _Extent:
    """The position of an entry in the file, and its size, in bytes."""

    offset: int
    size: int


class BundleReader:
    """An open bundle; a context manager.

    Attributes:
        path: the file.
        about: describes the federation and the run.
        specification: of the run, as submitted.
        certificates: DER, by the name of the entry.
        ca: the certificate of the CA, DER.
        rotations: of signing keys; those of one holder are in their order.

    Raises:
        BundleError: the file is not a bundle, or is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            self._extents = self._directory()
            self.about = self._manifest()
            self.specification = self._small(SPECIFICATION)
            self.ca = self._small(CA)
            names = [name for name in self._extents if _CERTIFICATE.fullmatch(name) and name != CA]
            self.certificates = {name: self._small(name) for name in sorted(names)}
            self.rotations = self._rotations()
            self._check_has_rounds()
        except BaseException:
            self.close()
            raise
        self._checked: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            os.close(self._descriptor)

    def rounds(self) -> Iterator[RoundRecord]:
        """The rounds in their order, one at a time."""
        for number in range(self.about.rounds):
            name = round_entry(number)
            record = _parsed(RoundRecord, self._large(name), name)
            if record.number != number:
                raise BundleError(f"{name} is the record of round {record.number}")
            yield record

    def log(self) -> LogRecord:
        """The entries of the audit log about the run."""
        return _parsed(LogRecord, self._large(LOG), LOG)

    def consents(self) -> Consents:
        """The answers of clients to the run; empty without such an entry."""
        if CONSENTS not in self._extents:
            return Consents()
        return _filled(_parsed(Consents, self._large(CONSENTS), CONSENTS), CONSENTS)

    def withdrawals(self) -> Withdrawals:
        """The withdrawals of the run's clients; empty without such an entry."""
        if WITHDRAWALS not in self._extents:
            return Withdrawals()
        return _filled(_parsed(Withdrawals, self._large(WITHDRAWALS), WITHDRAWALS), WITHDRAWALS)

    def statistics(self) -> DescribedData:
        """The result of statistics that the run is filled from; empty without such an entry."""
        if STATISTICS not in self._extents:
            return DescribedData()
        return _filled(_parsed(DescribedData, self._large(STATISTICS), STATISTICS), STATISTICS)

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of the blobs."""
        found = (_BLOB.fullmatch(name) for name in self._extents)
        return tuple(f"{match[1]}:{match[2]}" for match in found if match is not None)

    def has(self, digest: str) -> bool:
        """True if the bundle has a blob."""
        with suppress(ValueError):
            return blob_entry(digest) in self._extents
        return False

    def size(self, digest: str) -> int:
        """The size of a blob in bytes. Raises BlobAbsent."""
        return self._extent(digest).size

    def blob(self, digest: str, limit: int) -> bytes:
        """The bytes of a small blob, after its digest is verified.

        Raises:
            BlobAbsent: the bundle does not have it.
            BundleError: it has another digest, or more than `limit` bytes.
        """
        extent = self._verified(digest)
        if extent.size > limit:
            raise BundleError(f"{blob_entry(digest)} has {extent.size} bytes; at most {limit} are expected")
        return self._read(extent)

    def verify_blobs(self, names: Iterable[str]) -> None:
        """Verifies the digests of blobs, one on each core at a time; absent blobs are left out.

        Raises:
            BundleError: a blob has another digest.
        """
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(self._verified, filter(self.has, dict.fromkeys(names))):
                pass

    def rows(self, digest: str) -> dict[str, RowFile]:
        """The rows of a payload, by name, read in place. Errors are those of `blob`."""
        layout, offset = self._layout(digest, {*FLOATS, "U32", "U8"})
        rows = {}
        for tensor in layout.tensors:
            rows[tensor.name] = RowFile(self.path, offset, tensor.size, tensor.dtype)
            offset += tensor.bytes
        return rows

    def layout(self, digest: str) -> Layout:
        """The layout of a model. Errors are those of `blob`."""
        return self._layout(digest, {"F32"})[0]

    def model(self, digest: str) -> tuple[Layout, RowFile]:
        """The layout of a model and its flat vector, read in place. Errors are those of `blob`."""
        layout, offset = self._layout(digest, {"F32"})
        return layout, RowFile(self.path, offset, layout.size)

    def _layout(self, digest: str, dtypes: set[str]) -> tuple[Layout, int]:
        extent = self._verified(digest)
        try:
            prefix = self._read(_Extent(extent.offset, min(extent.size, LENGTH_BYTES)))
            head = min(extent.size, LENGTH_BYTES + header_length(prefix))
            layout, begin = parse_header(self._read(_Extent(extent.offset, head)), dtypes)
        except Refusal as error:
            raise BundleError(f"{blob_entry(digest)}: {error.message}") from error
        if begin + layout.data_bytes != extent.size:
            raise BundleError(f"{blob_entry(digest)} has {extent.size} bytes; its header describes others")
        return layout, extent.offset + begin

    def _extent(self, digest: str) -> _Extent:
        try:
            return self._extents[blob_entry(digest)]
        except (KeyError, ValueError):
            raise BlobAbsent(digest) from None

    def _verified(self, digest: str) -> _Extent:
        extent = self._extent(digest)
        if digest not in self._checked:
            actual = self._hash(extent, digests.parse(digest)[0])
            if actual != digest:
                raise BundleError(f"{blob_entry(digest)} has the digest {actual}")
            self._checked.add(digest)
        return extent

    def _hash(self, extent: _Extent, algorithm: str) -> str:
        state = digests.hasher(algorithm)
        buffer = memoryview(bytearray(min(_PIECE, extent.size)))
        for start in range(0, extent.size, _PIECE):
            state.update(self._fill(buffer[: extent.size - start], extent.offset + start))
        return f"{algorithm}:{state.hexdigest()}"

    def _read(self, extent: _Extent) -> bytes:
        return bytes(self._fill(memoryview(bytearray(extent.size)), extent.offset))

    def _fill(self, buffer: memoryview, offset: int) -> memoryview:
        """Fills a buffer with bytes of the file, and returns the buffer."""
        rest = buffer
        while rest:  # a read returns at most 2 GiB
            count = os.preadv(self._descriptor, [rest], offset)
            if not count:
                raise BundleError(f"{self.path} ends at byte {offset}, inside an entry")
            rest, offset = rest[count:], offset + count
        return buffer

    def _small(self, name: str) -> bytes:
        return self._large(name, _SMALL)

    def _large(self, name: str, limit: int = _LARGE) -> bytes:
        extent = self._extents.get(name)
        if extent is None:
            raise BundleError(f"{self.path} has no {name}")
        if extent.size > limit:
            raise BundleError(f"{name} has {extent.size} bytes; at most {limit} are read")
        return self._read(extent)

    def _rotations(self) -> tuple[KeyRotation, ...]:
        if ROTATIONS not in self._extents:
            return ()
        return tuple(_filled(_parsed(Rotations, self._small(ROTATIONS), ROTATIONS), ROTATIONS).rotations)

    def _manifest(self) -> Bundle:
        try:
            about = json_format.Parse(self._small(MANIFEST), Bundle())
        except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
            raise BundleError(f"{MANIFEST}: {str(error)[:200]}") from error
        if about.format != FORMAT:
            raise BundleError(
                f"{MANIFEST}: the bundle has format {about.format}, and this release reads {FORMAT}: use the release "
                f"that wrote it, {about.software[:80] or 'which is not named'}"
            )
        return about

    def _check_has_rounds(self) -> None:
        numbers = sorted(int(match[1]) for name in self._extents if (match := _ROUND.fullmatch(name)))
        if len(numbers) != self.about.rounds or numbers != list(range(len(numbers))):
            raise BundleError(f"{MANIFEST} announces {self.about.rounds} rounds; {len(numbers)} are there")

    def _directory(self) -> dict[str, _Extent]:
        """The extents of the entries, by name. Raises BundleError for a compressed, unknown or repeated entry."""
        end = os.fstat(self._descriptor).st_size
        extents: dict[str, _Extent] = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
        # zipfile raises NotImplementedError for archives of a newer version of the format
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
            raise BundleError(f"{self.path} is not a bundle: {error}") from error
        for entry in entries:
            name = entry.filename
            known = name in (MANIFEST, SPECIFICATION, CA, LOG, CONSENTS, WITHDRAWALS, ROTATIONS, STATISTICS) or any(
                pattern.fullmatch(name) for pattern in (_ROUND, _CERTIFICATE, _BLOB)
            )
            if not known or name in extents:
                raise BundleError(f"{self.path} has {'two entries' if known else 'an unknown entry'} {name[:80]!r}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise BundleError(f"{name} is compressed; entries of a bundle are stored")
            if not 0 <= entry.header_offset < end:
                raise BundleError(f"{name} begins outside of {self.path}")
            head = os.pread(self._descriptor, 30, entry.header_offset)
            if len(head) < 30 or head[:4] != b"PK\x03\x04":
                raise BundleError(f"{self.path} is damaged at byte {entry.header_offset}")
            begin = entry.header_offset + 30 + int.from_bytes(head[26:28], "little")
            begin += int.from_bytes(head[28:30], "little")
            if begin + entry.file_size > end:
                raise BundleError(f"{self.path} ends inside {name}")
            extents[name] = _Extent(begin, entry.file_size)
        return extents


def has_unknown_fields(message: Message) -> bool:
    """True if a message, or one inside it, has a field that this release does not know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.ByteSize() != message.ByteSize()


def _parsed(kind: type[MessageT], data: bytes, name: str) -> MessageT:
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise BundleError(f"{name} is not a {kind.__name__}") from error
    if has_unknown_fields(message):
        raise BundleError(f"{name} has a field that this release does not know: use the release that wrote the bundle")
    return message


def _filled(message: MessageT, name: str) -> MessageT:
    if not message.ListFields():
        raise BundleError(f"{name} is empty; a bundle has this entry only if there is something in it")
    return message
