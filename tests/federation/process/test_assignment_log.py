"""Lines of the log: as JSON, and with the assignment that they are about."""

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from federation.process.assignment_log import AssignmentFilter, about_assignment
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.logs import JsonLine, OneLine, to_standard_error

LAYOUT = "%(levelname)s %(message)s"


@pytest.fixture
def lines() -> Iterator[tuple[logging.Logger, logging.StreamHandler[io.StringIO]]]:
    """A logger of its own, and what writes it into memory."""
    logger, handler = logging.Logger("own"), logging.StreamHandler(io.StringIO())
    handler.addFilter(AssignmentFilter())
    logger.addHandler(handler)
    yield logger, handler
    handler.close()


Lines = tuple[logging.Logger, logging.StreamHandler[io.StringIO]]


def test_each_json_line_is_an_object_with_the_documented_keys(lines: Lines) -> None:
    logger, handler = lines
    handler.setFormatter(JsonLine())
    logger.warning("two\nlines \x1b[2J of %s", "others")
    with about_assignment("ab" * 16):
        try:
            raise ValueError("no\nsuch thing")
        except ValueError:
            logger.exception("it failed")
    first, second = map(json.loads, handler.stream.getvalue().splitlines())
    assert set(first) == {"time", "level", "logger", "message"}
    assert (first["level"], first["logger"]) == ("warning", "own")
    assert not {"\n", "\x1b"} & set(first["message"]), "text of others is escaped"
    assert second["assignment_id"] == "ab" * 16
    assert second["traceback"].startswith("Traceback")
    assert "ValueError" in second["traceback"]


def test_a_line_names_its_assignment_once_and_only_within_the_block_of_its_own_thread(lines: Lines) -> None:
    logger, handler = lines
    handler.setFormatter(OneLine(LAYOUT))
    with about_assignment("cd" * 16):
        logger.info("begins")
        logger.info("assignment %s goes on", "cd" * 16)
        other = threading.Thread(target=logger.info, args=("of another thread",))
        other.start()
        other.join()
    logger.info("after")
    name = "cd" * 16
    expected = [f"INFO begins (assignment {name})", f"INFO assignment {name} goes on"]
    assert handler.stream.getvalue().splitlines() == [*expected, "INFO of another thread", "INFO after"]


@pytest.mark.parametrize(
    ("level", "form", "option"), [("loud", "text", "--log-level loud"), ("info", "xml", "--log-format xml")]
)
def test_an_unknown_level_or_form_is_refused_with_those_that_exist(level: str, form: str, option: str) -> None:
    with pytest.raises(CommandFailure, match=f"{option}: expected .* or "):
        to_standard_error(level, LAYOUT, form)
