"""How results were made: the command, versions, the machine, the commit."""

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedpareto.experiments.result_store import Session

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
    line = "\0".join(words)  # which no word contains
    line = re.sub(r"(\0--(data|out|code)[=\0])[^\0]*", lambda found: found[1] + found[2].upper(), line)
    return shlex.join(line.split("\0"))


def _commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it; None outside a Git tree."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    try:
        return subprocess.run(describe, cwd=here, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    with suppress(OSError):
        if model := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()
