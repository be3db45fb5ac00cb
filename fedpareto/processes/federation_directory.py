"""The directory of a federation that `demo` or `local` starts on this machine: it replaces an earlier one.

A demo may keep a coordinator running in it, which `demo --stop` ends.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from federation.errors import Error
from fedpareto.processes.process_federation import ProcessError, serving

MARKER = "made-by.json"
KEPT_SECONDS = 7200.0  # the time that a coordinator goes on after the demo
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05


class DirectoryError(Error):
    """The directory cannot be used; the message says why and what to do."""


@contextmanager
def fresh_directory(directory: Path, command: str) -> Iterator[None]:
    """Makes the directory of a command, replaces what it has left there, and locks it while the block runs.

    The command is "demo" or "local".

    Raises:
        DirectoryError: it holds something else, or is in use.
    """
    marker = directory / MARKER
    if directory.exists() and not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory")
    if directory.exists() and any(directory.iterdir()) and not is_of(directory, command):
        raise DirectoryError(
            f"{directory} holds files that are not of fedpareto {command}; nothing was touched: name another directory "
            "with --dir"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        if not _lock(stack, marker):
            raise DirectoryError(
                f"another fedpareto {command} is running in {directory}: wait for it, or name another with --dir"
            )
        stop_kept(directory)
        if _is_served(directory / "coordinator"):
            raise DirectoryError(f"a coordinator is serving {directory / 'coordinator'}: stop it first")
        for path in directory.iterdir():
            if path.name != MARKER:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        _note(directory, command, None)
        yield


def keep_coordinator(directory: Path) -> int:
    """Starts the coordinator of a demo as a process that goes on after this one, and ends by itself after two hours.

    It inherits no output. Returns its process id at once; `wait_kept` waits until it serves.
    """
    home = (directory / "coordinator").absolute()
    with (directory / "coordinator.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "fedpareto.processes.detached", str(KEPT_SECONDS)),
                *("coordinator", "serve", "--home", str(home)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _note(directory, "demo", process.pid)
    process.returncode = 0  # Popen then does not wait for it
    return process.pid


def wait_kept(directory: Path, seconds: float) -> None:
    """Waits until the coordinator that was kept serves.

    Raises:
        ProcessError: it does not in this time.
    """
    kept = _kept(directory)
    if not _waited(lambda: serving(directory / "coordinator") == kept, seconds):
        raise ProcessError(f"the coordinator does not serve after {seconds:.0f} seconds: {directory}/coordinator.log")


def stop_kept(directory: Path) -> bool:
    """Stops the coordinator that a demo left running in a directory; False if none runs.

    A process counts only if it holds the database of the directory, since another process may have got the same number.

    Raises:
        ProcessError: it does not end.
    """
    kept, home = _kept(directory), directory / "coordinator"
    if kept is None or serving(home) != kept or not _is_served(home):
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.kill(kept, number)
        if _waited(lambda: not _is_served(home), _STOP_SECONDS):
            with suppress(ChildProcessError):
                os.waitpid(kept, os.WNOHANG)
            _note(directory, "demo", None)
            return True
    raise ProcessError(f"the coordinator of {directory} (process {kept}) does not end")


def stop_running(directory: Path) -> bool:
    """Stops the command that runs in a directory, which stops its processes; False if none runs.

    Raises:
        ProcessError: it does not end.
    """
    marker = directory / MARKER
    if not _is_locked(marker) or not isinstance(process := _noted(directory, "process"), int):
        return False
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
    if not _waited(lambda: not _is_locked(marker), _STOP_SECONDS):
        raise ProcessError(f"the process {process}, which runs in {directory}, does not end")
    return True


def is_of(directory: Path, command: str) -> bool:
    """True if this command has made the directory."""
    return bool(_noted(directory, "made_by") == command)


def _note(directory: Path, command: str, kept: int | None) -> None:
    noted = {"made_by": command, "process": os.getpid(), "coordinator": kept}
    (directory / MARKER).write_text(json.dumps(noted) + "\n")


def _noted(directory: Path, what: str) -> Any:
    try:
        return json.loads((directory / MARKER).read_text())[what]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(directory: Path) -> int | None:
    kept = _noted(directory, "coordinator")
    return kept if isinstance(kept, int) else None


def _is_served(home: Path) -> bool:
    """True if a process holds the database of a coordinator's directory."""
    return _is_locked(home / "coordinator.db.lock")


def _is_locked(path: Path) -> bool:
    """True if a process has locked a file."""
    if not path.exists():
        return False
    with ExitStack() as stack:
        return not _lock(stack, path)


def _lock(stack: ExitStack, path: Path) -> bool:
    """Locks a file until the stack is closed; False if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _waited(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits for at most `seconds` until a condition holds. True if it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)  # the condition is in another process, which does not notify
    return True
