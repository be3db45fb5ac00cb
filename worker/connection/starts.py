"""The starts of a worker's home: a copy of the home, which knows them up to the time of the copy, is found by them.

Each start makes a random id. It is on the disk before a coordinator can hear of it, so a home always knows the start
that is on record for it, wherever its worker was killed. If another home with the same identity has started meanwhile,
the coordinator refuses this one, until its owner decides with `fedpareto worker copied`.

Nothing here depends on the coordinator's honesty: a false refusal is an outage, and no home spends more by it.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from federation.trust.keys import replace_private
from federation.v1.federation_pb2 import Hello
from worker.home import WorkerHome, WorkerHomeError
from worker.state_file import read_state, state_bytes

START_BYTES = 16
MAX_STARTS = 33  # that are remembered, with the present one
SET_ASIDE = "set aside"
_ADVICE = "the coordinator then refuses this home until `fedpareto worker copied --this-one`"


@dataclass(frozen=True)
class KnownStarts:
    """What a home knows.

    Attributes:
        starts: its own, and those of other homes whose place it took by its owner's decision; the newest last.
        welcomed: the last one that a coordinator has welcomed; empty if there is none.
        refused: the start on record of another home, because of which this one was refused; empty if it was not.
        since: when it was first refused because of that one.
    """

    starts: tuple[bytes, ...] = ()
    welcomed: bytes = b""
    refused: bytes = b""
    since: datetime | None = None

    def with_start(self, start: bytes) -> "KnownStarts":
        """These and a new one. Where all that are kept may be on record, the newest of them is used again."""
        starts = self.starts
        if len(starts) >= MAX_STARTS:
            if self.welcomed not in starts[1:]:
                return self
            starts = starts[1:]
        return replace(self, starts=(*starts, start))

    def going_on(self) -> "KnownStarts":
        """These after the owner's decision that this home goes on in the place of the one that started last."""
        *earlier, own = self.starts
        return replace(self, starts=(*earlier[-(MAX_STARTS - 2) :], self.refused, own), refused=b"", since=None)


def known_starts(path: Path) -> KnownStarts:
    """What is in a home's file. Raises WorkerHomeError: it is damaged."""
    return read_state(path, _parsed, _ADVICE) or KnownStarts()


def decide(home: WorkerHome, known: KnownStarts, *, this_one: bool) -> None:
    """Records the owner's decision, for the worker that runs or the next one; the last one counts. Raises OSError."""
    replace_private(home.start_decided, known.refused.hex().encode() if this_one else SET_ASIDE.encode())


def set_aside(home: WorkerHome) -> bool:
    """True if the owner has decided that another home goes on."""
    return _decision(home.start_decided) == SET_ASIDE


class Starts:
    """The starts of a home whose worker runs; any thread may call.

    Raises:
        WorkerHomeError: the file is damaged, or the owner has set this home aside.
    """

    def __init__(self, home: WorkerHome, new_start: Callable[[int], bytes]) -> None:
        self._home = home
        self._new_start = new_start
        self._lock = threading.Lock()
        self._known = known_starts(home.starts)
        self._begun = False
        self._check_not_set_aside()

    @property
    def start(self) -> bytes:
        """The id of this start; empty before the first Hello."""
        return self._known.starts[-1] if self._begun else b""

    def tell(self, hello: Hello) -> None:
        """Tells them in a Hello.

        Raises:
            WorkerHomeError: the owner has set this home aside.
            OSError: they cannot be written; then nothing may be said.
        """
        self._check_not_set_aside()
        with self._lock:
            known = self._known if self._begun else self._known.with_start(self._new_start(START_BYTES))
            if known.refused and _decision(self._home.start_decided) == known.refused.hex():
                known = known.going_on()
            self._write(known)  # before the Hello: the coordinator may record it, and this process die
            self._begun = True
            hello.start, earlier = known.starts[-1], known.starts[:-1]
            hello.earlier_starts.extend(reversed(earlier))

    def welcomed(self) -> None:
        """Notes that this start is on record. If that cannot be written, the next start tells one more."""
        with self._lock, suppress(OSError):
            self._write(replace(self._known, welcomed=self.start, refused=b"", since=None))
            self._home.start_decided.unlink(missing_ok=True)

    def refused(self, start: bytes) -> None:
        """Notes the start on record, because of which this home was refused."""
        with self._lock, suppress(OSError):
            if len(start) == START_BYTES and start != self._known.refused:
                self._write(replace(self._known, refused=start, since=datetime.now(UTC)))

    def decided(self) -> bool:
        """True if the owner has decided that this home goes on.

        Raises:
            WorkerHomeError: the owner has set it aside.
        """
        self._check_not_set_aside()
        refused = self._known.refused
        return bool(refused) and _decision(self._home.start_decided) == refused.hex()

    def _write(self, known: KnownStarts) -> None:
        if known == self._known:
            return
        document = {
            "starts": [start.hex() for start in known.starts],
            "welcomed": known.welcomed.hex(),
            "refused": known.refused.hex(),
            "since": known.since and known.since.isoformat(),
        }
        replace_private(self._home.starts, state_bytes(document))
        self._known = known

    def _check_not_set_aside(self) -> None:
        if set_aside(self._home):
            raise WorkerHomeError(
                f"{self._home.directory} was set aside: its owner has decided that another home with this identity "
                "goes on. Remove this one, or, if it goes on after all, run `fedpareto worker copied --this-one`"
            )


def _parsed(document: dict[str, Any]) -> KnownStarts:
    starts = tuple(bytes.fromhex(start) for start in document["starts"])
    if any(len(start) != START_BYTES for start in starts):
        raise ValueError("a start of another length")
    return KnownStarts(
        starts=starts[-MAX_STARTS:],
        welcomed=bytes.fromhex(document["welcomed"]),
        refused=bytes.fromhex(document["refused"]),
        since=None if document["since"] is None else datetime.fromisoformat(document["since"]),
    )


def _decision(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # in nearly all cases, nothing is decided
        return ""
