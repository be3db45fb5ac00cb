"""What contributors are told: files and names exist, hooks and workflows run what `make` runs, releases are checked."""

import json
import re
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedpareto
from tests import costs
from tests.distribution import SLOW
from tests.paths import ROOT
from tests.project.scene import git, rows, tool

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGE = (ROOT / "tests/README.md").read_text()
release_check = tool("release_check")


def document(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return found


def test_where_to_change_what_has_at_least_ten_changes_and_names_only_files_and_names_that_exist() -> None:
    changes = rows(CONTRIBUTING, "Where to change what", "Change")
    assert len(changes) >= 10
    for row in changes:
        for words in re.findall(r"`([^`]+)`", row):
            if "/" in words or re.search(r"\.(md|toml|txt|py)$", words):
                assert list(ROOT.glob(words.rstrip("/"))), words
        for name, path in re.findall(r"`(\w+)` in `([\w/]+)\.py`", row):
            assert hasattr(import_module(path.replace("/", ".")), name), name


def test_the_files_and_tests_that_make_mutants_names_exist() -> None:
    for name, subject in tool("mutants").SUBJECTS.items():
        for path in (*subject.files, *subject.tests):
            assert (ROOT / path).is_file(), path
        assert f"`{name}`" in PAGE


def test_the_budget_of_the_tests_is_that_of_the_page_and_what_exceeds_it_is_told() -> None:
    assert f"at most **{costs.BUDGET / 60:.0f} CPU-minutes**" in PAGE
    usual = [costs.YARDSTICK] * 3
    assert costs.over_budget(costs.LIMIT, usual) is None
    assert f"cost {costs.LIMIT + 20} CPU seconds" in str(costs.over_budget(costs.LIMIT + 20, usual))


def test_a_busy_machine_may_use_more_cpu_seconds_and_a_fast_one_not_fewer() -> None:
    busy, fast = [costs.YARDSTICK * 1.5] * 3, [costs.YARDSTICK / 2] * 3
    assert costs.over_budget(costs.LIMIT * 1.5, busy) is None
    assert "where work takes 1.50 times as long" in str(costs.over_budget(costs.LIMIT * 1.6, busy))
    assert costs.over_budget(costs.LIMIT, fast) is None


def test_the_hooks_before_a_commit_are_the_linters_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0].splitlines()[1:]
    linters = [line.strip().removeprefix("@").replace("$(BIN)", ".venv/bin") for line in recipe]
    (repository,) = document(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == linters
    assert {(hook["language"], hook["pass_filenames"]) for hook in repository["hooks"]} == {("system", False)}


def test_the_workflow_runs_continuous_integration_on_push_and_pull_request_and_make_test_full_each_night() -> None:
    workflow = document(".github/workflows/test.yml")
    triggers = dict[Any, Any](workflow)[True]  # YAML 1.1 reads the key `on` as true
    assert {"push", "pull_request", "schedule"} <= set(triggers)
    jobs = {step["run"]: job["if"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step}
    assert set(jobs) == {".ci/run", "make test-full"}
    assert "'push'" in jobs[".ci/run"]
    assert "'schedule'" in jobs["make test-full"]
    assert workflow["permissions"] == {"contents": "read"}
    tested = workflow["jobs"]["test"]
    classified = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [name.rpartition(" ")[2] for name in classified if name.startswith("Programming Language :: Python")]
    assert tested["strategy"]["matrix"]["python"] == versions, "the versions that the metadata names"
    assert tested["env"] == {"PYTHON": "python${{ matrix.python }}"}, "make takes it for .venv"


def test_dependency_updates_cover_packages_actions_and_images() -> None:
    updates = document(".github/dependabot.yml")["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["pip", "github-actions", "docker"]


@pytest.fixture
def release(tmp_path: Path) -> Any:
    for name in ("pyproject.toml", "CHANGELOG.md", *release_check.NAMING):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return release_check.Release(tmp_path, tmp_path / "out")


def test_the_files_that_name_the_version_agree() -> None:
    assert release_check.same_version(release_check.Release(ROOT, ROOT)) == fedpareto.__version__


def test_the_release_check_compares_versions_and_sets_them(release: Any) -> None:
    release_check.set_version(release, "9.8.7")
    assert release_check.check_version(release) == "9.8.7"
    for name in release_check.NAMING:
        path = release.root / name
        text = path.read_text()
        path.write_text(text.replace("9.8.7", "9.9.9"))
        with pytest.raises(release_check.StepError, match=rf"{re.escape(name)} names the images \['9\.9\.9'"):
            release_check.check_version(release)
        path.write_text(text)
    release_check.set_version(release, "9.9.0.dev0")
    assert release_check.same_version(release) == "9.9.0.dev0"
    with pytest.raises(release_check.StepError, match=r"'9\.9\.0\.dev0' is not the version of a release"):
        release_check.check_version(release)
    with pytest.raises(release_check.StepError, match="'nine' is no version"):
        release_check.set_version(release, "nine")


@pytest.mark.parametrize(
    ("changelog", "error", "message"),
    [
        (
            "## [Unreleased]\n\n### Added\n\n- a\n- b\n",
            "ToDoError",
            "rename [Unreleased], with 2 entries, to [VERSION]",
        ),
        ("## [Unreleased]\n", "StepError", "no entry under [VERSION] or [Unreleased]"),
        (
            "## [Unreleased]\n\n- a\n\n## [VERSION] - 2026-11-23\n\n- b\n",
            "StepError",
            "has 1 entries under [Unreleased]",
        ),
        ("## [VERSION] - 2026-11-23\n\n- b\n", "StepError", "begin a new [Unreleased]"),
        ("## [Unreleased]\n\n## [VERSION]\n\n- b\n", "StepError", "lacks the date"),
        ("## [Unreleased]\n\n## [VERSION] - 2026-11-23\n", "StepError", "no entry under [VERSION]"),
        ("## [Unreleased]\n\n## [VERSION] - 2026-11-23\n\n- b\n- c\n\n## [0.0.1] - 2026-01-01\n\n- d\n", "", ""),
    ],
)
def test_the_release_check_wants_all_entries_of_the_changelog_under_the_version_with_its_date(
    release: Any, changelog: str, error: str, message: str
) -> None:
    (release.root / "CHANGELOG.md").write_text(changelog.replace("VERSION", release.version))
    if error:
        with pytest.raises(getattr(release_check, error), match=re.escape(message.replace("VERSION", release.version))):
            release_check.check_changelog(release)
    else:
        assert release_check.check_changelog(release) == f"2 entries under [{release.version}] - 2026-11-23"


def test_a_step_that_is_still_to_do_is_not_ok_and_fails_the_release_check(
    release: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (release.root / "CHANGELOG.md").write_text("## [Unreleased]\n\n- a\n")
    monkeypatch.setattr(sys, "argv", ["release_check", "--root", str(release.root), "--only", "changelog"])
    with pytest.raises(SystemExit, check=lambda error: error.code == 1):
        release_check.main()
    assert capsys.readouterr().out.startswith("changelog    to do at release: rename [Unreleased]")


@pytest.mark.parametrize("builder", ["", "docker"])
def test_the_images_are_built_where_a_builder_runs(release: Any, monkeypatch: pytest.MonkeyPatch, builder: str) -> None:
    tools = release.root / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    if builder:  # it writes down what it is asked
        (tools / builder).write_text('#!/bin/sh\necho "$@" >> asked\n')
        (tools / builder).chmod(0o755)
        monkeypatch.chdir(release.root)
    torch = " --build-arg EXTRAS=torch"
    for name, arguments in {
        "image": "",
        "image-torch": torch,
        "image-torch-cpu": f"{torch} --build-arg TORCH_BACKEND=cpu",
    }.items():
        tag = f"fedpareto:{release.version}{name.removeprefix('image')}"
        if builder:
            assert release_check.STEPS[name](release) == f"{tag} by docker"
            asked = (release.root / "asked").read_text().splitlines()
            assert asked[-1] == f"build --tag {tag}{arguments} ."
        else:
            with pytest.raises(release_check.ImpossibleError, match="neither docker nor podman"):
                release_check.STEPS[name](release)


def test_the_release_check_says_what_is_not_possible_here_and_why(release: Any) -> None:
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


def test_a_tag_that_exists_and_uncommitted_changes_fail_the_release_check(release: Any) -> None:
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        git(release.root, *command)
    assert f"`git tag --sign v{release.version}` would tag " in release_check.check_tag(release)
    (release.root / "Dockerfile").write_text("")
    with pytest.raises(release_check.StepError, match="uncommitted changes in Dockerfile"):
        release_check.check_tag(release)
    git(release.root, "tag", f"v{release.version}")
    with pytest.raises(release_check.StepError, match="exists; set a new version"):
        release_check.check_tag(release)


@pytest.mark.full
def test_the_bill_of_materials_names_fedpareto_and_each_package_with_its_version(release: Any) -> None:
    release.out.mkdir()
    (release.out / "environment").symlink_to(sys.prefix)
    told = release_check.list_parts(release)
    bill = json.loads((release.out / f"fedpareto-{release.version}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "fedpareto")
    assert told == f"fedpareto-{release.version}.cdx.json, {len(bill['components'])} components"
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    parts = {part["name"]: part["purl"] for part in bill["components"]}
    assert parts["numpy"] == f"pkg:pypi/numpy@{pins['numpy']}"


def test_an_audit_that_does_not_reach_its_data_is_not_passed(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "constraints.txt", release.root)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("XDG_CACHE_HOME", str(release.root))
    with pytest.raises(release_check.ImpossibleError, match=r"pip-audit does not reach its data, or fails: .*Proxy"):
        release_check.audit(release)


def test_an_audit_is_passed_if_every_package_was_found_and_none_is_vulnerable() -> None:
    well = {"name": "numpy", "version": "2.1.0", "vulns": []}
    assert release_check.audited([well, well]) == "no known vulnerability of the 2 packages in constraints.txt"
    with pytest.raises(release_check.ImpossibleError, match="no data about 1 of 2 packages: not found"):
        release_check.audited([well, {"name": "blake3", "skip_reason": "not found"}])
    with pytest.raises(release_check.StepError, match=r"known vulnerabilities: piqp \(CVE-1, CVE-2\)"):
        release_check.audited(
            [{"name": "blake3", "skip_reason": "x"}, {"name": "piqp", "vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}]
        )


def test_the_checklist_for_releases_has_each_step_of_the_check() -> None:
    steps = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "tools/releasing.md").read_text(), re.MULTILINE)
    assert steps == list(release_check.STEPS)


def test_the_test_files_that_need_a_slow_import_run_in_one_process() -> None:
    files = {file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py") if "peers" not in file.parts}
    slow = r"optim\.(SGD|Adam)|^ *(import|from) (scipy\.stats|cvxpy|dp_accounting|opacus)\b|^ *from scipy import stats"
    used = {str(file) for file in files if re.search(slow, (ROOT / file).read_text(), re.MULTILINE)}
    assert {Path(file) for file in SLOW} <= files
    assert used <= SLOW
