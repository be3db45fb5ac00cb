"""What is shipped: the constraints, the wheel, the make targets."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.paths import EXAMPLES, ROOT
from tests.project.scene import PACKAGES, PROJECT, ended

# --- constraints.txt


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    bad = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)]
    assert not bad, "a constraint is a name and an exact version, nothing else"
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


APART = {"peers", "mutants", "moto", "docs", "mlflow", "flower", "jupyter"}  # extras with an environment of their own


def direct() -> list[Requirement]:
    """What this project needs, without the extras that are installed apart."""
    extras = [texts for extra, texts in PROJECT["project"]["optional-dependencies"].items() if extra not in APART]
    named = [Requirement(text) for text in sum(extras, start=PROJECT["project"]["dependencies"])]
    return [requirement for requirement in named if requirement.name != PROJECT["project"]["name"]]


def test_the_constraints_pin_every_direct_dependency_inside_its_range() -> None:
    pinned = pins()
    wrong = [
        str(requirement)
        for requirement in direct()
        if (version := pinned.get(canonicalize_name(requirement.name))) is None or version not in requirement.specifier
    ]
    assert not wrong


def test_the_constraints_name_nothing_that_depends_on_the_platform() -> None:
    assert not [name for name in pins() if name.startswith(("nvidia", "cuda", "triton"))]
    assert not [name for name, version in pins().items() if version.local]


def test_every_direct_dependency_has_a_lower_bound() -> None:
    assert not [str(r) for r in direct() if not any(s.operator in (">=", "==", "~=") for s in r.specifier)]


def test_the_coordinator_installs_without_torch() -> None:
    base = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    assert not base & {"torch", "torchvision", "scikit-learn"}


@cache
def importable() -> dict[str, str]:
    """The distribution of each name that can be imported; reading what is installed takes a second."""
    return {
        **{name: names[0] for name, names in packages_distributions().items() if name != "google"},
        "google.protobuf": "protobuf",
        "google.rpc": "googleapis-common-protos",
    }


def imported(folder: str) -> set[str]:
    """The distributions that the modules of a folder import from, by their normalised names."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # Several distributions fill the namespace of `google`: take the longest name.
                found.add(".".join(node.module.split(".")[: 2 if node.module.startswith("google.") else 1]))
    here = {path.stem for place in (ROOT, ROOT / folder, ROOT / "research", EXAMPLES) for path in place.iterdir()}
    return {canonicalize_name(importable().get(name, name)) for name in found - sys.stdlib_module_names - here}


def test_what_is_imported_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    offered = sum(
        (texts for extra, texts in extras.items() if extra not in {"dev", *APART}),
        start=PROJECT["project"]["dependencies"],
    )
    shipped = {canonicalize_name(Requirement(text).name) for text in offered}
    for package in PACKAGES:
        assert sorted(imported(package) - shipped) == [], package
    everything = {canonicalize_name(requirement.name) for requirement in direct()}
    apart = {canonicalize_name(Requirement(text).name) for extra in APART for text in extras[extra]}
    for folder in ("tests", "benchmarks", "docs", "proto", "docker", "tools", "research"):
        assert sorted(imported(folder) - everything - apart) == [], folder


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    ended(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, source, code=0)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_stub_and_migration(wheel: Path) -> None:
    kinds = (".py", ".pyi", ".mako", ".typed", ".toml", ".ini")
    here = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in kinds
    }
    there = set(zipfile.ZipFile(wheel).namelist())
    assert not here - there
    assert any(name.startswith("storage/migrations/versions/0002") for name in there)
    assert "federation/v1/federation_pb2_grpc.pyi" in there
    tops = {name.partition("/")[0] for name in there if not name.partition("/")[0].endswith(".dist-info")}
    assert tops == {"federation", "storage", "coordinator", "worker", "verification", "fedpareto"}


def test_the_wheel_holds_the_pages_scripts_and_styles_of_the_console(wheel: Path) -> None:
    files = [path for path in (ROOT / "fedpareto" / "web").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) > 20
    assert not {str(path.relative_to(ROOT)) for path in files} - set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("folder", ["fedpareto/web/console/static", "tests/vendored", "tools/site"])
def test_each_script_of_others_is_as_it_was_published_with_version_and_licence(folder: str) -> None:
    place = ROOT / folder
    listed = tomllib.loads((place / "vendored.toml").read_text())
    assert {path.name for path in place.iterdir() if ".min." in path.name} == listed.keys()
    for name, entry in listed.items():
        assert entry.keys() == {"package", "version", "path", "licence", "sha256"}
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"])
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert list(place.glob(f"{name.partition('.')[0]}-LICENSE.txt")), name


def test_the_wheel_has_the_command_the_tasks_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"fedpareto-{PROJECT['project']['version']}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "fedpareto = fedpareto.cli.entry:main" in entry_points
    assert "digits = federation.tasks.digits:Digits" in entry_points


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and with the libraries of this one."""
    place = tmp_path_factory.mktemp("outside")
    ended(sys.executable, "-m", "venv", "--without-pip", place, code=0)
    (packages,) = place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return place / "bin" / "python"


INSTALLED = """
import sys
from pathlib import Path
import fedpareto
from fedpareto.cli.entry import main

assert fedpareto.aggregate("fedmgda+", [[3.0, 0.0], [0.0, 0.5]]).weights.tolist() == [0.5, 0.5]
for words in (["coordinator", "init", "--home", "made", "--host", "localhost"], ["verify", sys.argv[1]]):
    sys.argv = ["fedpareto", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}
elsewhere = [name for name, module in ours.items() if not Path(module.__file__ or "").is_relative_to(sys.prefix)]
assert len(ours) > 100 and not elsewhere, elsewhere
"""
SERVED = """
import json
import urllib.request

from fedpareto.processes.local_federation import LocalFederation

Path("local").mkdir()
with LocalFederation(Path("local").absolute(), ()) as stage:
    stage.finish(stage.founding("wheel"))
    stage.serve()
    said = stage.spawn("admin", ["-m", "fedpareto", "admin", "--home", str(stage.home / "admin"), "status", "--json"])
    stage.finish(said)
    assert json.loads(said.text)
    assert b"<title>" in urllib.request.urlopen(stage.open_console()).read()
"""


class Installed(NamedTuple):
    """The wheel as a user has it: its Python, an empty directory, and an environment that names no tree."""

    program: Path
    cwd: Path
    env: dict[str, str]

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(
            [self.program, *words], cwd=self.cwd, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def installed(outside: Path, tmp_path: Path) -> Installed:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDPARETO"))}
    return Installed(outside, tmp_path, {**env, "PATH": f"{outside.parent}:{env['PATH']}"})


def test_an_installed_wheel_works_outside_the_tree(installed: Installed) -> None:
    assert "coordinator" in installed.run("-m", "fedpareto", "--help")
    program = f"import sys\nPACKAGES = {PACKAGES!r}\n" + INSTALLED + SERVED
    installed.run("-c", program, ROOT / "tests" / "vectors" / "record" / "open.fedpareto")
    assert (installed.cwd / "made" / "coordinator.toml").exists()


@pytest.mark.full
def test_an_installed_wheel_plays_the_demo_and_simulates(installed: Installed) -> None:
    assert "Type next:" in installed.run("-m", "fedpareto", "demo", "--rounds", "2")
    spec = 'name = "w"\ntask = "digits"\nrounds = 2\n[simulation]\nclients = 3\n'
    program = f"import fedpareto\nprint(len(fedpareto.simulate({spec!r}).rounds))"
    assert installed.run("-c", program).splitlines()[-1] == "2"


# --- make and CI


def test_make_help_lists_every_target() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    declared = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared
    told = ended("make", "help", code=0).stdout
    assert [line.split()[1] for line in told.splitlines() if line.startswith("make ")] == declared[1].split()


def test_make_takes_another_python_for_its_environment_only_where_one_is_named(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "tools").mkdir()
    programs = {"tools/install.sh": "exit 0"}
    for version in ("9.8", "9.9"):
        making = 'test "$2" != venv || { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; }'
        programs[f"python{version}"] = f'case "$2" in *print*) echo {version};; esac\n{making}'
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)

    def made(*words: str) -> tuple[bool, str]:
        """Whether make installs something, and the version of the environment."""
        done = ended("make", ".venv/.run", *words, cwd=tmp_path, code=0, PATH=f"{tmp_path}:/usr/bin:/bin")
        return "Installing" in done.stderr, ended(tmp_path / ".venv/bin/python", "-c", "print").stdout.strip()

    assert made("PYTHON=python9.8") == (True, "9.8")
    assert made() == made("PYTHON=python9.8") == (False, "9.8")
    (tmp_path / ".venv/of-9.8").touch()
    assert made("PYTHON=python9.9") == (True, "9.9")
    assert not (tmp_path / ".venv/of-9.8").exists()
    assert made() == (False, "9.9")


def test_continuous_integration_runs_make_test_and_then_the_long_tests_that_concern_the_change(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    recipes = "test:\n\t@echo lint; echo $(ARGS) $$CI; echo 7 passed; exit $(FIRST)\n"
    recipes += "test-changed:\n\t@echo 1 long; exit $(SECOND)\n"
    (tmp_path / "Makefile").write_text(recipes)

    def run(first: int, second: int) -> tuple[int, list[str]]:
        completed = ended(tmp_path / ".ci/run", cwd=Path("/"), FIRST=str(first), SECOND=str(second))
        return completed.returncode, completed.stdout.splitlines()

    assert run(0, 0) == (0, ["lint", "--costs true", "1 long", "7 passed"])
    assert run(1, 0) == (1, ["lint", "--costs true", "7 passed"])
    assert run(0, 1) == (
        1,
        ["lint", "--costs true", "1 long", "make test: 7 passed", "The long tests failed; see above."],
    )


@pytest.mark.parametrize("uv", ["installs", "cannot be installed", "fails"])
def test_packages_are_installed_with_uv_and_with_pip_where_uv_does_not_install_them(tmp_path: Path, uv: str) -> None:
    for name, recorded, code in (
        ("python", "pip", 'case "$*" in *" uv") exit $UV_CODE;; esac'),
        ("uv", "uv", "exit $UV_FAILS"),
    ):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{recorded} $*" >> {tmp_path}/calls\n{code}\n')
        program.chmod(0o755)
    codes: dict[str, Any] = {"UV_CODE": str(int(uv == "cannot be installed")), "UV_FAILS": str(int(uv == "fails"))}
    requirements = "-c constraints.txt -e .[torch,dev]"
    completed = ended(ROOT / "tools/install.sh", tmp_path, *requirements.split(), code=0, **codes)
    options = "--quiet --quiet --no-input --disable-pip-version-check -c constraints.txt"
    calls = [f"pip -m pip install {options} uv"]
    if uv != "cannot be installed":
        calls.append(f"uv pip install --quiet --python {tmp_path}/bin/python {requirements}")
    if uv != "installs":
        calls.append(f"pip -m pip install {options} -e .[torch,dev]")
        assert "pip does, which takes some minutes" in completed.stderr
    assert (tmp_path / "calls").read_text().splitlines() == calls
