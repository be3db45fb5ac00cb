"""Models that were fetched, by digest: the model that a round evaluates is the one that the next round starts from."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from federation.digests import Hasher, file_digest, hasher, parse

_MODEL = ".safetensors"
_PART = ".part"
_PIECE = 1 << 20  # bytes of a file that are read at a time
KEPT_MODELS = 3


class ModelMismatch(Exception):
    """The served bytes are not the announced model."""


class _Version(NamedTuple):
    """Tells one version of a file from another one, as far as the file system can."""

    inode: int
    size: int
    modified: int  # nanoseconds
    changed: int  # nanoseconds

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The version of a file; None without one."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class ModelCache:
    """Keeps the last few models in a directory, which anybody may empty at any time. One thread at a time."""

    def __init__(self, directory: Path, keep: int = KEPT_MODELS) -> None:
        self._directory = directory
        self._keep = keep
        # The files that this process has checked, by digest, the last used one last. A file is checked before its first
        # use, and again when it is another version.
        self._verified: dict[str, _Version | None] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, digest: str, size: int, fetch: Callable[[int], Iterator[bytes | memoryview]]) -> Path:
        """The file of a model of this digest and size in bytes, from the disk or from `fetch`.

        `fetch` yields the model's bytes from the given offset on. Its errors pass through; the bytes that had arrived
        stay, and the next call continues after them.

        Raises:
            ValueError: `digest` is malformed.
            ModelMismatch: other bytes were served.
            OSError: the model cannot be written, even after the other models here were removed.
        """
        path = self._path(digest)
        part = path.with_suffix(_PART)
        verified = self._verified.pop(digest, None)
        if verified is None or verified != _Version.of(path):
            if path.exists() and file_digest(path, parse(digest)[0]) != digest:
                path.unlink()
            if not path.exists():
                for directory in (self._directory.parent, self._directory):
                    directory.mkdir(mode=0o700, exist_ok=True)
                try:
                    self._fetch(part, size, digest, fetch)
                except OSError:
                    if not self._evict(keep={part}):
                        raise
                    self._fetch(part, size, digest, fetch)  # continues, in the space that the others took
                part.rename(path)
        self._verified[digest] = _Version.of(path)
        self._evict(keep=set(self._files()[: self._keep]))
        return path

    def _path(self, digest: str) -> Path:
        algorithm, value = parse(digest)
        return self._directory / f"{algorithm}-{value}{_MODEL}"

    def _fetch(self, part: Path, size: int, digest: str, fetch: Callable[[int], Iterator[bytes | memoryview]]) -> None:
        # A resumed download may have continued the beginning of another file; one from the start has not.
        algorithm, value = parse(digest)
        resumed = True
        while resumed:
            state = hasher(algorithm)
            resumed = _receive(part, size, fetch, state) > 0
            if state.hexdigest() == value:
                return
            part.unlink()
        raise ModelMismatch(f"what the coordinator served is not the model {digest[:23]}... of {size} bytes")

    def _files(self) -> list[Path]:
        """The files of this directory: first those that this process has used, the last one first, then the newest.

        Times alone would not do: a clock may have been set back.
        """
        used = {self._path(digest): place for place, digest in enumerate(self._verified)}
        with os.scandir(self._directory) as entries:
            files = [Path(entry.path) for entry in entries]
        found = {path: _Version.of(path) for path in files if path.suffix in (_MODEL, _PART)}
        ages = {path: (used.get(path, -1), version.modified) for path, version in found.items() if version is not None}
        return sorted(ages, key=ages.__getitem__, reverse=True)

    def _evict(self, keep: set[Path]) -> bool:
        """Removes all files except `keep`. True if any were removed."""
        files = [path for path in self._files() if path not in keep]
        for path in files:
            path.unlink(missing_ok=True)
            self._verified.pop(path.stem.replace("-", ":", 1), None)
        return bool(files)


def _receive(part: Path, size: int, fetch: Callable[[int], Iterator[bytes | memoryview]], state: Hasher) -> int:
    """Appends the missing bytes to `part`, and hashes all. Returns the number of bytes that were there before."""
    with part.open("a+b") as file:
        resumed = min(file.tell(), size)
        file.truncate(resumed)
        file.seek(0)
        while piece := file.read(_PIECE):
            state.update(piece)
        missing = size - resumed
        if missing:
            for chunk in fetch(resumed):
                file.write(chunk[:missing])
                state.update(chunk[:missing])
                missing -= len(chunk)
                if missing < 0:
                    raise ModelMismatch(f"the coordinator served more than the {size} bytes that it announced")
    return resumed
