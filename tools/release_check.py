"""Runs the release checklist of tools/releasing.md without publishing anything; see `make release-check`.

    python tools/release_check.py [--only STEP ...]

Each step prints `ok`, `failed`, `to do at release`, or `not possible here`, with the reason. The wheel and the list of
its parts are written to build/release. The exit code is 1 if a step failed or is still to do.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RELEASED = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
BETWEEN = re.compile(rf"({RELEASED.pattern})|\d+\.\d+\.\d+\.dev\d+")  # of commits between two releases, too
# The files that name the images of a version, beside pyproject.toml.
NAMING = ("compose.yaml", "Dockerfile", "deploy/coordinators/kustomization.yaml", "deploy/worker/kustomization.yaml")
IMAGE = re.compile(r"(\bfedpareto:|\bnewTag: )(\d+[\w.]*)")
PIP = ["-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]


class StepError(Exception):
    """A step failed; the message says what was found and what to do."""


class ToDoError(Exception):
    """A step that is done only when a version is released; the message says what to do."""


class ImpossibleError(Exception):
    """This machine lacks what a step needs."""


@dataclass(frozen=True)
class Release:
    """What is checked.

    Attributes:
        root: the source tree.
        out: the directory of the wheel, the fresh environment and the list of parts.
    """

    root: Path
    out: Path

    @property
    def version(self) -> str:
        """The version in pyproject.toml."""
        return str(tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["version"])

    @property
    def wheel(self) -> Path:
        """The wheel that the step `wheel` built.

        Raises:
            ImpossibleError: there is none.
        """
        wheels = sorted(self.out.glob("*.whl"))
        if not wheels:
            raise ImpossibleError("there is no wheel: the step `wheel` did not build one")
        return wheels[-1]

    @property
    def python(self) -> Path:
        """The interpreter of the environment that the step `install` makes."""
        return self.out / "environment" / "bin" / "python"


def ended(command: Sequence[str | Path], cwd: Path) -> tuple[int, str, str]:
    """Runs a command; its exit code, its standard output, and the last line of its error output, or else of that."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]


def run(command: Sequence[str | Path], *, cwd: Path) -> str:
    """Runs a command and returns its standard output.

    Raises:
        StepError: it failed; the message ends with the last line that it printed.
    """
    code, output, last = ended(command, cwd)
    if code:
        raise StepError(f"`{' '.join(map(str, command))}` exited with {code}: {last}")
    return output


def check_version(release: Release) -> str:
    """The version is a release version, and the container files name the same one."""
    version = same_version(release)
    if not RELEASED.fullmatch(version):
        raise StepError(
            f"pyproject.toml: {version!r} is not the version of a release, such as 1.2.0 or 1.2.0rc1: "
            "`python tools/release_check.py --set VERSION` sets it"
        )
    return version


def same_version(release: Release) -> str:
    """The version, which all files name.

    Raises:
        StepError: a file names another one.
    """
    version = release.version
    for name in NAMING:
        named = {found for _, found in IMAGE.findall((release.root / name).read_text())}
        if named != {version}:
            raise StepError(f"{name} names the images {sorted(named)}; pyproject.toml has {version}")
    return version


def set_version(release: Release, version: str) -> None:
    """Writes a version into all files.

    Raises:
        StepError: it is neither that of a release nor one such as 1.3.0.dev0, of the commits after a release.
    """
    if not BETWEEN.fullmatch(version):
        raise StepError(f"{version!r} is no version: a release is 1.2.0 or 1.2.0rc1, and 1.3.0.dev0 follows it")
    project = release.root / "pyproject.toml"
    project.write_text(re.sub(r'^version = ".*"', f'version = "{version}"', project.read_text(), flags=re.MULTILINE))
    for path in (release.root / name for name in NAMING):
        path.write_text(IMAGE.sub(lambda found: found[1] + version, path.read_text()))


def check_changelog(release: Release) -> str:
    """The changelog has dated entries for this version, and none that would miss the release."""
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", (release.root / "CHANGELOG.md").read_text(), re.MULTILINE)
    entries = {heading: len(re.findall(r"^- ", body, re.MULTILINE)) for heading, body in sections}
    new, version = entries.get("[Unreleased]"), release.version
    heading = next((heading for heading in entries if heading.startswith(f"[{version}]")), "")
    if not heading:
        if new:
            raise ToDoError(f"rename [Unreleased], with {new} entries, to [{version}] - YYYY-MM-DD")
        raise StepError(f"CHANGELOG.md has no entry under [{version}] or [Unreleased]")
    if new is None:
        raise StepError("CHANGELOG.md: begin a new [Unreleased] for the changes after the release")
    if new:
        raise StepError(f"CHANGELOG.md has {new} entries under [Unreleased]: move them to [{version}]")
    if not re.fullmatch(r"\[[^]]+\] - \d{4}-\d{2}-\d{2}", heading):
        raise StepError(f"CHANGELOG.md: the heading {heading!r} lacks the date: [{version}] - YYYY-MM-DD")
    if not entries[heading]:
        raise StepError(f"CHANGELOG.md has no entry under [{version}]")
    return f"{entries[heading]} entries under {heading}"


def check_tables(release: Release) -> str:
    """The migrations make the tables of the models."""
    return run([sys.executable, "-m", "storage.migrations", "--check"], cwd=release.root).strip()


def check_types(release: Release) -> str:
    """The tests have strict types, as `make types` finds."""
    return run([sys.executable, "-m", "mypy", "tests"], cwd=release.root).strip()


def build_wheel(release: Release) -> str:
    """Builds the wheel from a copy of the source tree."""
    shutil.rmtree(release.out, ignore_errors=True)
    release.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "source"
        left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
        shutil.copytree(release.root, source, ignore=left_out)
        options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(release.out)]
        run([sys.executable, *PIP, "wheel", *options, source], cwd=source)
    return f"{release.wheel.name}, {release.wheel.stat().st_size / 1e3:.0f} kB"


def install_wheel(release: Release) -> str:
    """Installs the wheel, with the versions of constraints.txt, into a fresh environment and starts the command."""
    wheel = release.wheel
    venv.create(release.out / "environment", with_pip=True, clear=True)
    _install([release.python, *PIP, "install", "-c", release.root / "constraints.txt", wheel], release)
    return _answers([release.python, "-m", "fedpareto"], release)


def install_tool(release: Release, installer: str) -> str:
    """Installs the wheel as a command of a user, by `pipx` or `uv tool`, into a directory of its own."""
    wheel = release.wheel
    program = shutil.which(installer) or shutil.which(installer, path=str(Path(sys.executable).parent))
    if program is None:
        raise ImpossibleError(f"{installer} is not installed")
    place = release.out / installer
    shutil.rmtree(place, ignore_errors=True)
    constraints = ["--constraints", release.root / "constraints.txt"]
    words = (
        ["install", "--pip-args", f"--constraint={constraints[1]}"]
        if installer == "pipx"
        else ["tool", "install", *constraints]
    )
    names = ("PIPX_HOME", "PIPX_BIN_DIR", "UV_TOOL_DIR", "UV_TOOL_BIN_DIR")
    places = {name: str(place / ("bin" if "BIN" in name else "home")) for name in names}
    _install(["env", *(f"{name}={path}" for name, path in places.items()), program, *words, wheel], release)
    return f"{_answers([place / 'bin' / 'fedpareto'], release)} by {installer}"


def _install(command: Sequence[str | Path], release: Release) -> None:
    try:
        run(command, cwd=release.out)
    except StepError as error:
        if re.search(
            r"No matching distribution|connection|not found in the package registry|No solution",
            str(error),
            re.IGNORECASE,
        ):
            raise ImpossibleError(f"the dependencies cannot be fetched: {error}") from None
        raise


def _answers(command: Sequence[str | Path], release: Release) -> str:
    answer = run([*command, "--version"], cwd=release.out).strip()
    if answer != f"fedpareto {release.version}":
        raise StepError(f"`fedpareto --version` printed {answer!r}; expected version {release.version}")
    return answer


def build_image(release: Release, suffix: str = "", **arguments: str) -> str:
    """Builds one container image of the Dockerfile, with these build arguments, if a builder runs here."""
    builder = next(filter(shutil.which, ("docker", "podman")), None)
    if builder is None:
        raise ImpossibleError("neither docker nor podman is installed")
    if ended([builder, "info"], release.root)[0]:
        raise ImpossibleError(f"{builder} is installed, but `{builder} info` fails: does its service run?")
    tag = f"fedpareto:{release.version}{suffix}"
    words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    run([builder, "build", "--tag", tag, *words, "."], cwd=release.root)
    return f"{tag} by {builder}"


def list_parts(release: Release) -> str:
    """Writes the software bill of materials (CycloneDX) of what the step `install` installed."""
    if not release.python.is_file():
        raise ImpossibleError("there is no fresh environment: the step `install` did not make one")
    target = release.out / f"fedpareto-{release.version}.cdx.json"
    options = ["--pyproject", str(release.root / "pyproject.toml"), "--no-validate", "--output-file", str(target)]
    run([sys.executable, "-m", "cyclonedx_py", "environment", *options, release.python], cwd=release.root)
    return f"{target.name}, {len(json.loads(target.read_text())['components'])} components"


def audit(release: Release) -> str:
    """Looks for known vulnerabilities of the pinned versions."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    command = [sys.executable, "-m", "pip_audit", "--requirement", "constraints.txt", *options]
    _, document, last = ended(command, release.root)
    try:
        return audited(json.loads(document)["dependencies"])
    except ValueError:  # it writes no document unless it has asked about every package
        raise ImpossibleError(f"pip-audit does not reach its data, or fails: {last}") from None


def audited(packages: Sequence[Mapping[str, Any]]) -> str:
    """The verdict about the packages of pip-audit's document.

    Raises:
        StepError: packages have known vulnerabilities.
        ImpossibleError: it has no data about some of them.
    """
    known = {one["name"]: ", ".join(found["id"] for found in one["vulns"]) for one in packages if one.get("vulns")}
    if known:
        raise StepError("known vulnerabilities: " + "; ".join(f"{name} ({ids})" for name, ids in known.items()))
    unknown = [one["skip_reason"] for one in packages if "skip_reason" in one]
    if unknown:
        raise ImpossibleError(f"pip-audit has no data about {len(unknown)} of {len(packages)} packages: {unknown[0]}")
    return f"no known vulnerability of the {len(packages)} packages in constraints.txt"


def check_tag(release: Release) -> str:
    """The tag is free and the working tree has no changes."""
    if not shutil.which("git") or not (release.root / ".git").exists():
        raise ImpossibleError("this is not a Git checkout")
    tag = f"v{release.version}"
    if run(["git", "tag", "--list", tag], cwd=release.root).strip():
        raise StepError(f"the tag {tag} exists; set a new version in pyproject.toml")
    changed = run(["git", "status", "--porcelain"], cwd=release.root).splitlines()
    if changed:
        raise StepError(f"uncommitted changes in {', '.join(line[3:] for line in changed[:3])}: commit them first")
    return f"`git tag --sign {tag}` would tag {run(['git', 'rev-parse', '--short', 'HEAD'], cwd=release.root).strip()}"


STEPS: dict[str, Callable[[Release], str]] = {
    "version": check_version,
    "changelog": check_changelog,
    "tables": check_tables,
    "types": check_types,
    "wheel": build_wheel,
    "install": install_wheel,
    "pipx": partial(install_tool, installer="pipx"),
    "uv": partial(install_tool, installer="uv"),
    "image": build_image,
    "image-torch": partial(build_image, suffix="-torch", EXTRAS="torch"),
    "image-torch-cpu": partial(build_image, suffix="-torch-cpu", EXTRAS="torch", TORCH_BACKEND="cpu"),
    "sbom": list_parts,
    "audit": audit,
    "tag": check_tag,
}


def main() -> None:
    """Prints one line for each step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=STEPS, help="this step; give it again for more")
    parser.add_argument("--root", type=Path, default=ROOT, help="the source tree (default: this one)")
    parser.add_argument("--set", metavar="VERSION", help="write this version into the files that name it, and end")
    options = parser.parse_args()
    release = Release(options.root, options.root / "build" / "release")
    if options.set:
        try:
            set_version(release, options.set)
        except StepError as error:
            parser.error(str(error))
        return
    failed = False
    for name in options.only or STEPS:
        try:
            outcome = f"ok: {STEPS[name](release)}"
        except ImpossibleError as error:
            outcome = f"not possible here: {error}"
        except ToDoError as error:
            outcome, failed = f"to do at release: {error}", True
        except StepError as error:
            outcome, failed = f"failed: {error}", True
        print(f"{name:<12} {outcome}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
