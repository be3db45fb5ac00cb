"""The log of a daemon: one line for each event; text of others is escaped."""

import logging
import sys
from datetime import datetime
from typing import Any

from federation.text import escaped, escaped_lines

LIMIT = 4000  # characters of one line


class OneLine(logging.Formatter):
    """Escapes characters that are not printable, so that no text of others moves a cursor or forges a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """The line, without the traceback that may follow it."""
        return escaped(super().formatMessage(record), LIMIT)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The local time with its offset from UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in logging
        """A traceback keeps its lines."""
        return escaped_lines(super().formatException(ei), LIMIT)


def to_standard_error(level: str, layout: str) -> None:
    """Sends the log from a level ("DEBUG", "INFO", "WARNING" or "ERROR") on to standard error; `layout` is a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(layout))
    logging.basicConfig(level=level, handlers=[handler])
