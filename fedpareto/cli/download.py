"""Writes a model that the coordinator sends to a file: the whole model with the right digest, or nothing."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from federation import digests
from federation.v1.admin_pb2 import BestModel, ExportModelResponse
from fedpareto.cli.failure import Failure, failing


@dataclass(frozen=True)
class Saved:
    """A model that was written: its digest, its size in bytes, and the round if it was chosen by a metric."""

    digest: str
    size: int
    best: BestModel | None


def save(pieces: Iterable[ExportModelResponse], path: Path) -> Saved:
    """Writes the pieces to `path`.

    Raises:
        Failure: the bytes are not those that the coordinator named, or the file cannot be written; an older file stays.
    """
    with failing(OSError, what=f"cannot write {path}"):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                saved = _write(pieces, file)
                file.flush()
                os.fsync(descriptor)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return saved


def _write(pieces: Iterable[ExportModelResponse], file: BinaryIO) -> Saved:
    best = None
    digest, size, count, state = "", 0, 0, digests.hasher()
    for piece in pieces:
        if not digest:
            digest, size = piece.digest, piece.size
            best = piece.best if piece.HasField("best") else None
            state = digests.hasher(digests.parse(digest)[0])
        state.update(piece.chunk)
        count += file.write(piece.chunk)
    if not digest:
        raise Failure("the coordinator sent no model")
    found = f"{digests.parse(digest)[0]}:{state.hexdigest()}"
    if found != digest or count != size:
        raise Failure(f"the model that arrived is {found} ({count} bytes); expected {digest} ({size} bytes)")
    return Saved(digest, size, best)
