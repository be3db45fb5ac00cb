"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from federation.durable_files import rename_durably


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which everybody may read. It is at `path` once the context ends; after an exception it is not.

    Until then an older file stays.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        temporary.chmod(0o644)
        rename_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
