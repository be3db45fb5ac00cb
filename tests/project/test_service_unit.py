"""The systemd units in `deploy/`: they start again for ever, have a watchdog, and are confined."""

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from coordinator.server import START_SECONDS
from tests.command_lines import problem
from tests.paths import ROOT
from tests.project.scene import ended

UNITS = ("fedpareto-coordinator", "fedpareto-notify", "fedpareto-worker")
PROGRAM = "/opt/fedpareto/bin/fedpareto"


def text(name: str) -> str:
    return (ROOT / "deploy" / "systemd" / f"{name}.service").read_text()


def settings(name: str) -> dict[str, dict[str, list[str]]]:
    """The values of each setting, by section."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in text(name).splitlines():
        if line.startswith("["):
            section = line[1:-1]
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[section][key].append(value)
    return found


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_again_without_a_limit_and_is_confined(name: str) -> None:
    unit = settings(name)
    assert unit["Unit"]["StartLimitIntervalSec"] == ["0"]  # systemd ignores it elsewhere
    service = unit["Service"]
    for key, values in {
        "Restart": ["always"],
        "LimitCORE": ["0"],
        "NoNewPrivileges": ["yes"],
        "ProtectSystem": ["strict"],
        "CapabilityBoundingSet": [""],
        "SystemCallFilter": ["@system-service", "~@privileged"],
        "RestrictAddressFamilies": ["AF_INET AF_INET6 AF_UNIX"],
    }.items():
        assert service[key] == values, key


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_command_that_there_is_as_a_user_of_its_own_who_may_write_its_home(name: str) -> None:
    service = settings(name)["Service"]
    [line] = service["ExecStart"]
    assert line.startswith(f"{PROGRAM} ")
    assert problem(line.replace(PROGRAM, "fedpareto")) is None
    home = line.partition(" --home ")[2]
    writable = [*service["ReadWritePaths"], *(f"/var/lib/{state}" for state in service["StateDirectory"])]
    assert [path for path in writable if Path(home).is_relative_to(path)]
    assert service["User"] != ["root"]


@pytest.mark.parametrize("name", UNITS)
def test_a_watchdog_waits_for_a_start_that_may_take_long(name: str) -> None:
    service = settings(name)["Service"]
    assert service["Type"] == ["notify"]  # without it systemd starts no watchdog
    assert int(service["WatchdogSec"][0]) >= 60
    [start] = service["TimeoutStartSec"]
    assert float(start) > START_SECONDS


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_a_unit_and_rates_it_as_safe(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    file = f"./{name}.service"
    (tmp_path / file).write_text(text(name).replace(PROGRAM, sys.executable))
    verified = ended("systemd-analyze", "verify", file, cwd=tmp_path)
    assert [line for line in verified.stderr.splitlines() if name in line] == []
    rated = ended("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=30", file, cwd=tmp_path)
    if "unrecognized option" in rated.stderr:
        pytest.skip("this systemd-analyze cannot rate a file")
    assert rated.returncode == 0, rated.stdout[-200:] + rated.stderr
    assert re.search(r"exposure level for .*: 1\.\d OK", rated.stdout), "as operations.md says"
