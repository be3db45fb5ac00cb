"""The initial model of a run on its way in: hashed, checked and stored in one pass."""

from types import TracebackType
from typing import Self

from federation import digests
from federation.payload_check import PayloadCheck
from federation.refusals import Refusal
from federation.vectors import LENGTH_BYTES, Layout, header_length, parse_header
from storage.blobs import BlobStore


def must_fit(size: int, limit: int) -> None:
    """Raises if a model of `size` bytes is larger than `limit`.

    Raises:
        Refusal: `limit:model`.
    """
    if size > limit:
        raise Refusal("limit:model", f"the model has {size} bytes; this federation accepts at most {limit}")


class ModelIntake:
    """Takes a safetensors file in pieces; a context manager that leaves nothing behind unless `finish` returned.

    Args:
        blobs: where the model goes.
        digest: the promised digest.
        size: the promised size in bytes.
        limit: the largest model that the federation takes, in bytes.

    Raises:
        Refusal: `argument` (not a digest), `limit:model`.
    """

    def __init__(self, blobs: BlobStore, digest: str, size: int, *, limit: int) -> None:
        try:
            self._algorithm, _ = digests.parse(digest)
        except ValueError as error:
            raise Refusal("argument", f"model: {error}") from None
        must_fit(size, limit)
        self._digest = digest
        self._size = size
        self._prefix: bytearray | None = bytearray()  # what has arrived of the header; None once it was read
        self._layout: Layout | None = None
        self._check: PayloadCheck | None = None
        self._writer = blobs.writer(hash=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.discard()

    def feed(self, chunk: bytes) -> None:
        """Takes in the next piece.

        Raises:
            Refusal: `payload-length`: more than was promised; what `federation.vectors.parse_header` raises.
        """
        if self._writer.written + len(chunk) > self._size:
            raise Refusal("payload-length", f"more bytes arrived than the {self._size} that were declared")
        self._writer.write(chunk)
        if self._check is not None:
            self._check.feed(chunk)
        elif self._prefix is not None:
            self._prefix += chunk
            self._read_header(self._prefix)

    def finish(self) -> tuple[str, Layout]:
        """Stores the model.

        Returns:
            Its digest and its layout.

        Raises:
            Refusal: `payload-length`, `payload-digest`, `layout`, `dtype`, `non-finite`.
        """
        if (received := self._writer.written) != self._size:
            raise Refusal("payload-length", f"{received} bytes arrived, {self._size} were declared")
        if self._check is None or self._layout is None:
            raise Refusal("layout", f"{received} bytes are not a safetensors file")
        found = self._check.finish()
        if found != self._digest:
            raise Refusal("payload-digest", f"the bytes have the digest {found}, declared was {self._digest}")
        if self._check.problem is not None:
            raise self._check.problem
        return self._writer.commit(found), self._layout

    def _read_header(self, prefix: bytearray) -> None:
        if len(prefix) < LENGTH_BYTES or len(prefix) < LENGTH_BYTES + header_length(prefix):
            return
        self._layout, _ = parse_header(bytes(prefix))
        self._check = PayloadCheck(self._layout, self._algorithm)
        self._check.feed(bytes(prefix))
        self._prefix = None
