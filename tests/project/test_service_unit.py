"""The systemd unit in the documents: it starts again for ever, and is confined."""

import re
import shutil
from pathlib import Path

import pytest

from tests.paths import DOCS
from tests.project.scene import ended

OPERATIONS = DOCS / "operate/operations.md"


@pytest.fixture
def unit() -> str:
    found = re.search(r"^```ini\n(\[Unit\]\n.*?)^```", OPERATIONS.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_documented_unit_starts_again_without_a_limit_and_is_confined(unit: str) -> None:
    lines = unit.splitlines()
    for directive in (
        "StartLimitIntervalSec=0",
        "Restart=always",
        "RestartSec=5",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "SystemCallFilter=@system-service",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
    ):
        assert directive in lines
    start = lines[lines.index("[Unit]") : lines.index("[Service]")]
    assert "StartLimitIntervalSec=0" in start  # systemd ignores it elsewhere


def test_systemd_rates_the_documented_unit_as_safe(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    (tmp_path / "fedpareto.service").write_text(unit)
    options = ("--offline=true", "--no-pager", "--threshold=30", "./fedpareto.service")
    rated = ended("systemd-analyze", "security", *options, cwd=tmp_path)
    if "unrecognized option" in rated.stderr:
        pytest.skip("this systemd-analyze cannot rate a file")
    assert rated.returncode == 0, rated.stdout[-200:] + rated.stderr
