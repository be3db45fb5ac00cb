"""What the tests cost: `--costs` prints the CPU seconds of each file and of the dearest tests, and bounds their sum.

CPU seconds are user and system time of pytest and of every process below it. A shared fixture counts to the test that
makes it and to the one that it ends with. The CPU time of child processes may count to a test that ends a little later.
A busy or slower machine needs more CPU seconds for the same work, by a half and more. So each pytest process also
measures, every few seconds, a fixed piece of work: the `yardstick`. If it takes longer than `YARDSTICK`, the sum is
divided by how many times longer, before it is compared. This corrects a part of the difference alone, so `--costs`
fails at `LIMIT`, above `BUDGET`. A faster machine is not held to less.
"""

import hashlib
import json
import os
import pickle
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pytest

BUDGET = 480  # CPU seconds of `make test`
LIMIT = 720  # CPU seconds above which `--costs` fails: 1.5 times BUDGET, see tests/README.md
YARDSTICK = 0.0085  # CPU seconds of `yardstick` where BUDGET was set: two cores that run nothing but `make test`
INTERVAL = 10.0  # seconds between two measurements of the yardstick
DEAREST = 25
LOOK = 0.5  # seconds between two looks at other processes: to find them takes 2 ms where 75 threads may have made them
RARE_LOOK = 2.0  # beside other processes of pytest-xdist: more of them would cost 4 CPU seconds in all
SERVER = pytest.StashKey[float]()


def cpu_seconds(pid: int | None = None) -> float:
    """CPU time of a process (this one) and of all below it, those that have ended included, in seconds.

    Linux lists the children of each thread; reading these lists takes a seventh of the time that psutil takes.
    """
    ticks, processes = 0, [pid or os.getpid()]
    while processes:
        directory = Path("/proc", str(processes.pop()))
        with suppress(OSError):  # it ended meanwhile
            ticks += sum(map(int, (directory / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for thread in (directory / "task").iterdir():
                processes += map(int, (thread / "children").read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def yardstick() -> float:
    """CPU time of a fixed piece of work, of the kinds that tests do, in seconds."""
    start = time.thread_time()
    for _ in range(4):
        document = {f"client-{i}": {"losses": [i / 7, i / 3], "digest": f"{i:064x}"} for i in range(400)}
        document = json.loads(json.dumps(document))
        hashlib.sha256(pickle.dumps(sorted(document.items(), key=lambda item: item[1]["digest"]))).hexdigest()
        compile("def function(x):\n    return [y for y in range(10) if y > x]\n" * 20, "yardstick", "exec")
    return time.thread_time() - start


def over_budget(spent: float, samples: list[float]) -> str | None:
    """What to print when the tests cost too much; None if they do not.

    Args:
        spent: CPU seconds of the run.
        samples: CPU seconds of the yardstick during the run.
    """
    slowness = max(1.0, median(samples or [YARDSTICK]) / YARDSTICK)
    if spent / slowness <= LIMIT:
        return None
    return (
        f"The tests cost {spent / slowness:.0f} CPU seconds ({spent:.0f} here, where work takes {slowness:.2f} times "
        f"as long as where the budget was set); {BUDGET} is the budget, and {LIMIT} the limit. See tests/README.md, "
        "What tests may cost."
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", action="store_true", help=f"print the CPU seconds of each test file; fail above {LIMIT} in all"
    )


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
        self.before = 0.0
        self.others = 0.0
        self.looked = float("-inf")
        self.pause = RARE_LOOK if hasattr(config, "workerinput") else LOOK
        self.samples: list[float] = []
        self.sampled = float("-inf")

    def spent(self) -> float:
        """CPU seconds of this process now, and of its child processes when they were last measured."""
        if time.monotonic() > self.looked + self.pause:
            self.looked = time.monotonic()
            self.others = cpu_seconds() - time.process_time()
        return time.process_time() + self.others

    def pytest_collection_finish(self) -> None:
        self.before = self.spent()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        if time.monotonic() > self.sampled + INTERVAL:
            self.sampled = time.monotonic()
            self.samples.append(yardstick())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            before, self.before = self.before, self.spent()
            report.user_properties.append(("cpu_seconds", self.before - before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        measured: dict[str, Any] = dict(report.user_properties)
        self.tests[report.nodeid] += measured.get("cpu_seconds", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        server = self.config.stash.get(SERVER, 0.0)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = (cpu_seconds(), server, self.samples)
            return
        # Processes of xdist tell their own.
        self.processes.append(time.process_time() if self.processes else cpu_seconds())
        self.server = max(self.server, server)
        if self.excess() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        spent, server, samples = getattr(node, "workeroutput", {}).get("costs", (0.0, 0.0, []))
        self.processes.append(spent)
        self.server = max(self.server, server)
        self.samples += samples

    def excess(self) -> str | None:
        """What to print when `make test` costs too much; None otherwise, and where long tests run too."""
        if self.config.option.markexpr != "not full":
            return None
        return over_budget(sum(self.processes) + self.server, self.samples)

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
        milliseconds = 1000 * median(self.samples or [YARDSTICK])
        terminalreporter.write_line(
            f"{milliseconds:7.1f}  ms for the yardstick, {1000 * YARDSTICK} where the budget was set"
        )
        if excess := self.excess():
            terminalreporter.write_line(excess, red=True)
