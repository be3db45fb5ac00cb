"""Names of classes in a bundle, which its author chose: a verifier imports nothing that its owner did not name."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federation import plugins
from federation.plugins import PluginError, Plugins, names_of_others
from federation.record.bundle import SPECIFICATION, BundleReader
from fedpareto import code_path
from fedpareto.cli.main import app
from tests.verification.record_vectors import DIRECTORY
from tests.verification.scene import Edited
from verification.errors import VerificationError
from verification.run import OpenedRun

MODULE = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed modules, one of which leaves a file when it is imported."""
    directory = tmp_path / "installed"
    (directory / "package").mkdir(parents=True)
    (directory / "package" / "__init__.py").write_text(MODULE)
    (directory / "package" / "inner.py").write_text(MODULE)
    (directory / "tool.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(directory)])
    monkeypatch.setenv(code_path.VARIABLE, "")
    for name in ("tool", "package", "package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return directory


def naming(path: Path, algorithm: str) -> Path:
    """The bundle `open`, whose specification has another algorithm."""
    whole = Edited.of(DIRECTORY / "open.fedpareto")
    text = whole.entries[SPECIFICATION].decode()
    assert 'algorithm.name = "fedavg"' in text
    changed = text.replace('algorithm.name = "fedavg"', algorithm)
    return whole.having({SPECIFICATION: changed.encode()}).write(path / "named.fedpareto")


@pytest.mark.parametrize(
    "algorithm",
    [
        'algorithm.name = "tool:Rule"',
        'algorithm.name = "package.inner:Rule"',
        'algorithm.name = "fedavg"\nalgorithm.pre = ["tool:Stage"]',
        'algorithm.name = "fedcmoo"\nalgorithm.sketch = "tool:Sketch"',
    ],
)
def test_a_verifier_imports_no_installed_module_because_a_bundle_names_it(
    installed: Path, tmp_path: Path, algorithm: str
) -> None:
    with (
        BundleReader(naming(tmp_path, algorithm)) as reader,
        pytest.raises(VerificationError, match=r"with --code DIR, or install a package with an entry point"),
    ):
        OpenedRun.of(reader)
    assert not list(installed.rglob("*.ran"))


@pytest.mark.parametrize("command", [["verify"], ["admin", "replay"], ["worker", "verify"]])
def test_each_command_that_reads_a_bundle_takes_directories_of_code(command: list[str]) -> None:
    assert "--code" in CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output


def test_a_directory_that_the_reader_names_is_imported(installed: Path, tmp_path: Path) -> None:
    path = naming(tmp_path, 'algorithm.name = "tool:Rule"')
    without = CliRunner().invoke(app, ["verify", str(path)])
    assert (without.exit_code, (installed / "tool.ran").exists()) == (1, False)
    named = CliRunner().invoke(app, ["verify", str(path), "--code", str(installed)])
    assert (named.exit_code, (installed / "tool.ran").exists()) == (1, True)
    assert "tool.py has no 'Rule'" in str(named.exception)


def test_names_of_others_are_built_in_or_entry_points_or_of_named_directories(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: Plugins[object] = Plugins("thing", "fedpareto.things", object, "object")
    package = installed / "things.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: things\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[fedpareto.things]\nshort = package.inner:Path\n")
    monkeypatch.setattr(sys.modules["__main__"], "Mine", int, raising=False)
    with names_of_others():
        assert kinds.find("short") is Path
        assert kinds.find("__main__:Mine") is int  # of a notebook
        for name in ("package.inner:Path", "tool:Path", ":Path", ".tool:Path", "..:Path", "__main__.tool:Path"):
            with pytest.raises(PluginError, match="--code DIR"):
                kinds.find(name)
        # A package of which a part lies elsewhere is not of the directory.
        (tmp_path / "code" / "parts").mkdir(parents=True)
        (installed / "parts").mkdir()
        (installed / "parts" / "part.py").write_text(MODULE)
        code_path.append([tmp_path / "code"])
        with pytest.raises(PluginError, match="--code DIR"):
            kinds.find("parts.part:Path")
    assert kinds.find("tool:Path") is Path  # a name of one's own
    assert plugins.CODE == code_path.VARIABLE
