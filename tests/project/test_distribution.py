"""The scheduler of the tests: each test runs once, in the process that has its file, also when a process dies."""

import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from fedpareto.processes import forked
from tests import distribution
from tests.distribution import Files, pytest_collection
from tests.waiting import wait_for

TESTS = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "c.py::1", "c.py::2", "d.py::1"]


class Node:
    """A process that runs a test when it knows the next one, or that there is none."""

    def __init__(self, scheduler: Files) -> None:
        self.scheduler = scheduler
        self.gateway = SimpleNamespace(id="gw")
        self.tests: list[str] = []
        self.shutting_down = False
        scheduler.add_node(self)

    def send_runtest_some(self, indices: list[int]) -> None:
        self.tests += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True

    def run(self) -> str | None:
        """The test that it has run; None when it waits."""
        if len(self.tests) < (1 if self.shutting_down else 2):
            return None
        test = self.tests.pop(0)
        self.scheduler.mark_test_complete(self, TESTS.index(test))
        return test


def scheduler() -> tuple[Files, list[Node]]:
    config = SimpleNamespace(getvalue=lambda name: ["2*popen"], option=SimpleNamespace(loadscopereorder=False))
    files = Files(config, Producer("test", enabled=False))
    nodes = [Node(files), Node(files)]
    for node in nodes:
        files.add_node_collection(node, TESTS)
    files.schedule()
    return files, nodes


def finish(files: Files, nodes: list[Node]) -> list[str]:
    """Runs until all processes wait; the tests that were run."""
    done: list[str] = []
    while ran := [test for node in nodes if (test := node.run())]:
        done += ran
    assert files.tests_finished
    assert all(node.shutting_down and not node.tests for node in nodes)
    return done


def test_each_test_runs_once() -> None:
    files, nodes = scheduler()
    assert nodes[0].tests[:3] == TESTS[:3]
    assert sorted(finish(files, nodes)) == TESTS


def test_a_process_that_dies_costs_the_test_that_it_ran_and_the_others_run_elsewhere() -> None:
    files, (dying, other) = scheduler()
    assert dying.run() == "a.py::1"
    assert files.remove_node(dying) == "a.py::2"
    replacement = Node(files)
    files.add_node_collection(replacement, TESTS)
    files.schedule()
    assert sorted(finish(files, [other, replacement])) == [*TESTS[2:]]


def test_a_process_that_dies_with_the_last_test_leaves_nothing_to_do() -> None:
    files, (dying, other) = scheduler()
    done = finish(files, [dying, other])
    last = done[-1]
    owner = next(node for node, units in files.assigned_work.items() if any(last in unit for unit in units.values()))
    files.assigned_work[owner][last.partition("::")[0]][last] = False  # as if its process had died in it
    assert files.remove_node(owner) == last
    assert files.tests_finished


def test_a_test_that_takes_too_long_ends_its_process_which_shows_where_each_thread_was(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import threading\n\ndef test_in_time():\n    pass\n\ndef test_too_long():\n    threading.Event().wait()\n"
    )
    options = ["-c", "/dev/null", "-p", "tests.timeouts", "--timeout", "0.2", "--timeout-method", "thread"]
    done = forked.completed(["-m", "pytest", "-q", *options, str(tmp_path)])
    assert done.returncode == 1
    assert "Timeout" in done.stdout
    assert "in test_too_long" in done.stdout
    assert "passed" not in done.stdout


def begun(session: Any, collecting: Event) -> tuple[Thread, Event]:
    """A process's turn, in a thread: it sets `collecting` when it collects, until the event that is returned is set."""
    end = Event()

    def collect() -> None:
        hook = pytest_collection(session)
        next(hook)
        collecting.set()
        end.wait()
        with suppress(StopIteration):
            hook.send(None)

    thread = Thread(target=collect, daemon=True)
    thread.start()
    return thread, end


def waiting() -> int:
    """How many wait for the turn, says the kernel."""
    inode = f":{Path(distribution.__file__).stat().st_ino} "
    return sum("->" in line and "FLOCK" in line and inode in line for line in Path("/proc/locks").open())


def test_in_a_new_clone_one_process_compiles_while_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # nothing is compiled there
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    session: Any = SimpleNamespace(config=SimpleNamespace(workerinput={}))
    first, second, third = Event(), Event(), Event()
    threads = [begun(session, first)]
    assert first.wait(60)
    threads += [begun(session, second), begun(session, third)]
    wait_for(lambda: waiting() == 2, "the others to wait")
    assert not second.is_set()
    assert not third.is_set()
    threads[0][1].set()
    assert second.wait(60)  # then both at once
    assert third.wait(60)
    for thread, end in threads:
        end.set()
        thread.join()


def test_modules_that_are_compiled_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    session: Any = SimpleNamespace(config=SimpleNamespace(workerinput={}))
    first, second = Event(), Event()
    threads = [begun(session, first), begun(session, second)]
    assert first.wait(60)
    assert second.wait(60)
    for thread, end in threads:
        end.set()
        thread.join()
