"""A small JSON file with a worker's state of its coordinator, replaced durably with each change."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from federation.monitoring.events import Events
from federation.text_files import FORMAT, FormatError, check_format
from federation.trust.keys import replace_private
from worker.home import WorkerHomeError

T = TypeVar("T")


class StateFile:
    """A JSON file; `content` describes it in messages."""

    def __init__(self, path: Path, content: str, events: Events) -> None:
        self._path = path
        self._content = content
        self._events = events
        self._warned = False  # that it cannot be written

    def write(self, document: Mapping[str, Any]) -> None:
        """Replaces the file. If it cannot be written, the owner is warned once, and the worker goes on.

        Raises:
            DirectoryGone: the worker's directory is.
        """
        self._events.home.check_there()
        try:
            replace_private(self._path, state_bytes(document))
        except OSError as error:
            if not self._warned:
                self._events.disk(
                    f"{self._path} cannot be written ({error.strerror or error}): {self._content} is remembered only "
                    "until this worker ends; make room on the disk",
                )
            self._warned = True
        else:
            self._warned = False


def state_bytes(document: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """The content of a file for `read_state`; `default` makes JSON of other values, as for `json.dumps`."""
    return json.dumps({"format": FORMAT, **document}, default=default).encode() + b"\n"


def read_state(path: Path, parse: Callable[[dict[str, Any]], T], advice: str) -> T | None:
    """Parses the document in a file with `parse`; None if there is no such file.

    `advice` names the consequence of moving a damaged file away.

    Raises:
        WorkerHomeError: the file is damaged, of another version, or cannot be read at present.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        check_format(document.pop("format"))
        return parse(document)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorkerHomeError(
            f"{path} cannot be read ({error.strerror or error}): see what is wrong with it"
        ) from error
    except FormatError as error:
        raise WorkerHomeError(f"{path}: {error}: use the version that wrote it, or move it away; {advice}") from error
    except (KeyError, TypeError, ValueError, AttributeError, DecodeError) as error:
        raise WorkerHomeError(f"{path} is damaged ({type(error).__name__}: {error}): move it away; {advice}") from error
