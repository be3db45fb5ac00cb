"""The spool: finished replies until a receipt acknowledges them.

A reply is three files named after the assignment: payload, signed assignment and signed envelope; a fourth has the
state of the run that belongs to it, if the member keeps any. The envelope is written last, and a reply without it is
removed at the start: it is in the spool completely or not at all. Replies that cannot be written to the disk are kept
in memory with their states, a few at a time.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from federation.digests import DEFAULT_ALGORITHM, digest, file_digest, hasher
from federation.durable_files import make_directories, sync_directory
from federation.errors import Error
from federation.monitoring.events import Events
from federation.text import counted
from federation.trust.envelope import sign
from federation.v1.common_pb2 import ReceiptManifest, ReplyManifest, SignedEnvelope
from federation.vectors import Array, Layout, payload_bytes
from worker.home import DiskFull, WorkerHome
from worker.receipts import append, receipt_line, stands

_ENVELOPE = ".envelope"
_PAYLOAD = ".payload"
_ASSIGNMENT = ".assignment"
_STATE = ".state"
_SUFFIXES = (_ENVELOPE, _PAYLOAD, _ASSIGNMENT, _STATE)
_TEMPORARY = ".tmp"
# Replies that are kept after their receipts, with their payloads, should the coordinator ask for them again.
_KEPT = 2
_IN_MEMORY = 2  # replies
_UNRECORDED = 1000  # receipts


class SpoolError(Error):
    """A spool that cannot be read; the message names the file."""


def holds_replies(directory: Path) -> bool:
    """True if the spool in a directory, whose worker does not run, has replies."""
    return any(path.name.endswith(_ENVELOPE) for path in directory.iterdir()) if directory.is_dir() else False


@dataclass(frozen=True)
class SpoolEntry:
    """A finished reply: its envelope, as it is sent at each attempt, and the signed assignment that it fulfils.

    The payload is a file or bytes; None for a reply without payload. `state` is the state of the run that the member
    keeps once the reply is accepted, a file or bytes; None without one.
    """

    envelope: SignedEnvelope
    manifest: ReplyManifest
    assignment: SignedEnvelope
    payload: Path | bytes | None
    state: Path | bytes | None = None

    @property
    def assignment_id(self) -> str:
        """The assignment that it fulfils."""
        return self.manifest.assignment_id

    @property
    def in_memory(self) -> bool:
        """True if a part of it is in memory only, and is lost at a restart."""
        return isinstance(self.payload, bytes) or isinstance(self.state, bytes)

    def intact(self) -> bool:
        """True unless the payload no longer has the signed digest; True, too, if it cannot be read at present."""
        try:
            present = file_digest(self.payload) if isinstance(self.payload, Path) else digest(self.payload or b"")
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return present == self.manifest.payload


class Spool:
    """The directory of finished replies, which `key` signs. One process owns it; any of its threads may call.

    The payloads of settled replies are moved to the home's `handed_in`, which is emptied at the start.
    """

    def __init__(self, home: WorkerHome, key: Ed25519PrivateKey, events: Events) -> None:
        self._directory = directory = home.spool
        self._handed_in = handed_in = home.handed_in
        self._receipts = home.receipts
        self._key = key
        self._events = events
        self._unrecorded: list[str] = []  # lines of receipts that could not be written
        self._lock = threading.Lock()
        self._entries: dict[str, SpoolEntry] = {}
        self._settled: OrderedDict[str, SpoolEntry] = OrderedDict()
        self._again: set[str] = set()  # replies of an earlier process, whose receipts it may have written
        for folder in (directory, handed_in):
            make_directories(folder, 0o700)
        for path in handed_in.iterdir():
            path.unlink()
        for path in sorted(directory.glob(f"*{_ENVELOPE}"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            if not path.with_suffix(_ASSIGNMENT).exists():
                continue
            entry = _read(path)
            if not isinstance(entry.payload, Path) or entry.payload.exists():
                self._entries[entry.assignment_id] = entry
                self._again.add(entry.assignment_id)
        # The other files are incomplete: the process ended before their envelope was written.
        whole = {self._path(name, suffix) for name in self._entries for suffix in _SUFFIXES}
        for path in directory.iterdir():
            if path.suffix in (*_SUFFIXES, _TEMPORARY) and path not in whole:
                path.unlink()
        if waiting := len(self._entries):
            replies = counted(waiting, "finished reply", "finished replies")
            events.tell("spool", f"handed in again: {replies} from before", waiting=waiting)

    def _write_file(
        self, assignment_id: str, suffix: str, pieces: Sequence[bytes | memoryview], content: str
    ) -> Path | bytes:
        """Writes a part of a reply durably, or keeps it in memory if it cannot be written; `content` names the part.

        Raises:
            DiskFull: too many replies are in memory already.
        """
        path = self._path(assignment_id, suffix)
        try:
            with path.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            in_memory = sum(entry.in_memory for entry in self.entries())
            if in_memory >= _IN_MEMORY:
                raise DiskFull(f"{_cause(error)}; {in_memory} replies are kept in memory already") from error
            self._tell(
                f"{content} for assignment {assignment_id} is kept in memory, since {_cause(error)}: make room on the "
                "disk; if this worker ends before the update is handed in, it is made again"
            )
            return b"".join(pieces)
        return path

    def add(
        self,
        reply: ReplyManifest,
        layout: Layout | None,
        rows: Mapping[str, Array],
        assignment: SignedEnvelope,
        wanted: Callable[[], bool] = lambda: True,
        state: bytes | None = None,
    ) -> None:
        """Signs a reply and keeps it with its payload, if it is still wanted then.

        On the disk, they survive a restart. Without a layout, there is no payload. `state` is the content of the state
        file of the run, which counts once the reply is accepted.

        Raises:
            DiskFull: the payload or the state cannot be written, and too many replies are in memory already.
        """
        name, content, own = reply.assignment_id, None, None
        try:
            if state is not None:
                own = self._write_file(name, _STATE, [state], "the state of the run")
            if layout is not None:
                pieces, hashed = payload_bytes(layout, rows), hasher()
                for piece in pieces:
                    hashed.update(piece)
                content = self._write_file(name, _PAYLOAD, pieces, "the update")
                reply.payload, reply.payload_bytes = f"{DEFAULT_ALGORITHM}:{hashed.hexdigest()}", layout.file_bytes
        except DiskFull:
            self._unlink(name)
            raise
        entry = SpoolEntry(sign(reply, self._key), reply, assignment, content, own)
        with self._lock:
            if wanted():
                self._entries[name] = entry if entry.in_memory else self._write(entry)
            else:
                self._unlink(name)

    def _write(self, entry: SpoolEntry) -> SpoolEntry:
        """Writes a reply to the disk. If that fails it stays in memory, and its payload stays where it is."""
        name = entry.assignment_id
        try:
            if entry.payload is not None and isinstance(entry.payload, Path):
                final = self._path(name, _PAYLOAD)
                entry.payload.rename(final)
                entry = replace(entry, payload=final)
            # Protocol, Crash safety: the envelope last: a start that finds it finds the payload, too, and hands in one
            # whole reply.
            self._write_envelope(entry.assignment, name, _ASSIGNMENT)
            self._write_envelope(entry.envelope, name, _ENVELOPE)
            sync_directory(self._directory)
        except OSError as error:
            self._tell(
                f"the reply to assignment {name} is kept in memory, since {_cause(error)}: make room on the disk; if "
                "this worker ends before the reply is handed in, it is made again"
            )
        return entry

    def _write_envelope(self, envelope: SignedEnvelope, assignment_id: str, suffix: str) -> None:
        temporary = self._path(assignment_id, suffix + _TEMPORARY)
        with temporary.open("wb") as file:
            file.write(envelope.SerializeToString(deterministic=True))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path(assignment_id, suffix))

    def entries(self) -> list[SpoolEntry]:
        """All finished replies, oldest first."""
        with self._lock:
            return list(self._entries.values())

    def holds(self, assignment_id: str) -> bool:
        """True if a reply to this assignment is finished."""
        with self._lock:
            return assignment_id in self._entries

    def awaits_state(self, run_id: str) -> bool:
        """True if a state of a run waits for the receipt of its reply."""
        return any(entry.state is not None and entry.manifest.run_id == run_id for entry in self.entries())

    def settle(self, entry: SpoolEntry) -> None:
        """Removes an acknowledged reply. The last ones stay available while this process lives."""
        with self._lock:
            self._entries.pop(entry.assignment_id, None)
            self._unlink(entry.assignment_id, (_ENVELOPE,))
            if isinstance(entry.payload, Path):
                try:
                    entry = replace(entry, payload=entry.payload.rename(self._handed_in / entry.payload.name))
                except OSError:  # a full disk: a repeated assignment is then computed again
                    self._unlink(entry.assignment_id)
                    return
            self._unlink(entry.assignment_id)
            self._settled[entry.assignment_id] = replace(entry, state=None)  # it was taken over, or dropped
            while len(self._settled) > _KEPT:
                _forget(self._settled.popitem(last=False)[1])

    def renew(self, assignment_id: str) -> bool:
        """Puts a settled reply back, to be handed in once more as it was signed. False if it is no longer available."""
        with self._lock:
            entry = self._settled.pop(assignment_id, None)
            if entry is not None and isinstance(entry.payload, Path) and not entry.payload.exists():
                return False  # somebody has emptied the directory
            if entry is not None:
                self._entries[assignment_id] = entry if entry.in_memory else self._write(entry)
            return entry is not None

    def remove(self, assignment_id: str) -> None:
        """Removes a reply that is no longer wanted."""
        with self._lock:
            self._entries.pop(assignment_id, None)
            if (settled := self._settled.pop(assignment_id, None)) is not None:
                _forget(settled)
            self._unlink(assignment_id)

    def _unlink(self, assignment_id: str, suffixes: Sequence[str] = _SUFFIXES) -> None:
        # The envelope goes first: the next start then sweeps the files of an incomplete removal.
        try:
            for suffix in suffixes:
                self._path(assignment_id, suffix).unlink(missing_ok=True)
        except OSError as error:  # such as a disk that has become read-only
            self._tell(
                f"the files of assignment {assignment_id} cannot be removed ({error.strerror or error}): its reply is "
                "handed in again after the next start"
            )

    def record(self, entry: SpoolEntry, receipt: SignedEnvelope, manifest: ReceiptManifest) -> None:
        """Keeps a receipt: the member's proof of its assignment, its reply and the coordinator's answer.

        A process that was killed may have written it, and not have removed the reply.
        """
        self._events.home.check_there()
        line = receipt_line(entry.envelope, entry.assignment, receipt, manifest)
        with suppress(OSError):  # then it may stand there twice, and is read as one
            if entry.assignment_id in self._again and stands(self._receipts, line):
                return
        self._unrecorded.append(line)
        try:
            append(self._receipts, "".join(self._unrecorded))
        except OSError as error:
            del self._unrecorded[:-_UNRECORDED]
            self._tell(
                f"the receipt for assignment {entry.assignment_id} is kept in memory, since {_cause(error)}: make room "
                "on the disk before this worker ends"
            )
        else:
            self._unrecorded.clear()

    def _tell(self, message: str) -> None:
        self._events.disk(message)

    def _path(self, assignment_id: str, suffix: str) -> Path:
        # The id came over the wire: its digest is a safe file name whatever it holds.
        return self._directory / (digest(assignment_id.encode()).partition(":")[2][:32] + suffix)


def _forget(settled: SpoolEntry) -> None:
    if isinstance(settled.payload, Path):
        settled.payload.unlink(missing_ok=True)


def _cause(error: OSError) -> str:
    return f"{error.filename or 'the disk'} cannot be written ({error.strerror or error})"


def _read(path: Path) -> SpoolEntry:
    try:
        envelope = SignedEnvelope.FromString(path.read_bytes())
        assignment = SignedEnvelope.FromString(path.with_suffix(_ASSIGNMENT).read_bytes())
        manifest = ReplyManifest.FromString(envelope.manifest)
        payload = path.with_suffix(_PAYLOAD) if manifest.payload else None
        if payload is not None and payload.exists() and payload.stat().st_size != manifest.payload_bytes:
            raise SpoolError(f"{payload} is not the {manifest.payload_bytes} bytes that its envelope promises")
    except OSError as error:
        raise SpoolError(f"the finished work in {path} cannot be read ({error}): see what is wrong with it") from error
    except (DecodeError, SpoolError) as error:
        raise SpoolError(
            f"the finished work in {path} is damaged ({error}): move the file away, and the work will be done again"
        ) from error
    state = path.with_suffix(_STATE)
    return SpoolEntry(envelope, manifest, assignment, payload, state if state.exists() else None)
