"""What the tests cost: `--costs` prints the CPU seconds of each file, and of the dearest tests.

CPU seconds are user and system time of pytest and of every process below it, so they hardly depend on what else the
machine does. A shared fixture counts to the test that makes it and to the one that it ends with.
"""

import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import psutil
import pytest

DEAREST = 25
BEFORE = pytest.StashKey[float]()
SERVER = pytest.StashKey[float]()


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process (this one) and of all below it, those that have ended included, in seconds."""
    process, spent = psutil.Process(pid), 0.0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            spent += sum(one.cpu_times()[:4])
    return spent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print the CPU seconds of each test file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(config), "costs-report")


class Costs:
    """Measures in every process that runs tests; adds up in the one that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: Counter[str] = Counter()
        self.processes: list[float] = []
        self.server = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[BEFORE] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash[BEFORE]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += dict(report.user_properties).get("cpu_seconds", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        server = self.config.stash.get(SERVER, 0.0)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = (cpu_seconds(), server)
        else:
            # Processes of xdist tell their own.
            self.processes.append(time.process_time() if self.processes else cpu_seconds())
            self.server = max(self.server, server)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        spent, server = getattr(node, "workeroutput", {}).get("costs", (0.0, 0.0))
        self.processes.append(spent)
        self.server = max(self.server, server)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        spent = sum(self.processes)
        terminalreporter.section("CPU seconds")
        for test, seconds in self.tests.most_common(DEAREST):
            terminalreporter.write_line(f"{seconds:7.1f}  {test}")
        terminalreporter.write_line("")
        for file, seconds in files.most_common():
            terminalreporter.write_line(f"{seconds:7.1f}  {file}")
        terminalreporter.write_line(f"{spent - files.total():7.1f}  collection and start")
        terminalreporter.write_line(f"{self.server:7.1f}  PostgreSQL")
        terminalreporter.write_line(f"{spent + self.server:7.1f}  in all")
