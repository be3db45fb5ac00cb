"""The work that has begun and not ended, kept on the disk: the next start knows in which work the process died.

Code of the owner's, or of a library, may end the process without an exception: `os._exit`, a crash of native code, a
process that the machine kills because memory is lacking. Without a note, a worker that is started again would die in
the same work for ever. Work is tried once more, and then declined with the reason `crashed`. In a private round, the
death of a process is a failure (see `federation.work.secure.failing`): it counts, and the second one is answered like
any other.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from federation.monitoring.events import Events
from federation.work.base import Lane
from federation.work.site import FailedSession
from worker.site.assignment_checks import CheckedAssignment, Declined
from worker.state_file import StateFile, read_state

TRIES = 2  # of work in which the process dies
MAX_NOTES = 100  # of work that is not asked for again
DIED = "the worker's process ended while it did this work: see its log and the machine's, which may lack memory"
_ADVICE = "work in which the last process died is then tried again"


@dataclass(frozen=True)
class Note:
    """Work that has begun `tries` times and has not ended; `session` is its private session, None without one."""

    tries: int
    session: FailedSession | None = None


class BegunWork:
    """The notes, in a file that may be missing. Any thread may call.

    Raises:
        WorkerHomeError: the file is damaged.
    """

    def __init__(self, path: Path, events: Events) -> None:
        self._path = path
        self._file = StateFile(path, "the work that has begun", events)
        self._events = events
        self._lock = threading.Lock()
        self._notes = read_state(path, _parsed, _ADVICE) or {}
        self._before: dict[str, Note | None] = {}  # of work that is under way, the note that it began with

    def died(self) -> list[tuple[str, FailedSession]]:
        """The private sessions in which the last process died and that are not counted yet, by assignment."""
        return [(name, note.session) for name, note in self._notes.items() if note.session is not None]

    def counted(self, assignment_id: str) -> None:
        """Notes that a session of `died` is counted."""
        self._set(assignment_id, replace(self._notes[assignment_id], session=None))

    def check_tries(self, order: CheckedAssignment) -> None:
        """Raises Declined, `crashed`, if the process has died in this work too often.

        In a private round only if it died where the run's model is not used: elsewhere it is a failure.
        """
        tries = self._tries(order)
        # Section 2d: in a private round, the second death gets an answer: a decline would tell that this model kills
        # the process.
        if tries >= TRIES and (not order.work.conceals or tries > TRIES):
            raise Declined("crashed", f"{DIED}; it was tried {tries} times")

    @contextmanager
    def noted(self, order: CheckedAssignment) -> Iterator[bool]:
        """Notes work inside, durably, until it ends with or without an exception; messages of a protocol are not noted.

        Yields:
            True if the process has died in it so often that it is not tried again.
        """
        name = order.manifest.assignment_id
        # Section 2d: only work with the model and the data can be made to fail; protocol messages repeat their answer.
        if order.work.lane is not Lane.COMPUTE:
            yield False
            return
        tries = self._tries(order)
        if 0 < tries < TRIES:
            self._events.tell_of(order.manifest, "crashed", f"{DIED}. It is tried once more", warns=True)
        with self._lock:
            self._before[name] = self._notes.get(name)
        # Section 2d: on the disk before the computation: a process that dies without it counts no failure, and dies
        # again for ever.
        self._set(name, Note(tries + 1, _session(order)))
        try:
            yield tries >= TRIES
        finally:
            with self._lock:
                self._before.pop(name, None)
            self._set(name, None)

    def stop(self) -> None:
        """Takes back the notes of work that is under way: the process ends because it was asked to."""
        with self._lock:
            under_way, self._before = self._before, {}
        for name, note in under_way.items():
            self._set(name, note)

    def _tries(self, order: CheckedAssignment) -> int:
        note = self._notes.get(order.manifest.assignment_id)
        return 0 if note is None else note.tries

    def _set(self, name: str, note: Note | None) -> None:
        with self._lock:
            self._notes.pop(name, None)
            if note is not None:
                self._notes[name] = note
            # Assignments that never come again would fill the file.
            while len(self._notes) > MAX_NOTES:
                del self._notes[next(iter(self._notes))]
            if self._notes:
                self._file.write({"work": {key: asdict(kept) for key, kept in self._notes.items()}})
            else:
                with suppress(OSError):  # a note that stays counts as one try
                    self._path.unlink(missing_ok=True)


def _session(order: CheckedAssignment) -> FailedSession | None:
    """The session that fails with an order, if it is one of a private round that computes a vector."""
    manifest, vector = order.manifest, order.work.session_vector()
    if vector is None:
        return None
    session, kind = vector
    return FailedSession(session, manifest.run_id, manifest.round, manifest.task, kind, DIED)


def _parsed(document: dict[str, Any]) -> dict[str, Note]:
    return {name: _note(**kept) for name, kept in document["work"].items()}


def _note(tries: int, session: dict[str, Any] | None) -> Note:
    return Note(int(tries), None if session is None else FailedSession(**session))
