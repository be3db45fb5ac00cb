"""Time-outs of tests: one thread watches all tests of a process, where pytest-timeout starts a thread for each.

That takes 0.4 ms of CPU time for a test, and `make test` has 6,800 of them.
"""

import math
import threading
import time
from typing import Any

import pytest
from pytest_timeout import timeout_timer

SECONDS = 1.0  # between two looks: a test ends by this time later than its time-out


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Timeouts())


class Timeouts:
    """Ends the process, as pytest-timeout does, when its test takes longer than it may."""

    def __init__(self) -> None:
        self.end = math.inf
        self.test: tuple[pytest.Item, Any] | None = None
        threading.Thread(target=self._watch, name="timeouts", daemon=True).start()

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        if settings.method != "thread":
            return None
        self.test = item, settings
        self.end = time.monotonic() + settings.timeout
        return True

    def pytest_timeout_cancel_timer(self) -> None:
        self.end = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(SECONDS)
            if time.monotonic() > self.end and self.test:
                self.end = math.inf  # once: it returns where the test is debugged
                timeout_timer(*self.test)
