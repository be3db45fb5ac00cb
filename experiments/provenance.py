"""How results were made: the command, versions, the machine, the commit."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.results import Session

_PACKAGES = ("fedpareto", "numpy", "torch", "torchvision", "scikit-learn", "pandas", "matplotlib")


def session(words: Sequence[str], began: datetime, device: str) -> Session:
    """The call of a command, given as its command line `words`, that trains clients on a device."""
    return Session(command(words), began.isoformat(), _hardware(device), _versions(), _commit())


def _hardware(device: str) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    from federation.training.determinism import pick_device  # noqa: PLC0415

    chosen = torch.device(pick_device(device))
    return {
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{os.cpu_count()} cores, {_cpu()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def command(words: Sequence[str]) -> str:
    """A command line with names in place of this machine's directories."""
    shown = list(words)
    for option in ("--data", "--out", "--code"):
        for index, word in enumerate(shown):
            if word == option and index + 1 < len(shown):
                shown[index + 1] = option.strip("-").upper()
            elif word.startswith(f"{option}="):
                shown[index] = f"{option}={option.strip('-').upper()}"
    return shlex.join(shown)


def _commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it; None outside a Git tree."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    try:
        return subprocess.run(describe, cwd=here, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
