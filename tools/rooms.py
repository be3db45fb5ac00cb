"""The rooms of the product, as the architecture page lists them: `tools/tables.py` writes them into it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from code_lines import HOUSE, ROOT

_UNLISTED = ("federation/v1", "storage/migrations/versions")


def rooms() -> Iterator[tuple[str, str]]:
    """Each room below a package, with what it holds."""
    for face in sorted(face for package in HOUSE for face in (ROOT / package).glob("*/**/__init__.py")):
        name = face.parent.relative_to(ROOT).as_posix()
        if name not in _UNLISTED:
            yield name, holds(face.parent)


def holds(room: Path) -> str:
    """What a room holds: the first sentences of its docstring, without the point at their end."""
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")
