"""The notebooks of the documents: what they import, how short the first one is, and that each runs."""

import ast
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedpareto
from fedpareto.processes.forked import completed
from tests.paths import DOCS, PROGRAMS, ROOT
from tests.waiting import wait_for

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


# --- with Jupyter

# Enters the block and stays in it, as a cell that runs for long.
BLOCK = """
import json, os, time
from pathlib import Path
import fedpareto

with fedpareto.local(members=2, task="digits") as federation:
    Path({told!r}).write_text(json.dumps([os.getpid(), str(federation.home)]) + "\\n")
    time.sleep(3600)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def jupyter(*words: str | Path, directory: Path) -> "subprocess.Popen[str]":
    """Starts the program with Jupyter, whose temporary files, settings and history are in a directory."""
    program = ROOT / ".venv-jupyter" / "bin" / "python"
    if not program.exists():
        pytest.skip("Jupyter is not installed: `make test-full` installs it into .venv-jupyter")
    for name in ("temporary", "home"):
        (directory / name).mkdir()
    own = {"TMPDIR": str(directory / "temporary"), "HOME": str(directory / "home"), "OMP_NUM_THREADS": "1"}
    command = [program, PROGRAMS / "jupyter_kernel.py", *words]
    return subprocess.Popen(command, cwd=directory, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True)


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_of_a_notebook_runs_in_a_kernel_of_jupyter(path: Path, place: Path) -> None:
    with jupyter("run", path, directory=place) as running:
        printed, _ = running.communicate(timeout=290)
    assert running.returncode == 0
    outputs = json.loads(printed)
    pages = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    assert [word for word in SHOWN[path.stem][0] if word not in pages] == []
    assert not [output for output in outputs if output["output_type"] in ("error", "stream")]
    wait_for(lambda: not list((place / "temporary").glob("fedpareto-*")), "the end of its files")


@pytest.mark.full
def test_after_a_kernel_of_jupyter_is_killed_neither_processes_nor_files_are_left(place: Path) -> None:
    cell, told = place / "cell.py", place / "told"
    cell.write_text(BLOCK.format(told=str(told)))
    with jupyter("hold", cell, directory=place) as running:
        try:
            wait_for(
                lambda: running.poll() is not None or (told.exists() and told.read_text().endswith("\n")),
                "the federation of the kernel",
                240,
            )
            assert running.poll() is None
            kernel, home = json.loads(told.read_text())
            processes = psutil.Process(kernel).children(recursive=True)
            assert len(processes) > 3  # a coordinator, two workers, and what forks them
            assert Path(home).exists()
            os.kill(kernel, signal.SIGKILL)
            wait_for(lambda: not any(process.is_running() for process in processes), "the end of the processes")
            wait_for(lambda: not list((place / "temporary").glob("fedpareto-*")), "the end of the files")
        finally:
            running.kill()
