"""Names in directories that survive a loss of power: a file's own fsync keeps its bytes, and not its name."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable: of files that were made, renamed or removed there. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(source: Path, target: Path) -> None:
    """Renames a file, whose bytes are durable, or a directory; what it replaces is a file, or an empty directory.

    After a loss of power there is the old one or the new one. Raises OSError.
    """
    source.replace(target)
    sync_directory(target.parent)
    if source.parent != target.parent:
        sync_directory(source.parent)


def make_directories(path: Path, mode: int = 0o777) -> None:
    """Makes a directory and its missing parents, unless they are there, durably; `mode` is that of the last one.

    Raises OSError.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    path.mkdir(mode=mode, exist_ok=True)
    sync_directory(path.parent)
