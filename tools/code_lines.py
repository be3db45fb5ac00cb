"""Counts the lines of code of directories: `python tools/code_lines.py coordinator tests`.

A line of code has a token other than a comment. Blank lines, comments, docstrings and generated stubs do not count.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, tokenize

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ("coordinator", "federation", "fedpareto", "worker", "storage", "verification")
GENERATED = ROOT / "federation" / "v1"
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER, ENCODING}


def code_lines(file: Path) -> int:
    """The number of lines of code of a Python file."""
    with file.open("rb") as source:
        tokens = [token for token in tokenize(source.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(_docstrings(ast.parse(file.read_text()))))


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """The lines of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Counts lines of code, without comments and docstrings.")
    parser.add_argument("directories", nargs="*", default=HOUSE, help="directories of the project (%(default)s)")
    total = 0
    for directory in parser.parse_args().directories:
        files = (file for file in (ROOT / directory).rglob("*.py") if GENERATED not in file.parents)
        count = sum(map(code_lines, files))
        total += count
        print(f"{count:7,}  {directory}")
    print(f"{total:7,}  in all")


if __name__ == "__main__":
    main()
