"""What a loss of power would undo: names that were made or renamed in a directory that was not synced since."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class PowerCut:
    """Watches the files that this process makes, renames and syncs in Python's own code."""

    def __init__(self) -> None:
        self._unsynced: dict[Path, str] = {}  # the names that are not durable, and how they came about

    def made(self, path: object, how: str) -> None:
        if isinstance(path, str | os.PathLike):
            self._unsynced[Path(os.fspath(path)).absolute()] = how

    def synced(self, descriptor: int) -> None:
        directory = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        for path in [path for path in self._unsynced if path.parent == directory]:
            del self._unsynced[path]

    def lost(self, root: Path) -> list[str]:
        """The names below a directory that are there, and would be lost or be those of before, in order."""
        return sorted(
            f"{path.relative_to(root)} ({how})"
            for path, how in self._unsynced.items()
            if path.is_relative_to(root) and path.exists()
        )


@contextmanager
def power_cut() -> Iterator[PowerCut]:
    """Watches while the context lasts. Files that SQLite makes are not seen."""
    cut = PowerCut()
    rename, replace, mkdir, fsync = os.rename, os.replace, os.mkdir, os.fsync
    low, high = os.open, io.open

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **others: Any) -> None:
            move(source, target, **others)
            cut.made(target, "renamed")

        return moved

    def made(path: Any, *others: Any, **more: Any) -> None:
        mkdir(path, *others, **more)
        cut.made(path, "made")

    def opened(path: Any, flags: int, *others: Any, **more: Any) -> int:
        new = bool(flags & os.O_CREAT) and not os.path.exists(path)
        descriptor = low(path, flags, *others, **more)
        if new:
            cut.made(path, "written")
        return descriptor

    def read_or_written(path: Any, mode: str = "r", *others: Any, **more: Any) -> Any:
        new = mode[0] in "wax" and not (isinstance(path, int) or os.path.exists(path))
        file = high(path, mode, *others, **more)
        if new:
            cut.made(path, "written")
        return file

    def to_disk(descriptor: int) -> None:
        fsync(descriptor)
        cut.synced(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", moving(rename))
        patch.setattr(os, "replace", moving(replace))
        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "open", opened)
        patch.setattr(io, "open", read_or_written)
        patch.setattr(os, "fsync", to_disk)
        yield cut
