"""A worker's messages to its owner: one line for people on the log, one JSON object for programs on a stream.

Part of it came from the coordinator. It is escaped here, so that it cannot move a terminal's cursor or forge a line.
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
    """Tells both audiences the same thing; no stream, no JSON lines. Callable from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def tell(self, event: str, message: str, **fields: object) -> None:
        """Tells of an event: its stable name, the line for people, and further fields for programs."""
        self._tell(logging.INFO, event, message, fields)

    def tell_of(
        self, of: AssignmentManifest | ReplyManifest, event: str, words: str, *, warns: bool = False, **fields: object
    ) -> None:
        """Tells of an event of an assignment: words for people, behind its name and round."""
        about = {"assignment_id": of.assignment_id, "run_id": of.run_id, "round": of.round}
        message = f"assignment {of.assignment_id} round {of.round}: {words}"
        self._tell(logging.WARNING if warns else logging.INFO, event, message, {**about, **fields})

    def warn(self, event: str, message: str, **fields: object) -> None:
        """Tells of something that the owner should look at; arguments as for `tell`."""
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
