"""Starting a coordinator, and knowing when it serves."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedpareto.cli.processes import Child, Processes, wait_until

_START_SECONDS = 60.0


def start_coordinator(processes: Processes, home: Path, log: Path, options: Sequence[str] = ()) -> Child:
    """Starts the coordinator of a directory and waits until it serves.

    Raises:
        Failure: it ended instead, or takes too long.
    """
    child = processes.start("the coordinator", ["coordinator", "serve", "--home", str(home), *options], log)
    ports = home / "ports.json"
    wait_until(lambda: _served_by(ports) == child.process.pid, "the start of the coordinator", _START_SECONDS, [child])
    return child


@contextmanager
def short_lived_coordinator(home: Path, passphrase_file: Path | None = None) -> Iterator[None]:
    """Serves the coordinator's directory while the block runs, to be read: no run advances meanwhile.

    Raises:
        Failure: it cannot be served.
    """
    options = ["--hold", *(["--passphrase-file", str(passphrase_file)] if passphrase_file else [])]
    with tempfile.TemporaryDirectory(prefix="fedpareto-") as directory, Processes() as processes:
        start_coordinator(processes, home, Path(directory) / "coordinator.log", options)
        yield


def _served_by(ports: Path) -> int | None:
    try:
        return int(json.loads(ports.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None
