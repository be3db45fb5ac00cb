"""Models that were fetched, by digest: the model that a round evaluates is the one that the next round starts from."""

from collections.abc import Callable, Iterator
from pathlib import Path

from federation.digests import file_digest, parse

_MODEL = ".safetensors"
_PART = ".part"
KEPT_MODELS = 3


class ModelMismatch(Exception):
    """The served bytes are not the announced model."""


class ModelCache:
    """Keeps the last few models in a directory. One thread at a time."""

    def __init__(self, directory: Path, keep: int = KEPT_MODELS) -> None:
        self._directory = directory
        self._keep = keep
        # Digests that this process has checked. Files of an earlier process are checked before their first use.
        self._verified: set[str] = set()
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
        algorithm, value = parse(digest)
        path = self._directory / f"{algorithm}-{value}{_MODEL}"
        part = path.with_suffix(_PART)
        if digest not in self._verified:
            if path.exists() and file_digest(path, algorithm) != digest:
                path.unlink()
            if not path.exists():
                try:
                    self._fetch(part, size, digest, fetch)
                except OSError:
                    if not self._evict(keep={part}):
                        raise
                    self._fetch(part, size, digest, fetch)  # continues, in the space that the others took
                part.rename(path)
            self._verified.add(digest)
        path.touch()
        self._evict(keep=set(self._files()[: self._keep]))
        return path

    def _fetch(self, part: Path, size: int, digest: str, fetch: Callable[[int], Iterator[bytes | memoryview]]) -> None:
        # A resumed download may have continued the beginning of another file; one from the start has not.
        resumed = True
        while resumed:
            resumed = _receive(part, size, fetch) > 0
            if file_digest(part, parse(digest)[0]) == digest:
                return
            part.unlink()
        raise ModelMismatch(f"what the coordinator served is not the model {digest[:23]}... of {size} bytes")

    def _files(self) -> list[Path]:
        """The files of this directory, newest first."""
        files = [path for path in self._directory.iterdir() if path.suffix in (_MODEL, _PART)]
        return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _evict(self, keep: set[Path]) -> bool:
        """Removes all files except `keep`. True if any were removed."""
        files = [path for path in self._files() if path not in keep]
        for path in files:
            path.unlink()
            self._verified.discard(path.stem.replace("-", ":", 1))
        return bool(files)


def _receive(part: Path, size: int, fetch: Callable[[int], Iterator[bytes | memoryview]]) -> int:
    """Appends the missing bytes to `part`. Returns the number of bytes that were there before."""
    with part.open("ab") as file:
        resumed = min(file.tell(), size)
        file.truncate(resumed)
        missing = size - resumed
        if missing:
            for chunk in fetch(resumed):
                file.write(chunk[:missing])
                missing -= len(chunk)
                if missing < 0:
                    raise ModelMismatch(f"the coordinator served more than the {size} bytes that it announced")
    return resumed
