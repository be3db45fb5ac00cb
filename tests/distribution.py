"""Test files dealt to the processes of pytest-xdist; the death of a process costs the test that it ran, and no other.

With the scheduler of pytest-xdist the run hangs after a death: it deals the tests that were done once more, and waits
for them.
"""

import fcntl
import sys
from collections.abc import Generator
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Files that load what takes long, and are dealt to one process: the compiler of PyTorch, which the first step of one of
# its optimisers imports, and Opacus too (1.4 CPU seconds, or 4 where Python has not compiled that yet); cvxpy (1.2);
# dp-accounting and scipy.stats (0.5).
SLOW = frozenset(
    {
        "tests/federation/aggregation/rules/test_objective_rules.py",
        "tests/federation/aggregation/test_preference.py",
        "tests/federation/aggregation/test_qp.py",
        "tests/federation/aggregation/test_server_optimizers.py",
        "tests/coordinator/rounds/runs/test_prospects.py",
        "tests/research/test_leakage.py",
        "tests/federation/secure/test_fields.py",
        "tests/federation/secure/test_masks.py",
        "tests/research/test_sum_readers.py",
        "tests/federation/secure/test_what_leaks.py",
        "tests/federation/tasks/test_celeba.py",
        "tests/federation/tasks/test_multi_regression.py",
        "tests/federation/tasks/test_qm9.py",
        "tests/federation/training/test_local_training.py",
        "tests/federation/training/test_options.py",
        "tests/federation/training/test_private_training.py",
        "tests/fedpareto/cli/test_privacy_plan.py",
        "tests/verification/test_chosen_noise.py",
        "tests/worker/site/test_privacy.py",
    }
)
LAST = Path(__file__).parent / "worker" / "__init__.py"  # of the room whose tests are collected last


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a new clone, one process collects first: it compiles the modules, which the others then load.

    Otherwise each of the processes compiles all of them, at 9 CPU seconds.
    """
    compiled = sys.dont_write_bytecode or Path(cache_from_source(str(LAST))).exists()
    if compiled or not hasattr(session.config, "workerinput"):
        return (yield)
    with Path(__file__).open() as turn:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another one collects
            fcntl.flock(turn, fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> "Files | None":
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


class Files(LoadFileScheduling):  # type: ignore[misc]
    """Deals whole files, and the rest of a file whose process has died to another one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "slow" if file in SLOW else file

    def remove_node(self, node: WorkerController) -> Any:
        """The test that the process ran when it died, if it did; the tests after it are dealt again."""
        units = self.assigned_work.pop(node).values()
        died, *rest = [test for unit in units for test, done in unit.items() if not done] or [None]
        for test in rest:
            self.workqueue.setdefault(self._split_scope(test), {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return died

    def _reschedule(self, node: WorkerController) -> None:
        """Deals until the process has more than two tests: it runs none without knowing the next one."""
        while node in self.registered_collections and not node.shutting_down and self._pending(node) <= 2:
            super()._reschedule(node)

    def _pending(self, node: WorkerController) -> Any:
        return self._pending_of(self.assigned_work[node])
