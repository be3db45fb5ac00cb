"""A payload or a model on its way in: checked as it arrives, and stored in one pass."""

from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from storage.blobs import BlobStore


class Upload:
    """Takes a file in pieces; nothing is left of it unless it was stored.

    Args:
        blobs: where the file goes.
        check: of the content, on the way.
        digest: as declared.
        size: as declared, in bytes.
    """

    def __init__(self, blobs: BlobStore, check: PayloadCheck, digest: str, size: int) -> None:
        self._check = check
        self._digest = digest
        self._size = size
        self._writer = blobs.writer(hash=False)

    def take(self, chunk: bytes) -> None:
        """Takes in the next piece.

        Raises:
            Refusal: `payload-length`: more than was declared.
        """
        if self._writer.written + len(chunk) > self._size:
            raise Refusal("payload-length", f"{self._size} bytes were declared, and more arrived")
        self._writer.write(chunk)
        self._check.feed(chunk)

    def finish(self) -> None:
        """Compares the file with what was declared; what is wrong with its content is in `check.problem`.

        Raises:
            Refusal: `payload-length`, `payload-digest`.
        """
        if self._writer.written != self._size:
            raise Refusal("payload-length", f"{self._size} bytes were declared, {self._writer.written} arrived")
        found = self._check.finish()
        if found != self._digest:
            raise Refusal("payload-digest", f"the file has the digest {found}, declared was {self._digest}")

    def store(self) -> None:
        """Stores the finished file as a blob."""
        self._writer.commit(self._digest)

    def discard(self) -> None:
        """Removes what was not stored."""
        self._writer.discard()
