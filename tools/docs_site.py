"""Builds the documents as a site that is read without a server: build/docs/site, or below a directory that is named.

    make docs

The pages are the Markdown of docs/, laid out for zensical beside it, in pages/. Five things differ from what a forge
shows:

- A link out of docs/ leads to a page with that file, or with the names in that directory, below `tree/`.
- A notebook is a page.
- A diagram is text: on a forge, a script draws it.
- What stands in a list is indented by four spaces, as zensical's Markdown wants it.
- `reference/names.md` is written here: the names of `fedpareto`, each with its docstring.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
from diagrams import in_words

ROOT = Path(__file__).resolve().parent.parent
DOCS, HERE = ROOT / "docs", ROOT / "tools" / "site"
# How code is coloured; a file of another kind is copied as it is.
LANGUAGES = {
    **{".py": "python", ".toml": "toml", ".json": "json", ".proto": "protobuf", ".yaml": "yaml", ".service": "ini"},
    **{".sh": "bash", "": "text", ".txt": "text"},
}
LINK = re.compile(r"(?<!!)(\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s:]+?)(#[^)\s]*)?\)")
CODE = re.compile(r"^( *)(`{3,}|~{3,})")
ITEM = re.compile(r"( *)([-*+]|\d+[.)]) +")
# The names of `fedpareto` by what they are for; a name that is missing here stands below the last title.
GROUPS = {
    "Runs": ("simulate", "local", "connect", "RunSpec", "History", "aggregate", "Aggregate", "Error"),
    "Tasks and trainers": (
        *("Task", "task", "Pool", "DataSource", "Dataset", "Splits", "DataError", "Metric", "Trainer"),
        *("TrainingPlan", "EvaluationPlan", "TrainingStopped", "TrainingDiverged"),
    ),
    "Rules, stages, sketches and attacks": (),
}


class Pages:
    """The pages of the site, from the documents and from what they link to."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.waiting: list[Path] = []
        self.seen: set[Path] = set()

    def place(self, source: Path) -> Path:
        """Where the page or file of a path of the project lies below the pages."""
        inside = source.is_relative_to(DOCS)
        place = source.relative_to(DOCS) if inside else Path("tree") / source.relative_to(ROOT)
        if source.is_dir():
            return place / ("README.md" if (source / "README.md").exists() else "index.md")
        if source.suffix == ".ipynb":
            return place.with_suffix(".md")
        return place.with_name(f"{place.name}.md") if source.suffix in LANGUAGES else place

    def write(self) -> None:
        """All pages, beginning with the documents."""
        for source in sorted(DOCS.rglob("*")):
            if source.suffix in (".md", ".png", ".svg", ".ipynb"):
                self.want(source)
        while self.waiting:
            source = self.waiting.pop()
            place = self.target / self.place(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix != ".md":
                shutil.copy(source, place)
            else:
                place.write_text(self.page(source))

    def want(self, source: Path) -> Path:
        """The place of a path, which gets a page."""
        if source not in self.seen:
            self.seen.add(source)
            self.waiting.append(source)
        return self.place(source)

    def page(self, source: Path) -> str:
        """The Markdown of a page."""
        title = f"# `{source.relative_to(ROOT)}`\n\n"
        if source.is_dir():
            if (source / "README.md").exists():
                return self.page(source / "README.md")
            return title + "".join(f"- `{name}`\n" for name in names(source))
        if source.suffix == ".md":
            return indented("".join(self.linked(line, source) for line in prose(source.read_text())))
        if source.suffix == ".ipynb":
            return indented("".join(self.linked(line, source) for line in prose(cells(source))))
        return f"{title}~~~~{LANGUAGES[source.suffix]}\n{source.read_text()}\n~~~~\n"

    def linked(self, text: str, source: Path) -> str:
        """Text, with links that lead to pages of the site."""

        def moved(match: re.Match[str]) -> str:
            before, name, anchor = match.groups(default="")
            if text.startswith("\0") or name.startswith("#"):
                return match[0]
            place = self.want((source.parent / name).resolve())
            found = os.path.relpath(place, self.place(source).parent)
            return f"{before}{found}{anchor})"

        return LINK.sub(moved, text) if not text.startswith("\0") else in_words(text[1:])


def prose(text: str) -> Iterator[str]:
    """The parts of a page; those that are blocks of code begin with a zero byte."""
    found, fence = "", ""
    for line in text.splitlines(keepends=True):
        code = CODE.match(line)
        if not fence and code:
            if found:
                yield found
            found, fence = f"\0{line}", code[2]
        elif fence and code and code[2] == fence:
            yield found + line
            found, fence = "", ""
        else:
            found += line
    if found:
        yield found


def cells(notebook: Path) -> str:
    """A notebook as a page, without outputs."""
    parts = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook.read_text())["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in parts) + "\n"


def names(directory: Path) -> list[str]:
    """What Git has in a directory."""
    listed = subprocess.run(["git", "ls-files", "."], cwd=directory, capture_output=True, text=True, check=True).stdout
    return sorted({path.split("/")[0] + "/" * ("/" in path) for path in listed.splitlines()})


def indented(text: str) -> str:
    """A page whose lists are indented by four spaces, and stand below an empty line.

    So does an item below one of several paragraphs.
    """
    lines: list[str] = []
    inside: list[int] = []  # where the text of each open item begins
    fence, before, gap = "", "", False  # gap: an open item has an empty line
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        item, code = None if fence else ITEM.match(line), CODE.match(line)
        depth = len(inside)
        if not fence and line.strip():
            while inside and indent < inside[-1]:
                inside.pop()
        begins = len(inside) == depth  # a list, and not its next item
        if item and (begins or gap) and before.strip() and not ITEM.match(before):
            lines.append("\n")
        gap = bool(inside) and (gap or not line.strip()) and not item
        if item:
            lines.append(f"{' ' * (4 * len(inside))}{item[2]:<3} {line[item.end() :]}")
            inside.append(item.end())
        elif inside and line.strip():
            lines.append(" " * (4 * len(inside) - inside[-1]) + line)
        else:
            lines.append(line)
        if code:
            fence = "" if code[2] == fence else fence or code[2]
        before = line
    return "".join(lines)


def public() -> list[str]:
    """The names of `fedpareto`, without importing it."""
    tree = ast.parse((ROOT / "fedpareto/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def reference() -> str:
    """The page of the names of `fedpareto`; mkdocstrings reads the docstrings."""
    rest = [name for name in public() if not any(name in group for group in GROUPS.values())]
    text = (
        "# The names of fedpareto\n\nThis page is for users of Python; after it you can use each name of `fedpareto`.\n"
    )
    for title, group in GROUPS.items():
        text += f"\n## {title}\n" + "".join(f"\n::: fedpareto.{name}\n" for name in group or rest)
    return text


def navigation() -> list[dict[str, Any]]:
    """The tables of docs/README.md, then the results."""
    index = (DOCS / "README.md").read_text()
    found: list[dict[str, Any]] = [{"Documentation": "README.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title = section.partition(":")[0].capitalize()
        found.append(
            {title: [{name: path} for name, path in re.findall(r"^\| \[(.+?)\]\(([\w/-]+\.md)\)", section, re.M)]}
        )
    found[-1]["Reference"].append({"The names of fedpareto": "reference/names.md"})
    notebooks = [path.relative_to(DOCS).with_suffix(".md") for path in sorted(DOCS.glob("notebooks/*.ipynb"))]
    results = [
        path.relative_to(DOCS) for path in sorted(DOCS.glob("results/*.md"), key=lambda path: path.name != "README.md")
    ]
    return [*found, {"Notebooks": [str(path) for path in notebooks]}, {"Results": [str(path) for path in results]}]


def build(target: Path) -> int:
    """Builds the site below a directory, anew; returns zensical's exit code."""
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    Pages(pages).write()
    (pages / "reference/names.md").write_text(reference())
    (pages / "assets").mkdir()
    shutil.copy(HERE / "iframe-worker.js", pages / "assets")
    settings = tomllib.loads((HERE / "zensical.toml").read_text())
    settings["project"]["nav"] = navigation()
    settings["project"]["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    (target / "zensical.toml").write_text(tomli_w.dumps(settings))
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=target, check=False)
    (target / "site/404.html").unlink(missing_ok=True)  # a server's page, with addresses of its own
    return done.returncode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/docs"))
