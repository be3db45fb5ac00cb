"""An owner's own modules: `--code` finds them, and no module takes the place of another one unnoticed."""

import multiprocessing
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from federation.tasks import TaskError, task
from fedpareto import code_path
from fedpareto.processes.process_federation import ProcessFederation
from tests import harness
from tests.command_lines import failure
from tests.paths import ROOT

TASK = "from federation.tasks.digits import Digits\n\n\nclass Own(Digits):\n    ...\n"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a task, and with modules whose names are those of our packages."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(code_path.VARIABLE, "")  # so that it is as before when the test is over
    directory = tmp_path / "code"
    for package in ("storage", "verification"):
        (directory / package).mkdir(parents=True)
        (directory / package / "__init__.py").write_text("raise SystemExit('this is not our package')\n")
    (directory / "own_task.py").write_text(TASK)
    (directory / "worker.py").write_text(TASK)
    (directory / "data").mkdir()  # holds no code
    return directory


def python(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command, env = [sys.executable, "-P", *arguments], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def test_the_command_ends_when_other_packages_hide_its_own_and_names_both_paths(code: Path) -> None:
    done = python("-m", "fedpareto", "--help", PYTHONPATH=str(code))
    assert done.returncode == 2
    assert done.stdout == ""
    for name, file in (("storage", "storage"), ("verification", "verification"), ("worker", "worker.py")):
        assert f"  {code / file} hides {ROOT / name}\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--code DIR" in done.stderr


def test_a_directory_without_code_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "coordinator" / "admin").mkdir(parents=True)
    done = python("-m", "fedpareto", "--version", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", [["-c", "import fedpareto"], ["beside.py"]], ids=["notebook", "script"])
def test_importing_the_package_beside_a_module_that_hides_ours_names_both_paths_and_what_to_do(
    code: Path, way: list[str]
) -> None:
    (code / "beside.py").write_text("from fedpareto import Task\n")
    done = harness.python(*way, code=1, cwd=code)
    for name, file in (("storage", "storage"), ("worker", "worker.py")):
        assert f"  {code / file} hides {ROOT / name}\n" in done.stderr
    assert "ImportError: fedpareto: Python would import other packages" in done.stderr
    assert "Rename them" in done.stderr


def test_neither_a_home_beside_a_notebook_nor_a_module_beside_the_command_is_in_the_way(
    code: Path, tmp_path: Path
) -> None:
    (tmp_path / "coordinator" / "admin").mkdir(parents=True)
    harness.python("-c", "import fedpareto; fedpareto.Task", code=0, cwd=tmp_path)
    harness.python("-m", "fedpareto", "--version", code=0, cwd=code)


@pytest.mark.full
def test_a_started_command_finds_the_owners_task_and_our_packages_whatever_lies_about(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code)  # where `python -m` would look first
    code_path.append([code])
    with ProcessFederation(tmp_path) as federation:
        federation.forks = False
        arguments = ["-m", "fedpareto", "data", "show", "own_task:Own", "--clients", "2"]
        command = federation.spawn("command", arguments)
        assert command.popen.wait(120) == 0
    said = command.text
    assert "2 clients, 1,797 samples" in said
    assert f"warning: {code / 'storage'} is hidden: `import storage` gives {ROOT / 'storage'}." in said
    assert f"warning: {code / 'worker.py'} is hidden: `import worker` gives {ROOT / 'worker'}." in said
    assert "own_task.py" not in said
    assert f"{code / 'data'} " not in said


@pytest.mark.full
def test_processes_of_an_experiment_find_the_modules_too(code: Path) -> None:
    code_path.append([code])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        files = pool.map(_file_of, ["own_task", "storage", "worker"])
    assert files == [str(code / "own_task.py"), str(ROOT / "storage/__init__.py"), str(ROOT / "worker/__init__.py")]


def _file_of(module: str) -> str | None:
    return import_module(module).__file__


def test_a_task_whose_module_is_hidden_is_refused_with_both_paths(code: Path) -> None:
    code_path.append([code])
    with pytest.raises(TaskError) as caught:
        task("worker:Own")
    assert str(ROOT / "worker/__init__.py") in str(caught.value)
    assert f"it hides {code / 'worker.py'}: rename that module" in str(caught.value)


def test_a_directory_of_code_that_is_not_there_is_bad_usage(code: Path) -> None:
    result = failure("data", "show", "digits", "--code", str(code / "missing"))
    assert result.message == f"--code: {code / 'missing'} is not a directory"
    assert result.code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "import not_there\n",
            "importing MODULE failed: ModuleNotFoundError: No module named 'not_there'\n  FILE, line 1",
        ),
        ("x = (\n", "importing MODULE failed: SyntaxError: '(' was never closed (MODULE.py, line 1)\n  FILE, line 1"),
        (
            TASK.replace("...", "def __init__(self):\n        self.size = sise"),
            "making MODULE:Own without arguments failed: NameError: name 'sise' is not defined\n"
            "  FILE, line 6, in __init__\n    self.size = sise",
        ),
    ],
    ids=["missing import", "syntax", "constructor"],
)
def test_an_error_in_the_code_of_a_task_is_three_lines_with_file_and_line(
    code: Path, request: pytest.FixtureRequest, text: str, expected: str
) -> None:
    name = "broken_" + request.node.callspec.id.replace(" ", "_").replace("-", "_")
    (code / f"{name}.py").write_text(text)
    code_path.append([code])
    with pytest.raises(TaskError) as caught:
        task(f"{name}:Own")
    assert len(str(caught.value).splitlines()) == 3
    assert expected.replace("MODULE", name).replace("FILE", str(code / f"{name}.py")) in str(caught.value)


def test_a_task_that_is_nowhere_is_refused_with_what_to_do() -> None:
    with pytest.raises(TaskError, match=r"there is no module 'nowhere_at_all': .* --code DIR or in FEDPARETO_CODE"):
        task("nowhere_at_all:Own")


def test_a_coordinator_takes_the_current_directory_off_the_path_unless_it_is_named(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = [place for place in sys.path if place != str(tmp_path)]
    sys.path[:] = ["", str(tmp_path), *before]
    code_path.leave_current_directory()
    assert sys.path == [place for place in before if place]
    code_path.append([tmp_path])
    code_path.leave_current_directory()
    assert sys.path[-1] == str(tmp_path)


def test_a_file_beside_the_one_that_is_verified_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('this is not the library')\n")
    done = harness.python("-m", "fedpareto", "verify", "run.fedpareto", code=1, cwd=tmp_path)
    assert "cannot read run.fedpareto" in done.stderr or "No such file" in done.stderr
