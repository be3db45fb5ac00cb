"""A small file of what a worker remembers of its coordinator, replaced with each change."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from federation.keys import replace_private
from worker.events import Events


class StateFile:
    """A JSON file; `content` says in words what it holds."""

    def __init__(self, path: Path, content: str, events: Events) -> None:
        self._path = path
        self._content = content
        self._events = events
        self._told = False  # that the disk does not take it

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the file. While the disk does not take it, the owner has been told once, and the worker goes on."""
        try:
            replace_private(self._path, json.dumps(document).encode() + b"\n")
        except OSError as error:
            if not self._told:
                self._events.warn(
                    "disk",
                    f"{self._path} cannot be written ({error.strerror or error}): {self._content} is remembered only "
                    "until this worker ends; make room on the disk",
                )
            self._told = True
        else:
            self._told = False
