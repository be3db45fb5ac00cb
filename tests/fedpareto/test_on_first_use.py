import ast
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fedpareto.cli.failure import CommandFailure, failing
from fedpareto.on_first_use import on_first_use
from tests.paths import ROOT

HANDED_TO = {"failing", "member_command", "partial"}  # functions that take an exception or a function that waits

COMMAND = """
from fedpareto.on_first_use import on_first_use

with on_first_use():
    import {0}
    from {0} import Trouble, inner, twice
    from {0}.inner import depth
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A module that imports a package, and a module in it, when it uses them."""
    package = f"work_{request.node.name.partition('[')[0][:30]}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(
        "class Trouble(Exception): pass\ndef twice(number): return 2 * number\n"
    )
    (tmp_path / package / "inner.py").write_text("def depth(): return 1\n")
    (tmp_path / f"{package}_command.py").write_text(COMMAND.format(package))
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = import_module(f"{package}_command")
    module.work = package
    yield module
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def test_an_import_is_made_when_a_name_of_it_is_called_or_read(command: Any) -> None:
    assert command.work not in sys.modules
    assert command.twice(4) == 8
    assert command.work in sys.modules
    assert f"{command.work}.inner" not in sys.modules
    assert command.inner.depth() == command.depth() == 1
    assert partial(command.twice, 4)() == 8
    assert vars(command)[command.work].twice(1) == 2


def test_an_exception_that_waits_can_end_a_command(command: Any) -> None:
    with failing(command.Trouble):
        pass
    assert command.work not in sys.modules
    with pytest.raises(CommandFailure, match="no good"), failing(command.Trouble, OSError):
        raise command.Trouble("no good")
    with pytest.raises(ValueError, match="another"), failing(command.Trouble):
        raise ValueError("another")


def test_imports_after_the_block_and_of_other_modules_do_not_wait(command: Any) -> None:
    names: dict[str, Any] = {"__name__": "elsewhere"}
    with on_first_use():
        exec(f"import {command.work}", names)
    assert command.work in sys.modules
    assert names[command.work] is sys.modules[command.work]


def test_a_module_that_does_not_exist_is_named_when_it_is_used() -> None:
    with on_first_use():
        from fedpareto import no_such_module
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        no_such_module.name()


def waiting_files() -> list[Path]:
    return [path for path in sorted((ROOT / "fedpareto").rglob("*.py")) if "\nwith on_first_use():" in path.read_text()]


def bound(function: ast.FunctionDef | ast.Lambda) -> set[str]:
    """The names of a function's parameters and variables."""
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    inside = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    return arguments | {node.id for node in inside if isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("path", waiting_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_waits_is_used_as_it_can_be_used(path: Path) -> None:
    """Inside functions; called, or asked for an attribute, or handed on to be called or caught."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.With)]
    names = {
        (alias.asname or alias.name).partition(".")[0]: getattr(node, "module", alias.name)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    wrong = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names):
            continue
        above = [parent := parents[node]]
        while parent in parents:
            above.append(parent := parents[parent])
        functions = [each for each in above if isinstance(each, ast.FunctionDef | ast.Lambda)]
        if any(node.id in bound(function) for function in functions):
            continue  # a variable of this name
        use = above[0]
        handed = isinstance(use, ast.Call) and isinstance(use.func, ast.Name) and use.func.id in HANDED_TO
        called = isinstance(use, ast.Attribute) or (isinstance(use, ast.Call) and use.func is node)
        if not (handed or (called and functions)):
            wrong.append(f"{path.name}:{node.lineno}: {node.id}")
    assert wrong == []
