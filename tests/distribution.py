"""Test files dealt to the processes of pytest-xdist; the death of a process costs the test that it ran, and no other.

With the scheduler of pytest-xdist the run hangs after a death: it deals the tests that were done once more, and waits
for them.
"""

from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Files that move with an optimiser of PyTorch, whose first step in a process imports its compiler: 1.4 CPU seconds, or
# 4 where Python has not compiled that yet. They are dealt to one process.
OPTIMIZERS = frozenset(
    {
        "tests/federation/aggregation/test_server_optimizers.py",
        "tests/research/test_leakage.py",
        "tests/research/test_sum_readers.py",
        "tests/federation/tasks/test_celeba.py",
        "tests/federation/tasks/test_multi_regression.py",
        "tests/federation/tasks/test_qm9.py",
        "tests/federation/training/test_local_training.py",
        "tests/federation/training/test_options.py",
    }
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> "Files | None":
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


# Files that load scipy.stats, which takes 0.5 CPU seconds.
STATISTICS = frozenset(
    {
        "tests/federation/secure/test_fields.py",
        "tests/federation/secure/test_masks.py",
        "tests/federation/secure/test_what_leaks.py",
        "tests/federation/training/test_private_training.py",
        "tests/verification/test_chosen_noise.py",
    }
)


class Files(LoadFileScheduling):  # type: ignore[misc]
    """Deals whole files, and the rest of a file whose process has died to another one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "optimizers" if file in OPTIMIZERS else "statistics" if file in STATISTICS else file

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
