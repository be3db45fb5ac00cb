"""The tree, as the architecture page and CONTRIBUTING describe it: rooms of a dozen files, unique names, no circles."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "simulation", "fedpareto")
WORKSHOP = ("experiments",)
GENERATED = ROOT / "federation" / "v1"
LARGEST_ROOM = 15
# Rooms with one file for each rule, data set or part of a specified protocol.
CATALOGUES = {"coordinator/aggregation/rules", "federation/secure", "federation/tasks", "federation/training"}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@cache
def sources(*packages: str) -> dict[Path, ast.Module]:
    """The syntax tree of each file, by its path in the project."""
    files = (file for package in packages for file in sorted((ROOT / package).rglob("*.py")))
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files if GENERATED not in file.parents}


def names_in_several_rooms() -> dict[str, set[str]]:
    rooms = defaultdict(set)
    for file in sources(*PACKAGES):
        if not file.name.startswith("__"):
            rooms[file.stem].add(str(file.parent))
    return {name: places for name, places in rooms.items() if len(places) > 1}


def listed_names() -> set[str]:
    section = CONTRIBUTING.split("### Names that two files share", 1)[1].split("\n## ", 1)[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_a_room_has_at_most_fifteen_files() -> None:
    sizes = Counter(str(file.parent) for file in sources(*PACKAGES) if file.name != "__init__.py")
    assert {room: size for room, size in sizes.items() if size > LARGEST_ROOM and room not in CATALOGUES} == {}
    assert set(sizes) >= CATALOGUES


def test_a_room_begins_with_a_sentence_about_what_it_holds() -> None:
    rooms = {file.parent for file in sources(*PACKAGES)}
    faces = {file.parent: tree for file, tree in sources(*PACKAGES).items() if file.name == "__init__.py"}
    assert {str(room) for room in rooms if room not in faces or not ast.get_docstring(faces[room])} == set()


def test_two_files_share_a_name_only_where_contributing_gives_the_reason() -> None:
    assert set(names_in_several_rooms()) == listed_names()


def test_two_classes_do_not_share_a_name() -> None:
    places = defaultdict(list)
    for file, tree in sources(*PACKAGES, *WORKSHOP).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    """`prepare` raises CycleError, which names the files of a circle."""
    trees = sources(*PACKAGES, *WORKSHOP)
    TopologicalSorter({file: set(imported(tree)) - {file} for file, tree in trees.items()}).prepare()


def imported(tree: ast.Module) -> Iterator[Path]:
    """The project's files that a file imports, for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield file_of(f"{node.module}.{alias.name}") or file_of(node.module) or Path()
        elif isinstance(node, ast.Import):
            yield from (file_of(alias.name) or Path() for alias in node.names)


@cache
def file_of(module: str) -> Path | None:
    path = Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if (ROOT / file).is_file()), None)


@pytest.mark.parametrize("room", ["fedpareto/console", "worker/console", "coordinator/alerts", "storage/objects",
                                  "fedpareto/sinks", "tests/simulated"])  # fmt: skip
def test_a_planned_room_has_its_place_on_the_architecture_page(room: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    planned = page.split("### Rooms that are planned", 1)[1].split("\n## ", 1)[0]
    assert f"`{room}/`" in planned
    assert not (ROOT / room).exists(), "the room exists: move its row into the table of packages"
