"""Payloads and models on their way in: checked as they arrive, stored in one pass, and resumed where they broke off.

An upload of a reply that breaks off stays in the blob store under a name, `ASSIGNMENT.ALGORITHM.DIGEST`, until its
assignment ends. Its check stays in memory, so that a break costs no second reading; after a restart it is made again
from the bytes that are there.
"""

import threading

from sqlalchemy import select

from coordinator.rounds.replies.intake import Admission
from federation.digests import parse
from federation.refusals import Refusal
from federation.transport.payload_check import PayloadCheck
from storage.blobs import BlobStore, BlobWriter, NamedWriter
from storage.database import Database
from storage.models import Assignment
from storage.states import AssignmentState


class Upload:
    """Takes a file in pieces.

    Args:
        writer: takes the file.
        check: of the content, as it arrives.
        digest: as declared.
        size: as declared, in bytes.
    """

    def __init__(self, writer: BlobWriter, check: PayloadCheck, digest: str, size: int) -> None:
        self.check = check
        self._writer = writer
        self._digest = digest
        self._size = size
        self._lock = threading.Lock()  # a call that is ended does not wait for the thread that takes its last piece

    @property
    def arrived(self) -> int:
        """The number of bytes so far."""
        return self._writer.written

    def take(self, chunk: bytes | memoryview, offset: int | None = None) -> None:
        """Takes in the next piece; `offset` is its place in the file, where the caller says it.

        Raises:
            Refusal: `offset`: it is not the next one. `payload-length`: more than was declared.
        """
        with self._lock:
            arrived = self._writer.written
            if offset not in (None, arrived):
                raise Refusal("offset", f"a chunk for byte {offset}; {arrived} bytes have arrived: go on from there")
            if arrived + len(chunk) > self._size:
                raise Refusal("payload-length", f"{self._size} bytes were declared, and more arrived")
            self._writer.write(chunk)
            self.check.feed(chunk)

    def finish(self) -> None:
        """Compares the file with its declared length and digest; a problem of its content is in `check.problem`.

        Raises:
            Refusal: `payload-length`, `payload-digest`.
        """
        if self.arrived != self._size:
            raise Refusal("payload-length", f"{self._size} bytes were declared, {self.arrived} arrived")
        computed = self.check.finish()
        if computed != self._digest:
            raise Refusal("payload-digest", f"the file has the digest {computed}, declared was {self._digest}")

    def store(self) -> None:
        """Stores the finished file as a blob."""
        self._writer.commit(self._digest)

    def discard(self) -> None:
        """Removes a file that was not stored."""
        with self._lock:
            self._writer.discard()


class ReplyUpload(Upload):
    """The upload of the payload of a reply, which may break off."""

    def __init__(self, name: str, writer: NamedWriter, check: PayloadCheck, digest: str, size: int) -> None:
        super().__init__(writer, check, digest, size)
        self.name = name
        self._named = writer

    def leave(self) -> bool:
        """Ends the upload; True if it may go on later. A file that is whole, or has not begun, is not kept."""
        with self._lock:
            if 0 < self.arrived < self._size:
                self._named.suspend()
                return True
            self._named.discard()
            return False


class Uploads:
    """Payloads while they arrive, and the stored part of each upload that broke off. Used from any thread.

    Args:
        database: has the assignments and their clients.
        blobs: keeps them.
        quota: the bytes that uploads of one member may take together; a single one may be larger.
    """

    def __init__(self, database: Database, blobs: BlobStore, *, quota: int) -> None:
        self._database = database
        self._blobs = blobs
        self._quota = quota
        self._lock = threading.Lock()  # uploads begin one after the other: it is held while files and rows are read
        self._noted = threading.Lock()  # of the names below; never held over I/O, since the event loop takes it
        self._under_way: dict[str, int] = {}  # declared bytes, by name
        self._checks: dict[str, tuple[int, PayloadCheck]] = {}  # after how many bytes, by name
        # True if no other coordinator has uploads in this store: then it is read once.
        self.alone = not database.serves_many
        self._broke_off = {upload.name for upload in blobs.partial_uploads()} if self.alone else set[str]()

    def broke_off(self, admission: Admission) -> bool:
        """True if an upload of this payload has begun and may go on; without I/O, and without a wait, if `alone`."""
        if not admission.manifest.payload:
            return False
        name = _name(admission)
        if not self.alone:
            return any(upload.name == name for upload in self._blobs.partial_uploads())
        with self._noted:
            return name in self._broke_off or name in self._under_way

    def begin(self, admission: Admission, check: PayloadCheck) -> ReplyUpload:
        """Begins the upload of an admitted reply's payload, or goes on with it. It ends with `end`.

        `check` is a new one of the payload. An upload of another payload for the same assignment is removed.

        Raises:
            Refusal: `limit:uploads`; `superseded`: the upload is under way.
        """
        manifest = admission.manifest
        name = _name(admission)
        with self._lock:
            self._check_fits(manifest.client_id, manifest.assignment_id, name, manifest.payload_bytes)
            try:
                writer = self._blobs.resume(name)
            except BlockingIOError:
                raise Refusal("superseded", "another upload of this payload has not ended yet: try again") from None
            with self._noted:
                self._under_way[name] = manifest.payload_bytes
                self._broke_off.discard(name)
            arrived, resumed = self._checks.pop(name, (0, check))
        try:
            if writer.written > manifest.payload_bytes:  # declared was less than before
                writer.discard()
                writer = self._blobs.resume(name)
            if arrived == writer.written:
                check = resumed
            else:
                for piece in writer.arrived():
                    check.feed(piece)
        except BaseException:
            writer.suspend()
            self._forget(name, broke_off=True)
            raise
        return ReplyUpload(name, writer, check, manifest.payload, manifest.payload_bytes)

    def end(self, upload: ReplyUpload) -> None:
        """Ends an upload: its bytes are kept, unless it is complete and therefore stored or wrong."""
        broke_off = upload.leave()
        if broke_off:
            with self._lock:
                self._checks[upload.name] = upload.arrived, upload.check
        self._forget(upload.name, broke_off=broke_off)

    def collect(self) -> int:
        """Removes uploads that broke off and whose assignments are no longer open; returns their number."""
        names = [upload.name for upload in self._blobs.partial_uploads()]
        open_ones = self._open_assignments(names)
        ended = [name for name in names if _assignment_of(name) not in open_ones]
        with self._lock:
            for name in ended:
                self._checks.pop(name, None)
        with self._noted:
            self._broke_off.difference_update(ended)
        return sum(map(self._blobs.drop, ended))

    def _forget(self, name: str, *, broke_off: bool) -> None:
        """Notes that an upload is no longer under way, and whether it may go on later."""
        with self._noted:
            self._under_way.pop(name, None)
            if broke_off:
                self._broke_off.add(name)

    def _check_fits(self, client_id: str, assignment_id: str, name: str, size: int) -> None:
        sizes = {upload.name: upload.size for upload in self._blobs.partial_uploads()}
        with self._noted:
            sizes |= self._under_way
        for other in list(sizes):
            if _assignment_of(other) == assignment_id and other != name and self._blobs.drop(other):
                self._checks.pop(other, None)
                with self._noted:
                    self._broke_off.discard(other)
                del sizes[other]
        sizes.pop(name, None)
        owners = self._open_assignments(list(sizes))
        used = sum(size for other, size in sizes.items() if owners.get(_assignment_of(other)) == client_id)
        if used and used + size > self._quota:
            raise Refusal(
                "limit:uploads",
                f"{size} bytes, beside {used} of your other uploads that broke off or are under way; at most "
                f"{self._quota} together: finish those first",
            )

    def _open_assignments(self, names: list[str]) -> dict[str, str]:
        """The open assignments to which uploads belong, with their clients."""
        if not names:
            return {}
        query = select(Assignment.assignment_id, Assignment.client_id).where(
            Assignment.assignment_id.in_({_assignment_of(name) for name in names}),
            Assignment.state == AssignmentState.OPEN,
        )
        with self._database.read() as session:
            return {row.assignment_id: row.client_id for row in session.execute(query)}


def _name(admission: Admission) -> str:
    algorithm, value = parse(admission.manifest.payload)
    return f"{admission.manifest.assignment_id}.{algorithm}.{value}"


def _assignment_of(name: str) -> str:
    return name.partition(".")[0]
