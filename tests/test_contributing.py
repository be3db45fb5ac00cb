"""What contributors are told: files and names exist, hooks and workflows run what `make` runs, releases are checked."""

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def rows() -> list[str]:
    """The rows of "Where to change what"."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change what\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| Change |")]


def document(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return found


def test_where_to_change_what_has_at_least_ten_changes_and_names_only_files_and_names_that_exist() -> None:
    assert len(rows()) >= 10
    for row in rows():
        for words in re.findall(r"`([^`]+)`", row):
            if "/" in words or re.search(r"\.(md|toml|txt|py)$", words):
                assert list(ROOT.glob(words.rstrip("/"))), words
        for name, path in re.findall(r"`(\w+)` in `([\w/]+)\.py`", row):
            assert hasattr(import_module(path.replace("/", ".")), name), name


def test_the_files_and_tests_that_make_mutants_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name, subject in import_module("mutants").SUBJECTS.items():
        for path in (*subject.files, *subject.tests):
            assert (ROOT / path).is_file(), path
        assert f"`{name}`" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_hooks_before_a_commit_are_the_linters_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0].splitlines()[1:]
    linters = [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in recipe]
    (repository,) = document(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == linters
    assert {(hook["language"], hook["pass_filenames"]) for hook in repository["hooks"]} == {("system", False)}


def test_the_workflow_runs_make_test_on_push_and_pull_request_and_make_test_full_each_night() -> None:
    workflow = document(".github/workflows/test.yml")
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as true
    assert {"push", "pull_request", "schedule"} <= set(triggers)
    jobs = {step["run"]: job["if"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step}
    assert set(jobs) == {"make test", "make test-full"}
    assert "'push'" in jobs["make test"]
    assert "'schedule'" in jobs["make test-full"]
    assert workflow["permissions"] == {"contents": "read"}


def test_dependency_updates_cover_packages_actions_and_images() -> None:
    updates = document(".github/dependabot.yml")["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["pip", "github-actions", "docker"]


@pytest.fixture
def release_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return import_module("release_check")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "compose.yaml", "Dockerfile", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_release_check_compares_versions_and_wants_entries_in_the_changelog(release_check: Any, tree: Path) -> None:
    release = release_check.Release(tree, tree / "out")
    assert release_check.check_version(release) == release.version
    assert "entries under [Unreleased]" in release_check.check_changelog(release)
    compose = tree / "compose.yaml"
    compose.write_text(compose.read_text().replace(f"fedpareto:{release.version}", "fedpareto:9.9.9"))
    with pytest.raises(release_check.StepError, match=r"compose\.yaml names the images \['9\.9\.9'"):
        release_check.check_version(release)
    (tree / "CHANGELOG.md").write_text("## [Unreleased]\n")
    with pytest.raises(release_check.StepError, match=r"no entry under"):
        release_check.check_changelog(release)


def test_the_release_check_says_what_is_not_possible_here_and_why(release_check: Any, tree: Path) -> None:
    release = release_check.Release(tree, tree / "out")
    reasons = {}
    for name in ("install", "sbom", "tag"):
        with pytest.raises(release_check.ImpossibleError) as error:
            release_check.STEPS[name](release)
        reasons[name] = str(error.value)
    assert reasons == {
        "install": "there is no wheel: the step `wheel` did not build one",
        "sbom": "there is no fresh environment: the step `install` did not make one",
        "tag": "this is not a Git checkout",
    }


def test_a_tag_that_exists_fails_the_release_check(release_check: Any, tree: Path) -> None:
    release = release_check.Release(tree, tree / "out")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    assert f"`git tag --sign v{release.version}` would tag " in release_check.check_tag(release)
    subprocess.run(["git", *author, "tag", f"v{release.version}"], cwd=tree, check=True)
    with pytest.raises(release_check.StepError, match="exists; set a new version"):
        release_check.check_tag(release)


def test_the_bill_of_materials_names_fedpareto_and_each_package_with_its_version(release_check: Any) -> None:
    installed = list(distributions())
    bom = release_check.bill_of_materials(installed)
    assert bom.metadata.component.name == "fedpareto"
    parts = {part.name: part.version for part in bom.components}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert parts["numpy"] == pins["numpy"]
    assert str(next(part.purl for part in bom.components if part.name == "numpy")) == f"pkg:pypi/numpy@{pins['numpy']}"


def test_a_bill_of_materials_is_written_as_cyclonedx(release_check: Any, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "tools/sbom.py", "--out", str(tmp_path / "bill.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    bill = json.loads((tmp_path / "bill.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "fedpareto")
    assert told.stdout == f"bill.json, {len(bill['components'])} components\n"
    with pytest.raises(LookupError, match="fedpareto is not among"):
        release_check.bill_of_materials([])


def test_the_checklist_for_releases_has_each_step_of_the_check(release_check: Any) -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/releasing.md").read_text(), re.MULTILINE)
    assert listed == list(release_check.STEPS)
