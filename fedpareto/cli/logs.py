"""The log of a daemon: one line for each event, for people or as JSON; text of others is escaped."""

import json
import logging
import sys
from datetime import datetime
from typing import Any

from federation.process.assignment_log import AssignmentFilter
from federation.text import escaped, escaped_lines
from fedpareto.cli.failure import USAGE, CommandFailure

LIMIT = 4000  # characters of one line
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class OneLine(logging.Formatter):
    """Escapes characters that are not printable, so that no text of others moves a cursor or forges a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """The line, without the traceback that may follow it; the assignment stands in it or at its end."""
        line, about = super().formatMessage(record), getattr(record, "assignment_id", "")
        return escaped(line if not about or about in line else f"{line} (assignment {about})", LIMIT)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """The local time with its offset from UTC, to the millisecond."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name in logging
        """A traceback keeps its lines."""
        return escaped_lines(super().formatException(ei), LIMIT)


class JsonLine(OneLine):
    """One JSON object for each event: time, level, logger, message; assignment_id and traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        document = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escaped(record.getMessage(), LIMIT),
        }
        if about := getattr(record, "assignment_id", ""):
            document["assignment_id"] = about
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def to_standard_error(level: str, layout: str, form: str = "text") -> None:
    """Sends the log from a level on to standard error.

    Args:
        level: one of `LEVELS`, in any case.
        layout: a line of the text form.
        form: one of `FORMATS`.

    Raises:
        CommandFailure: there is no such level or form.
    """
    for option, given, known in (("--log-level", level.lower(), LEVELS), ("--log-format", form, FORMATS)):
        if given not in known:
            *others, last = known
            raise CommandFailure(f"{option} {given}: expected {', '.join(others)} or {last}", code=USAGE)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(AssignmentFilter())
    handler.setFormatter(JsonLine() if form == "json" else OneLine(layout))
    logging.basicConfig(level=level.upper(), handlers=[handler])
