"""Runs the tests marked `full` that concern what has changed: `make test-changed BASE=main`.

Changed is what differs between the working tree and the merge base of HEAD and BASE. A test file concerns a change if
it has changed itself, or imports a module that has changed; what it imports through a helper in `tests` counts, too.
Imports are read from the text; a program that a test starts in a process of its own is not followed. Files that have
changed run first, then those that import a change themselves, then the others, in `SECONDS` at most.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600
PEERS = "tests/peers/"  # make test-peers
NO_TESTS = 5  # pytest's exit code where no test is selected


def git(*arguments: str, root: Path = ROOT) -> list[str]:
    """The lines that a Git command prints; none if it fails."""
    completed = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return completed.stdout.splitlines() if completed.returncode == 0 else []


def changed_files(base: str, root: Path = ROOT) -> list[str] | None:
    """The files that differ from the merge base, by their paths below the root; None if no merge base is known."""
    merge_base = git("merge-base", "HEAD", base, root=root)
    if not merge_base:
        return None
    untracked = git("ls-files", "--others", "--exclude-standard", root=root)
    return sorted({*git("diff", "--name-only", merge_base[0], root=root), *untracked})


def module_name(path: str) -> str:
    """The name under which tests import a file of the working tree."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[: -1 if parts[-1] == "__init__" else None])


def is_test(path: str) -> bool:
    """Whether a file in `tests` has tests, and is no helper."""
    return Path(path).name.startswith("test_")


def imported_modules(file: Path) -> set[str]:
    """The names of the modules that a file imports; of `from a import b` both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def concerned_files(changed: list[str], root: Path = ROOT) -> list[str]:
    """The test files that concern changed files, the nearest first, by their paths below the root."""
    modules = {module_name(path) for path in changed if path.endswith(".py")}
    paths = [str(path.relative_to(root)) for path in (root / "tests").rglob("*.py")]
    imports = {path: imported_modules(root / path) for path in paths if not path.startswith(PEERS)}
    distances = dict.fromkeys(imports.keys() & set(changed), 0)
    while modules:
        importing = {path for path, names in imports.items() if names & modules} - distances.keys()
        distances |= dict.fromkeys(importing, 1 + max(distances.values(), default=0))
        modules = {module_name(path) for path in importing if not is_test(path)}  # helpers
    return sorted(filter(is_test, distances), key=lambda path: (distances[path], path))


def main() -> None:
    """Exit code 0 also where no long test concerns the change; else pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="origin/main", metavar="BASE", help="a commit or branch (%(default)s)")
    parser.add_argument("pytest", nargs="*", help="the beginning of pytest's command line, after --")
    options = parser.parse_args()
    changed = changed_files(options.base)
    if changed is None:
        print(f"HEAD and {options.base} have no merge base here: no long tests run.")
        return
    files = concerned_files(changed)
    print(f"{len(changed)} files differ from {options.base}; they concern {len(files)} test files by imports of tests.")
    if files:
        command = [sys.executable, *options.pytest, "-m", "full", "--deadline", str(SECONDS), *files]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        sys.exit(0 if code == NO_TESTS else code)


if __name__ == "__main__":
    main()
