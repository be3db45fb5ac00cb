"""The tree, as the architecture page and CONTRIBUTING describe it: rooms of a dozen files, unique names, no circles."""

import ast
import builtins
import re
import tomllib
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.paths import ROOT

PACKAGES = ("federation", "storage", "coordinator", "worker", "verification", "fedpareto")
WORKSHOP = ("research",)
GENERATED = ROOT / "federation" / "v1"
LARGEST_ROOM = 15
# Rooms with one file for each rule, data set or part of a specified protocol.
CATALOGUES = {"federation/aggregation/rules", "federation/secure", "federation/tasks", "federation/training"}
# Folders of tests that are named like no package.
NO_PACKAGES = {
    *(
        "owners_code",
        "owners_code/lottery",
        "pages",
        "peers",
        "programs",
        "project",
        "releases",
        "research",
        "simulated",
        "soak",
    )
}
ARCHITECTURE = (ROOT / "docs/reference/architecture.md").read_text()


def files_of(*packages: str) -> list[Path]:
    """The paths of the files in the project."""
    files = (file for package in packages for file in sorted((ROOT / package).rglob("*.py")))
    return [file.relative_to(ROOT) for file in files if GENERATED not in file.parents]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def sources(*packages: str) -> dict[Path, ast.Module]:
    """The syntax tree of each file, by its path in the project."""
    return {file: parsed(file) for file in files_of(*packages)}


def names_in_several_rooms() -> dict[str, set[str]]:
    rooms = defaultdict(set)
    for file in files_of(*PACKAGES):
        if not file.name.startswith("__"):
            rooms[file.stem].add(str(file.parent))
    return {name: places for name, places in rooms.items() if len(places) > 1}


def listed_names() -> set[str]:
    section = ARCHITECTURE.split("### Names that two files share", 1)[1].split("\n### ", 1)[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


def test_a_room_has_at_most_fifteen_files() -> None:
    sizes = Counter(str(file.parent) for file in files_of(*PACKAGES) if file.name != "__init__.py")
    assert {room: size for room, size in sizes.items() if size > LARGEST_ROOM and room not in CATALOGUES} == {}
    assert set(sizes) >= CATALOGUES


def test_a_room_begins_with_a_sentence_about_what_it_holds() -> None:
    rooms = {file.parent for file in files_of(*PACKAGES)}
    faces = {file.parent: parsed(file) for file in files_of(*PACKAGES) if file.name == "__init__.py"}
    assert {str(room) for room in rooms if room not in faces or not ast.get_docstring(faces[room])} == set()


def test_tests_live_in_rooms_that_are_named_like_packages() -> None:
    rooms = {file.relative_to("tests").parent for file in files_of("tests")} - {Path()}
    assert {str(room) for room in rooms if not (ROOT / room / "__init__.py").exists()} == NO_PACKAGES
    sizes = Counter(file.parent for file in files_of("tests") if file.name.startswith("test_"))
    assert {str(room): size for room, size in sizes.items() if size > LARGEST_ROOM} == {}


def test_two_files_share_a_name_only_where_contributing_gives_the_reason() -> None:
    assert set(names_in_several_rooms()) == listed_names()


def test_two_classes_do_not_share_a_name() -> None:
    places = defaultdict(list)
    for file in files_of(*PACKAGES, *WORKSHOP):
        for name in re.findall(r"^\s*class (\w+)", (ROOT / file).read_text(), re.MULTILINE):
            places[name].append(str(file))
    assert len(places) > 500
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# Exceptions that are no failures of a user's command: answers that the caller expects, and signals inside a room.
ANSWERS = {
    *("Declined", "Held", "IllegalTransition", "Refusal", "RefusedRequest", "RevokedMeanwhile", "Skipped"),
    *("TimeRefused", "TrainingStopped", "Voided", "Waiting", "WelcomeRefused"),
    *("CoordinatorAway", "DownloadFailed", "Malformed", "ModelMismatch", "PipeError", "ReceiptError"),
    "UnverifiedSession",
}


def test_a_failure_that_users_see_descends_from_error() -> None:
    builtin = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for tree in sources(*PACKAGES).values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }

    def ancestors(name: str) -> set[str]:
        return {name}.union(*map(ancestors, bases.get(name, ())))

    raised = {name for name in bases if ancestors(name) & builtin}
    assert {name for name in raised if "Error" not in ancestors(name) and not ancestors(name) & ANSWERS} == set()
    assert raised >= ANSWERS


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for types count, too; a package may import its own files."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    graph = grimp.build_graph(*configured["root_packages"], cache_dir=None)
    imports = {
        module: {
            other for other in graph.find_modules_directly_imported_by(module) if not other.startswith(f"{module}.")
        }
        for module in graph.modules
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the files of a circle


def test_a_module_of_commands_imports_at_its_top() -> None:
    """The table of commands loads a module when its command is called, so nothing in it has to wait."""
    late: dict[str, list[str]] = defaultdict(list)
    for file, tree in sources("fedpareto").items():
        if "cli" in file.parts:
            late[str(file)] += [
                ast.unparse(node)
                for block in ast.walk(tree)
                if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
                for node in ast.walk(block)
                if isinstance(node, ast.Import | ast.ImportFrom)
            ]
    assert {file: imports for file, imports in late.items() if imports} == {}
