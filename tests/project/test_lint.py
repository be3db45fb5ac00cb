"""The linters of `make lint`, beside the other tests."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.project.scene import ended

RECIPE = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
LINTERS = re.findall(r"^\t@\$\(BIN\)/(.+)$", RECIPE, re.MULTILINE)


@pytest.mark.timeout(1800)  # mypy without its cache, on a machine that is busy
@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_of_make_lint_finds_nothing(linter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clone of continuous integration is used once, so mypy need not write a cache (1.6 of its 18 CPU seconds).
    if os.environ.get("CI") and not (ROOT / ".mypy_cache").exists():
        monkeypatch.setenv("MYPY_CACHE_DIR", os.devnull)
    ended(*shlex.split(f"{Path(sys.executable).parent}/{linter}"), code=0)


def test_make_lint_runs_formatting_lint_types_and_import_rules() -> None:
    assert [linter.split(maxsplit=1)[0] for linter in LINTERS] == ["ruff", "ruff", "mypy", "lint-imports"]


def test_no_test_file_imports_another_one() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^from tests\.(\S*\.)?test_\w+ import", path.read_text(), re.MULTILINE), path
