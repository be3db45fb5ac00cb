"""Counts the lines of code of directories: `python tools/code_lines.py coordinator tests`.

A line of code has a token other than a comment. Blank lines, comments, docstrings and generated stubs do not count.
With `--comments` it also counts comments for 100 lines of code, of the code of private rounds if no directory is named.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, tokenize

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ("coordinator", "federation", "fedpareto", "worker", "storage", "verification")
PRIVATE_ROUNDS = (
    "worker/ledgers/round_ledger.py",
    "federation/secure",
    "federation/work/secure",
    "federation/aggregation/secure",
    "worker/ledgers/round_ledger.py",
    *(f"worker/site/{name}.py" for name in ("roster", "specified", "clear_answers", "refused_orders")),
    *(f"worker/work/{name}.py" for name in ("begun", "computing", "memory", "execution", "own_errors")),
    "coordinator/rounds/runs/private.py",
    "coordinator/rounds/conversation.py",
)
GENERATED = ROOT / "federation" / "v1"
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DIRECTIVES = ("noqa", "type:", "no mutant")  # comments for tools
_NO_CODE = {COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER, ENCODING}


def files(*places: str) -> list[Path]:
    """The Python files of directories, without generated ones, and single files."""
    paths = (ROOT / place for place in places)
    found = (file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))
    return [file for file in found if GENERATED not in file.parents]


def code_lines(file: Path) -> int:
    """The number of lines of code of a Python file."""
    with file.open("rb") as source:
        tokens = [token for token in tokenize(source.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(_docstrings(ast.parse(file.read_text()))))


def comments(file: Path) -> int:
    """The number of comments of a file: lines that follow each other are one, and comments for tools are none."""
    count, last = 0, -1
    with file.open("rb") as source:
        for token in tokenize(source.readline):
            if token.type != COMMENT or token.string.lstrip("# ").startswith(_DIRECTIVES):
                continue
            line, column = token.start
            alone = not token.line[:column].strip()
            count += not (alone and line == last + 1)
            last = line if alone else -1
    return count


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """The lines of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Counts lines of code, without comments and docstrings.")
    parser.add_argument("directories", nargs="*", help=f"directories or files of the project ({', '.join(HOUSE)})")
    parser.add_argument("--comments", action="store_true", help="also counts comments for 100 lines of code")
    options = parser.parse_args()
    places, total, total_comments = options.directories or (PRIVATE_ROUNDS if options.comments else HOUSE), 0, 0
    for place in places:
        counted = files(place)
        count, reasons = sum(map(code_lines, counted)), sum(map(comments, counted)) if options.comments else 0
        total, total_comments = total + count, total_comments + reasons
        print(_row(place, count, reasons if options.comments else None))
    print(_row("in all", total, total_comments if options.comments else None))


def _row(place: str, lines: int, reasons: int | None) -> str:
    rate = "" if reasons is None else f"  {reasons:5,} comments, {100 * reasons / max(lines, 1):4.1f} for 100 lines"
    return f"{lines:7,}{rate}  {place}"


if __name__ == "__main__":
    main()
