"""The notebooks of the documents: what they import, how short the first one is, and that each runs."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

import fedpareto
from fedpareto.processes.forked import completed
from tests.paths import DOCS

NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
FIRST = DOCS / "notebooks/a-first-federation.ipynb"
# What the outputs of a notebook have, by their order: what its text says of them.
SHOWN: dict[str, dict[int, tuple[str, ...]]] = {
    "a-first-federation": {0: ("How each member fares", "All three members gained")},
    "your-pytorch-code": {0: ("How each member fares",), 1: ("'accuracy': ",), 2: ("'accuracy': ",)},
    "fairness-and-attack": {0: ("fedavg", "fedmgda+"), 1: ("fedavg", "fedmgda+"), 2: ("True",)},
}
# Runs cells as a kernel does: where an event loop runs, each from a file of its own, the last value shown.
KERNEL = """
import ast, asyncio, html, json, linecache, sys
from types import ModuleType

program = sys.modules["__main__"] = ModuleType("__main__")
program.__builtins__ = __builtins__

async def run(cells):
    for number, text in enumerate(cells):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        *body, last = ast.parse(text).body
        if not isinstance(last, ast.Expr):
            body.append(last)
        exec(compile(ast.Module(body, []), name, "exec"), vars(program))
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), name, "eval"), vars(program))
            picture = getattr(shown, "_repr_html_", lambda: None)()
            print(json.dumps(html.unescape(picture) if picture else repr(shown)))

asyncio.run(run(json.load(sys.stdin)))
"""


def cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_first_notebook_needs_at_most_twelve_lines_to_a_trained_model_and_its_picture() -> None:
    lines = [line for line in cells(FIRST)[0].splitlines() if line.strip()]
    assert len(lines) <= 12
    assert lines[-1] == "history"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_no_output_and_uses_public_names(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    names = {
        node.attr
        for text in cells(path)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fedpareto"
    }
    assert names <= set(fedpareto.__all__)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_of_a_notebook_runs_and_shows_what_the_text_says(path: Path, tmp_path: Path) -> None:
    done = completed(["-c", KERNEL], cwd=tmp_path, text=json.dumps(cells(path)), timeout=1100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    shown: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    for at, words in SHOWN[path.stem].items():
        assert [word for word in words if word not in shown[at]] == [], shown[at]
    assert os.listdir(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_of_a_notebook_runs_in_jupyter(path: Path) -> None:
    """Where Jupyter's packages are installed; no installation of ours brings them."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=280).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert [word for word in SHOWN[path.stem][0] if word not in pages] == []
    assert not [output for output in outputs if output.output_type in ("error", "stream")]
