"""Counts lines of code, comments, words and the like in the project: `python tools/tree_counts.py`."""

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from code_lines import HOUSE as INSTALLED
from code_lines import PRIVATE_ROUNDS, ROOT, code_lines, files
from code_lines import comments as comments_of

_GENERATED = re.compile(r"<!-- generated .*?<!-- end -->", re.DOTALL)


def lines(*places: str) -> int:
    """The lines of code of these directories."""
    return sum(map(code_lines, files(*places)))


def imports(package: str, of: str) -> int:
    """The imports of a package in another one."""
    trees = (ast.parse(path.read_text()) for path in files(of))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return sum(isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package for node in nodes)


def makers(name: str) -> int:
    """The files of the product in which a class is made."""
    return sum(re.search(rf"\b{name}\(", path.read_text()) is not None for path in files(*INSTALLED))


def methods(path: str, name: str) -> int:
    """The methods of a class."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    found = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in found.body)


def comments(*places: str) -> float:
    """Comments for 100 lines of code."""
    return 100 * sum(map(comments_of, files(*places))) / lines(*places)


def words(paths: Iterable[Path]) -> int:
    """The words of documents that are written by hand: those of tables that repeat the code are not."""
    return sum(len(_GENERATED.sub("", path.read_text()).split()) for path in paths)


def terms() -> int:
    """The terms of the glossary."""
    return len(re.findall(r"^\| (?!Term|---|-)", (ROOT / "docs/reference/glossary.md").read_text(), re.MULTILINE))


COUNTS: dict[str, Callable[[], object]] = {
    "lines of code that a wheel installs": lambda: f"{lines(*INSTALLED):,}",
    "lines of code of the tests": lambda: f"{lines('tests'):,}",
    "lines of code of research, benchmarks and tools": lambda: f"{lines('research', 'benchmarks', 'tools'):,}",
    "top-level packages that a wheel installs": lambda: len(INSTALLED),
    "imports of coordinator in verification": lambda: imports("coordinator", "verification"),
    "files that make a PhaseReply, a RoundContext": lambda: f"{makers('PhaseReply')}, {makers('RoundContext')}",
    "methods of RunCommands": lambda: methods("coordinator/rounds/run_commands.py", "RunCommands"),
    "methods of Conductors": lambda: methods("coordinator/rounds/conductors.py", "Conductors"),
    "comments for 100 lines in private rounds": lambda: f"{comments(*PRIVATE_ROUNDS):.1f}",
    "terms of the glossary": terms,
    "words of CHANGELOG": lambda: words([ROOT / "CHANGELOG.md"]),
    "words of CONTRIBUTING": lambda: words([ROOT / "CONTRIBUTING.md"]),
    "words of README": lambda: words([ROOT / "README.md"]),
    "words of docs, without generated tables": lambda: f"{words(documents()):,}",
}


def documents() -> list[Path]:
    """The documents that are written by hand."""
    return [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "table.md"]


def main() -> None:
    """The program."""
    for name, count in COUNTS.items():
        print(f"{name:55}{count():>10}")


if __name__ == "__main__":
    main()
