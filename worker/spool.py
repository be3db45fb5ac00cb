"""The spool: finished replies until a receipt acknowledges them.

A reply is two files, the payload and the signed envelope, named after the assignment. Both are on the disk before
either gets its name, and one without the other does not count, so a reply is in the spool completely or not at all,
whenever the process or the machine dies.
"""

import base64
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from federation.digests import DEFAULT_ALGORITHM, digest, hasher
from federation.envelope import envelope_digest
from federation.v1.common_pb2 import ReceiptManifest, SignedEnvelope, UpdateManifest
from worker.home import sync_directory

_ENVELOPE = ".envelope"
_PAYLOAD = ".payload"
_TEMPORARY = ".tmp"
_READ_BYTES = 1 << 20
# Replies that are kept after their receipts, with their payloads, should the coordinator ask for them again.
_KEPT = 2


class SpoolError(Exception):
    """A spool that cannot be read; the message names the file."""


@dataclass(frozen=True)
class Payload:
    """A payload on its way into the spool.

    Attributes:
        path: a temporary file.
        digest: of its bytes.
        size: in bytes.
    """

    path: Path
    digest: str
    size: int


@dataclass(frozen=True)
class Entry:
    """A finished reply.

    Attributes:
        envelope: as signed; sent as it is, however often.
        manifest: the update manifest inside.
        payload: the file beside it; None for a reply without payload.
    """

    envelope: SignedEnvelope
    manifest: UpdateManifest
    payload: Path | None

    @property
    def assignment_id(self) -> str:
        """The assignment that it fulfils."""
        return self.manifest.assignment_id


class Spool:
    """The directory of finished replies. One process owns it; any of its threads may call.

    Args:
        directory: made when it is missing.
        receipts: the file to which receipts are appended.
    """

    def __init__(self, directory: Path, receipts: Path) -> None:
        self._directory = directory
        self._receipts = receipts
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._settled: OrderedDict[str, Entry] = OrderedDict()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(directory.glob(f"*{_ENVELOPE}"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            entry = _read(path)
            if entry.payload is None or entry.payload.exists():
                self._entries[entry.assignment_id] = entry
        # The rest was half-made when the process died.
        whole = {self._path(name, suffix) for name in self._entries for suffix in (_ENVELOPE, _PAYLOAD)}
        for path in directory.iterdir():
            if path.suffix in (_ENVELOPE, _PAYLOAD, _TEMPORARY) and path not in whole:
                path.unlink()

    def write_payload(self, assignment_id: str, write: Callable[[Path], None]) -> Payload:
        """Makes a payload durable under a temporary name.

        Args:
            assignment_id: the assignment that it belongs to.
            write: called with the path to write to.
        """
        path = self._path(assignment_id, _PAYLOAD + _TEMPORARY)
        write(path)
        state = hasher()
        with path.open("rb+") as file:
            while chunk := file.read(_READ_BYTES):
                state.update(chunk)
            os.fsync(file.fileno())
            size = file.tell()
        return Payload(path, f"{DEFAULT_ALGORITHM}:{state.hexdigest()}", size)

    def add(self, envelope: SignedEnvelope, payload: Payload | None) -> None:
        """Takes in a finished reply; when this returns it survives anything but the loss of the disk.

        Args:
            envelope: of an UpdateManifest, signed by this member.
            payload: what `write_payload` returned; None for a reply without payload.
        """
        manifest = UpdateManifest.FromString(envelope.manifest)
        if payload is not None:
            payload.path.rename(self._path(manifest.assignment_id, _PAYLOAD))
        final = self._write_envelope(envelope, manifest.assignment_id)
        self._entries[manifest.assignment_id] = Entry(envelope, manifest, _payload_beside(final, manifest))

    def _write_envelope(self, envelope: SignedEnvelope, assignment_id: str) -> Path:
        temporary = self._path(assignment_id, _ENVELOPE + _TEMPORARY)
        with temporary.open("wb") as file:
            file.write(envelope.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
        final = self._path(assignment_id, _ENVELOPE)
        temporary.rename(final)
        sync_directory(self._directory)
        return final

    def entries(self) -> list[Entry]:
        """Everything finished, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def holds(self, assignment_id: str) -> bool:
        """Whether a reply to this assignment is finished."""
        with self._lock:
            return assignment_id in self._entries

    def settle(self, entry: Entry) -> None:
        """Takes a reply out that was acknowledged. The last ones stay at hand while this process lives."""
        with self._lock:
            self._entries.pop(entry.assignment_id, None)
            # Without its envelope a payload does not count: it is swept at the next start.
            self._path(entry.assignment_id, _ENVELOPE).unlink(missing_ok=True)
            self._settled[entry.assignment_id] = entry
            while len(self._settled) > _KEPT:
                name, _ = self._settled.popitem(last=False)
                self._path(name, _PAYLOAD).unlink(missing_ok=True)

    def renew(self, assignment_id: str) -> bool:
        """Puts a settled reply back, to be handed in once more as it was signed. False when it is not at hand."""
        with self._lock:
            entry = self._settled.pop(assignment_id, None)
            if entry is None:
                return False
            self._write_envelope(entry.envelope, assignment_id)
            self._entries[assignment_id] = entry
            return True

    def remove(self, assignment_id: str) -> None:
        """Forgets a reply that nobody wants."""
        with self._lock:
            self._entries.pop(assignment_id, None)
            self._settled.pop(assignment_id, None)
            # The envelope goes first: what is left of a half-done removal is swept at the next start.
            self._path(assignment_id, _ENVELOPE).unlink(missing_ok=True)
            self._path(assignment_id, _PAYLOAD).unlink(missing_ok=True)

    def record(self, entry: Entry, receipt: SignedEnvelope, manifest: ReceiptManifest) -> None:
        """Keeps a receipt: the member's proof of what it handed in and what was said to it."""
        line = {
            "assignment_id": manifest.assignment_id,
            "run_id": manifest.run_id,
            "round": manifest.round,
            "phase": manifest.phase,
            "accepted": manifest.accepted,
            "reason": manifest.reason,
            "created": manifest.created.ToJsonString(),
            "payload": manifest.payload,
            "envelope": envelope_digest(entry.envelope),
            "receipt": base64.b64encode(receipt.SerializeToString(deterministic=True)).decode(),
        }
        with self._receipts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _path(self, assignment_id: str, suffix: str) -> Path:
        # The id came over the wire: its digest is a safe file name whatever it holds.
        return self._directory / (digest(assignment_id.encode()).partition(":")[2][:32] + suffix)


def _payload_beside(path: Path, manifest: UpdateManifest) -> Path | None:
    return path.with_suffix(_PAYLOAD) if manifest.payload else None


def _read(path: Path) -> Entry:
    try:
        envelope = SignedEnvelope.FromString(path.read_bytes())
        manifest = UpdateManifest.FromString(envelope.manifest)
        payload = _payload_beside(path, manifest)
        if payload is not None and payload.exists() and payload.stat().st_size != manifest.payload_bytes:
            raise SpoolError(f"{payload} is not the {manifest.payload_bytes} bytes that its envelope promises")
    except (DecodeError, OSError, SpoolError) as error:
        raise SpoolError(
            f"the finished work in {path} is damaged ({error}): move the file away, and the work will be done again"
        ) from error
    return Entry(envelope, manifest, payload)
