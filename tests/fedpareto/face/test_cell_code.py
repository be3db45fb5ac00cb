"""The class of a notebook's cell as a module that other processes import, without pickling an object."""

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedpareto
from federation.tasks.digits import Digits
from fedpareto.face.cell_code import importable
from tests.paths import ROOT

HELPERS = """
import math as m
from collections import Counter
import fedpareto
import torch
from torch import nn

WIDTH, NAMES = 8, {"a": [1, 2.5]}
lock = __import__("threading").Lock()

def layers(x=WIDTH):
    return [x, other] if x < 0 else Part()

class Part:
    def width(self):
        return m.floor(WIDTH)

def other():
    return layers()
"""
CELL = """
7 + 7

@fedpareto.option if False else (lambda kind: kind)
class Mine(fedpareto.Task):
    objectives = tuple(NAMES)

    def model(self):
        WIDTH = 3
        return nn.Linear(layers().width(), Counter("aa")["a"])

unused = lock
"""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Runs cells in a fresh program, as a notebook's kernel does; returns the program's names."""
    program = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    names: list[str] = []

    def run(*texts: str) -> dict[str, Any]:
        for text in texts:
            name = f"<cell {len(names)}>"
            names.append(name)
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            exec(compile(text, name, "exec"), vars(program))
        return vars(program)

    yield run
    for name in names:
        linecache.cache.pop(name, None)


def imported(name: str, directory: Path) -> Any:
    """The class of a name, from a module in a directory."""
    module, _, kind = name.partition(":")
    found = spec_from_file_location(module, directory / f"{module}.py")
    assert found is not None
    assert found.loader is not None
    made = module_from_spec(found)
    found.loader.exec_module(made)
    return getattr(made, kind)


def test_a_class_of_a_cell_brings_what_its_code_uses_and_nothing_else(
    cells: Callable[..., Any], tmp_path: Path
) -> None:
    program = cells(HELPERS, CELL)
    name, directory = importable(program["Mine"], tmp_path / "code")
    again = imported(name, directory)
    assert (again.objectives, again().model().in_features, again().model().out_features) == (("a",), 8, 2)
    text = next(directory.glob("*.py")).read_text()
    assert "lock" not in text
    assert "14" not in text
    assert os.stat(directory).st_mode & 0o77 == 0
    assert importable(program["Mine"], tmp_path / "code")[0] == name, "the same source has the same name"


def test_a_class_that_was_run_again_is_the_newest_one(cells: Callable[..., Any], tmp_path: Path) -> None:
    first = cells(HELPERS, CELL)["Mine"]
    second = cells(CELL.replace('Counter("aa")', 'Counter("aaa")'))["Mine"]
    with pytest.raises(fedpareto.Error, match="give it again once you have changed it"):
        importable(first, tmp_path)
    assert imported(*importable(second, tmp_path))().model().out_features == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lock", "Mine uses lock, of the type lock, which other processes cannot have"),
        ("part.width()", "Mine uses part, of the type Part"),
        ("torch.ones(2) + ones", "Mine uses ones, of the type Tensor"),
    ],
)
def test_an_object_that_source_cannot_make_is_named(
    cells: Callable[..., Any], tmp_path: Path, line: str, says: str
) -> None:
    program = cells(HELPERS + "part = Part()\nones = torch.ones(2)\n", CELL.replace("WIDTH = 3", line))
    with pytest.raises(fedpareto.Error, match=says):
        importable(program["Mine"], tmp_path)


def test_a_class_whose_source_is_not_known_is_refused(cells: Callable[..., Any], tmp_path: Path) -> None:
    program = cells("import fedpareto\nexec('class Mine(fedpareto.Task):\\n  def model(self): pass\\n')")
    program["Mine"].__module__ = "__main__"
    with pytest.raises(fedpareto.Error, match="the source of Mine is not known"):
        importable(program["Mine"], tmp_path)


def test_a_class_of_a_module_is_imported_from_its_directory(tmp_path: Path) -> None:
    assert importable(Digits, tmp_path) == ("federation.tasks.digits:Digits", ROOT)
    assert list(tmp_path.iterdir()) == []
