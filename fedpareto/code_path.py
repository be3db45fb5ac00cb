"""The places where Python finds code: this project's packages, and the directories that `--code` names.

A directory of an owner's code goes to the end of Python's path, so that a `storage/` or a `worker.py` in it cannot
take the place of this project's packages. This module imports nothing of the project, because it runs first.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "fedpareto")
VARIABLE = "FEDPARETO_CODE"
ROOT = Path(__file__).resolve().parents[1]  # the directory that holds this project's packages


@dataclass(frozen=True)
class Hidden:
    """A module at `path` that Python does not import, because another one of its name comes first on its path.

    `hidden_by` is the path of the other module, or "Python itself" for a built-in one.
    """

    name: str
    path: str
    hidden_by: str


def hidden_packages() -> list[Hidden]:
    """The packages of this project that Python would import from another directory."""
    hidden = []
    for name in PACKAGES:
        spec = find_spec(name)
        own = ROOT / name
        if (
            spec is None or spec.origin is None
        ):  # a directory without code, such as a coordinator's home, hides no module
            continue
        if own.is_dir() and not _comes_from(spec, own):
            hidden.append(Hidden(name, str(own), _place(spec)))
    return hidden


def hidden_text() -> str:
    """What hides packages of this project, and what to do; empty if nothing does."""
    hidden = hidden_packages()
    if not hidden:
        return ""
    return "\n".join(
        [
            "Python would import other packages in place of fedpareto's own:",
            *(f"  {item.hidden_by} hides {item.path}" for item in hidden),
            "Rename them, take their directory out of PYTHONPATH, or start in another directory. The command finds "
            "code of yours by --code DIR or FEDPARETO_CODE",
        ]
    )


def check_import() -> None:
    """Raises ImportError if packages of this project are hidden; not in the command, whose start says it itself."""
    program = sys.argv[0] if sys.argv else ""
    # `python -m fedpareto` takes the current directory off the path when this package has been imported.
    if program == "-m" or Path(program).name == "fedpareto":
        return
    if hidden := hidden_text():
        raise ImportError(f"fedpareto: {hidden}")


def append(directories: Iterable[Path]) -> list[Hidden]:
    """Appends directories of modules to Python's path, and to the environment for processes that this one starts.

    Returns:
        The modules in them that Python does not import, because another module of the same name comes first.

    Raises:
        NotADirectoryError: one of them is not a directory.
    """
    paths = [Path(os.path.abspath(directory)) for directory in directories]
    for path in paths:
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a directory")
    # Packages of an editable installation are found after everything that is on the path, unless they are on it too.
    sys.path += [str(path) for path in (ROOT, *paths) if str(path) not in sys.path]
    os.environ[VARIABLE] = os.pathsep.join(map(str, paths))
    return [module for path in paths for module in _hidden_modules(path)]


def leave_current_directory() -> None:
    """Takes the current directory off Python's path, where `python -m` puts it, unless `--code` names it too."""
    named = {str(ROOT), *filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))}
    sys.path[:] = [entry for entry in sys.path if entry in named or entry not in ("", os.getcwd())]


def _hidden_modules(directory: Path) -> Iterator[Hidden]:
    for name in _modules(directory):
        if PathFinder.find_spec(name, [str(directory)]) is None:
            continue
        spec = find_spec(name)
        if spec is not None and not _comes_from(spec, directory):
            path = directory / f"{name}.py"
            yield Hidden(name, str(path if path.is_file() else directory / name), _place(spec))


def _modules(directory: Path) -> list[str]:
    """The names that Python could import from a directory: files of code, and directories that hold some."""
    files = {path.stem for path in directory.glob("*.py")}
    return sorted(
        name for name in files | {path.parent.name for path in directory.glob("*/*.py")} if name.isidentifier()
    )


def _comes_from(spec: ModuleSpec, place: Path) -> bool:
    """True if a module lies in the directory `place`, or is that directory itself."""
    paths = [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
    real = place.resolve()
    return any(real == each or real in each.parents for each in (Path(path).resolve() for path in paths))


def _place(spec: ModuleSpec) -> str:
    if spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    return spec.origin if spec.has_location and spec.origin else "Python itself"
