"""`--deadline SECONDS` ends the tests after that time: those that have not ended are skipped, and listed."""

import signal
from collections.abc import Generator
from types import FrameType

import pytest

REASON = "left out, the time is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deadline", type=float, metavar="SECONDS", help="skip and list what has not ended after that time"
    )


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("--deadline")
    if seconds is not None:
        config.pluginmanager.register(Deadline(seconds))


class Deadline:
    """Ends the tests of this process in time, and lists those that it or another process has left out.

    Args:
        seconds: from now on; a test that runs then is interrupted by an alarm of this process.
    """

    def __init__(self, seconds: float) -> None:
        self.over = False
        self.interruptible = False
        self.interrupted = False
        self.skipped: list[str] = []
        signal.signal(signal.SIGALRM, self.interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        self.over = True
        if self.interruptible:
            self.interrupted = True
            pytest.skip(REASON)

    def _interruptible(self) -> Generator[None, object, object]:
        if self.over:
            pytest.skip(REASON)
        self.interruptible = True
        try:
            return (yield)
        except Exception:
            if self.interrupted:  # code that guards against its owner's exits has made an error of the interruption
                pytest.skip(REASON)
            raise
        finally:
            self.interruptible = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._interruptible())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._interruptible())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        except Exception:
            if not self.interrupted:
                raise
            return None  # the interrupted test has left its fixtures half way, such as a server that is stopped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and REASON in str(report.longrepr):
            self.skipped.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self.skipped:
            terminalreporter.write_line(f"Left out: {test}")
