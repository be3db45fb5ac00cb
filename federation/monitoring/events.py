"""A process's messages to its owner: one line for people on the log, one JSON object for programs on a stream.

Parts of a message come from others, such as a coordinator. They are escaped here, so that they cannot move a terminal's
cursor or forge a line. Nor can they fill the disk of the log: each event has a token bucket.
"""

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from federation.directories import Directories
from federation.text import escaped
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest

MAX_MESSAGE = 4000  # characters
BURST, PER_SECOND = 10_000, 0.5  # messages of each event
LOGGER = logging.getLogger("fedpareto.worker")
Listener = Callable[[str, Mapping[str, object]], None]
"""Gets the name and the fields of each event, in the thread that reports it: it may neither wait nor fail."""


class Events:
    """Writes each event to the log and, as JSON, to the stream if there is one. Callable from any thread.

    `home` is the directory of a worker, which has to stay there.
    """

    def __init__(self, stream: TextIO | None = None, home: Directories | None = None) -> None:
        self._stream = stream
        self._streams = True  # the last event was written there
        self._lock = threading.Lock()
        self._levels: dict[str, tuple[float, float]] = {}  # tokens of each event, and when they were counted
        self._left_out: Counter[str] = Counter()
        self.home = home or Directories()
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> None:
        """Has a listener get each event from now on, also those that are left out of the log."""
        self._listeners += (listener,)

    def tell(self, event: str, message: str, **fields: object) -> None:
        """Reports an event: its stable name, a line for people, and further fields for programs."""
        self._tell(logging.INFO, event, message, fields)

    def tell_of(
        self, of: AssignmentManifest | ReplyManifest, event: str, text: str, *, warns: bool = False, **fields: object
    ) -> None:
        """Reports an event of an assignment; its name and round come before the text for people."""
        about = {"assignment_id": of.assignment_id, "run_id": of.run_id, "round": of.round}
        message = f"assignment {of.assignment_id} round {of.round}: {text}"
        self._tell(logging.WARNING if warns else logging.INFO, event, message, {**about, **fields})

    def warn(self, event: str, message: str, **fields: object) -> None:
        """Reports an event that needs the owner's attention; arguments as for `tell`."""
        self._tell(logging.WARNING, event, message, fields)

    def disk(self, message: str, **fields: object) -> None:
        """Reports that a file cannot be written; arguments as for `tell`.

        Raises:
            DirectoryGone: `home` is.
        """
        self.home.check_there()
        self.warn("disk", message, **fields)

    def _tell(self, level: int, event: str, message: str, fields: dict[str, object]) -> None:
        for listener in self._listeners:
            listener(event, fields)
        with self._lock:
            if not self._may(event):
                self._left_out[event] += 1
                return
            left_out = self._left_out.pop(event, 0)
        message = escaped(message, MAX_MESSAGE) + (
            f" ({left_out} messages of this kind were left out)" * bool(left_out)
        )
        LOGGER.log(level, "%s", message)
        if self._stream is None:
            return
        fields = {name: escaped(value) if isinstance(value, str) else value for name, value in fields.items()}
        record = {"event": event, "time": datetime.now(UTC).isoformat(), "message": message, **fields}
        with self._lock:
            self._write(self._stream, json.dumps(record))

    def _write(self, stream: TextIO, line: str) -> None:
        """Writes a line to the stream. A full disk behind it does not stop the work: the log says so, once."""
        try:
            print(line, file=stream, flush=True)
        except OSError as error:
            if self._streams:
                LOGGER.warning("standard output cannot be written (%s): events are in this log alone", error.strerror)
            self._streams = False
        else:
            self._streams = True

    def _may(self, event: str) -> bool:
        """Takes a token of an event. False if there is none."""
        now = time.monotonic()
        level, counted = self._levels.get(event, (BURST, now))
        level = min(BURST, level + (now - counted) * PER_SECOND)
        self._levels[event] = max(0.0, level - 1), now
        return level >= 1
