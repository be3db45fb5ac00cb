"""The linters of `make lint`, beside the other tests."""

import re
import shlex
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
LINTERS = re.findall(r"^\t@\$\(BIN\)/(.+)$", RECIPE, re.MULTILINE)


@pytest.mark.timeout(1800)  # mypy without its cache, on a machine that is busy
@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_of_make_lint_finds_nothing(linter: str) -> None:
    completed = subprocess.run(
        shlex.split(f"{Path(sys.executable).parent}/{linter}"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout


def test_make_lint_runs_formatting_lint_types_and_import_rules() -> None:
    assert [linter.split(maxsplit=1)[0] for linter in LINTERS] == ["ruff", "ruff", "mypy", "lint-imports"]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types count, too; a package may import its own files."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*configured["root_packages"], cache_dir=None)
    imports = {
        module: {
            other for other in graph.find_modules_directly_imported_by(module) if not other.startswith(f"{module}.")
        }
        for module in graph.modules
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the files of a circle
