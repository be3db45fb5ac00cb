"""What tests of the project share: its tools, commands that have ended, Git, and the tables of its documents."""

import os
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = [pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]]


def tool(name: str) -> Any:
    """A module of `tools/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return import_module(name)


def ended(
    *command: str | Path, cwd: Path = ROOT, code: int | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """A command that has ended, with this code if one is given; `environment` is added to that of this process."""
    env, silent = {**os.environ, **environment}, subprocess.DEVNULL
    done = subprocess.run(command, cwd=cwd, env=env, stdin=silent, capture_output=True, text=True, check=False)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def git(root: Path, *arguments: str) -> None:
    ended("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments, cwd=root, code=0)


def section(page: str, title: str) -> str:
    """What a page has below this title."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(page: str, title: str, head: str) -> list[str]:
    """The rows of the tables below this title, without their heads, which begin with this column."""
    lines = section(page, title).splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(f"| {head} |")]
