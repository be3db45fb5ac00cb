"""`make test-changed`: which test files concern a change, and an end in time."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import python
from tests.paths import ROOT
from tests.project.scene import git, tool

changed_tests = tool("changed_tests")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project in Git; HEAD is on a branch that begins at `main`."""
    texts = {
        "shop/__init__.py": "",
        "shop/prices.py": "",
        "shop/orders.py": "import shop.prices",
        "tests/customers.py": "from shop import orders",
        "tests/markets/crowd.py": "from tests.customers import buy",
        "tests/test_prices.py": "from shop.prices import price",
        "tests/test_orders.py": "def test() -> None:\n    from shop import orders",
        "tests/test_customers.py": "import tests.customers",
        "tests/test_markets.py": "from tests.markets.crowd import crowd",
        "tests/test_other.py": "import os",
        "tests/peers/test_peers.py": "from shop import orders",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "switch", "--quiet", "--create", "branch")
    return tmp_path


def test_test_files_that_changed_come_before_those_that_import_a_change_and_those_that_import_it_through_helpers(
    tree: Path,
) -> None:
    changed = ["README.md", "shop/orders.py", "tests/test_other.py"]
    assert changed_tests.concerned_files(changed, tree) == [
        "tests/test_other.py",
        "tests/test_orders.py",
        "tests/test_customers.py",
        "tests/test_markets.py",
    ]
    assert changed_tests.concerned_files(["shop/prices.py"], tree) == ["tests/test_prices.py"]
    assert changed_tests.concerned_files(["tests/markets/crowd.py"], tree) == ["tests/test_markets.py"]
    assert changed_tests.concerned_files(["README.md"], tree) == []


def test_changed_is_what_differs_from_the_merge_base(tree: Path) -> None:
    assert changed_tests.changed_files("main", tree) == []
    (tree / "shop/prices.py").write_text("price = 1")
    git(tree, "commit", "--quiet", "--all", "--message", "committed")
    (tree / "shop/orders.py").write_text("orders = 1")
    (tree / "tests/test_new.py").write_text("")
    git(tree, "branch", "other", "main")
    assert changed_tests.changed_files("other", tree) == ["shop/orders.py", "shop/prices.py", "tests/test_new.py"]


def test_without_a_merge_base_nothing_is_known_to_have_changed(tree: Path, tmp_path: Path) -> None:
    git(tree, "switch", "--quiet", "--orphan", "unrelated")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "unrelated")
    for base in ("main", "origin/main"):
        assert changed_tests.changed_files(base, tree) is None
    completed = python(ROOT / "tools/changed_tests.py", "--base", "no-such-branch")
    assert completed.stdout == "HEAD and no-such-branch have no merge base here: no long tests run.\n"


def test_the_alarm_of_the_deadline_ends_a_test_and_those_after_it_are_left_out_and_listed(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import pytest, signal\n\ndef test_quick(): pass\n"
        "@pytest.fixture\ndef server():\n    yield\n    raise ValueError('it is stopped')\n"
        "def test_long(server): signal.raise_signal(signal.SIGALRM); raise AssertionError\n"
        "def test_later(): raise AssertionError\n"
    )
    options = ("-c", os.devnull, "--rootdir", ".", "-p", "tests.deadline", "--deadline", "600")
    environment: dict[str, Any] = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    completed = python("-m", "pytest", *options, cwd=tmp_path, **environment)
    assert re.findall("^Left out: (.+)$", completed.stdout, re.MULTILINE) == [
        "test_slow.py::test_long",
        "test_slow.py::test_later",
    ]
    assert "1 passed, 2 skipped" in completed.stdout
