"""Writes a model that the coordinator sends to a file: the whole model with the right digest, or nothing."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from federation import digests
from federation.v1.admin_pb2 import ExportModelResponse
from fedpareto.cli.failure import Failure, failing


def save(pieces: Iterable[ExportModelResponse], path: Path) -> tuple[str, int]:
    """Writes the pieces to `path`; returns the digest and the size in bytes.

    Raises:
        Failure: the bytes are not those that the coordinator named, or the file cannot be written; an older file stays.
    """
    with failing(OSError, what=f"cannot write {path}"):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                digest, size = _write(pieces, file)
                file.flush()
                os.fsync(descriptor)
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return digest, size


def _write(pieces: Iterable[ExportModelResponse], file: BinaryIO) -> tuple[str, int]:
    digest, size, count, state = "", 0, 0, digests.hasher()
    for piece in pieces:
        if not digest:
            digest, size = piece.digest, piece.size
            state = digests.hasher(digests.parse(digest)[0])
        state.update(piece.chunk)
        count += file.write(piece.chunk)
    if not digest:
        raise Failure("the coordinator sent no model")
    found = f"{digests.parse(digest)[0]}:{state.hexdigest()}"
    if found != digest or count != size:
        raise Failure(f"the model that arrived is {found} ({count} bytes); expected {digest} ({size} bytes)")
    return digest, size
