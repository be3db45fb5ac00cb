"""A worker's messages to its owner: one line for people on the log, one JSON object for programs on a stream.

Parts of a message come from the coordinator. They are escaped here, so that they cannot move a terminal's cursor or
forge a line.
"""

import json
import logging
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from federation.text import escaped
from federation.v1.common_pb2 import AssignmentManifest, ReplyManifest

MAX_MESSAGE = 4000  # characters
LOGGER = logging.getLogger("fedpareto.worker")


class Events:
    """Writes each event to the log and, as JSON, to the stream if there is one. Callable from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

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

    def _tell(self, level: int, event: str, message: str, fields: dict[str, object]) -> None:
        message = escaped(message, MAX_MESSAGE)
        LOGGER.log(level, "%s", message)
        if self._stream is None:
            return
        fields = {name: escaped(value) if isinstance(value, str) else value for name, value in fields.items()}
        record = {"event": event, "time": datetime.now(UTC).isoformat(), "message": message, **fields}
        with self._lock, suppress(OSError):  # a full disk behind the stream does not stop the work
            print(json.dumps(record), file=self._stream, flush=True)
