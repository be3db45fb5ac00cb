"""Who is told when something has changed."""

import logging
import threading
from datetime import UTC, datetime

import pytest

from coordinator.listeners import Listeners
from coordinator.rounds.fleets.presence import Presence
from tests.running import SECONDS


def test_a_listener_that_fails_stops_no_other_and_not_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    presence, told = Presence(), list[str]()

    def fails() -> None:
        raise RuntimeError("a bug")

    presence.changed.listen(fails)
    presence.changed.listen(lambda: told.append("again"))
    with caplog.at_level(logging.ERROR):
        presence.learn({}, {"ann": datetime.now(UTC)})
    assert told == ["again"]
    assert "a bug" in caplog.text


def test_a_listener_may_call_whoever_tells_and_may_end_itself() -> None:
    """With a lock held meanwhile, the first call would never return."""
    listeners, told = Listeners[[str]](), list[str]()

    def once(what: str) -> None:
        told.append(what)
        forget()
        listeners.listen(lambda what: told.append(f"later: {what}"))

    forget = listeners.listen(once)
    listeners.listen(told.append)
    tells = threading.Thread(target=listeners.tell, args=("first",), daemon=True)
    tells.start()
    tells.join(SECONDS)
    assert told == ["first", "first"], "who comes while others are told hears of the next change"
    listeners.tell("second")
    assert told[2:] == ["second", "later: second"]
    assert len(listeners) == 2
