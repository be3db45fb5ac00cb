"""A directory in which the attackers of a rehearsal show each other their honest updates."""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from federation.digests import digest
from federation.refusals import Refusal
from federation.vectors import Layout, Vector, read_vector, write_vectors
from worker.home import WorkerHomeError

# How long to wait for the others: an accomplice that was not selected for a round never comes.
WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.05
_KEPT = 2  # a late accomplice may still read the update of the round before


class Accomplices:
    """One attacker's view of the shared directory, in which each accomplice has a directory with its name."""

    def __init__(self, directory: Path, client_id: str) -> None:
        self._directory = directory
        self._own = directory / client_id
        self._shown: deque[Path] = deque()

    def meet(self) -> None:
        """Creates this attacker's directory: from now on the others wait for its updates. Raises WorkerHomeError."""
        try:
            rmtree(self._own, ignore_errors=True)  # an earlier process may have died
            self._own.mkdir(parents=True)
        except OSError as error:
            raise WorkerHomeError(f"cannot meet accomplices in {self._directory}: {error}") from error

    def exchange(
        self, occasion: str, layout: Layout, vector: Vector, *, seconds: float, pause: Callable[[float], None]
    ) -> list[Vector]:
        """Shows the others an honest update (d,), and waits at most `seconds` for theirs.

        All accomplices name the same occasion, a new one for each exchange. Files of another layout are ignored.
        `pause` sleeps, and may raise to end the wait.

        Returns:
            The updates that were shown, with this attacker's own, in the order of their names.
        """
        name = digest(occasion.encode()).rpartition(":")[2] + ".safetensors"
        path = self._own / name
        temporary = path.with_suffix(".tmp")
        write_vectors(temporary, layout, vector)
        os.replace(temporary, path)
        self._shown.append(path)
        while len(self._shown) > _KEPT:
            self._shown.popleft().unlink(missing_ok=True)
        waited = 0.0
        while True:
            directories = sorted(member for member in self._directory.iterdir() if member.is_dir())
            updates = [row for member in directories if (row := _read(member / name, layout)) is not None]
            if len(updates) == len(directories) or waited >= seconds:
                return updates
            pause(_LOOK_SECONDS)
            waited += _LOOK_SECONDS

    def leave(self) -> None:
        """Removes this attacker's directory, so that nobody waits for it any more."""
        rmtree(self._own, ignore_errors=True)


def _read(path: Path, layout: Layout) -> Vector | None:
    try:
        written, vector = read_vector(path)
    except (FileNotFoundError, Refusal):
        return None
    return vector if written == layout else None
