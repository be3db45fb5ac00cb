"""`fedpareto.local`: a federation of processes on this machine that ends with a block of code, or with its process."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from federation.errors import ArgumentError
from fedpareto.cli.admin import client
from fedpareto.face.cell_code import importable
from fedpareto.face.connection import FederationCalls
from fedpareto.missing_packages import need
from fedpareto.processes.forked import start_server
from fedpareto.processes.local_federation import LocalFederation

if TYPE_CHECKING:
    from federation.tasks import Task

_MOST = 100  # members, each with a process
# Deletes a directory once this process has closed the pipe, or has ended in any way. Its processes end at the same
# time, and may write a last file meanwhile.
_CLEANER = """
import shutil, sys, time
sys.stdin.buffer.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)  # the last writes of processes that are ending: nothing tells of them
    try:
        open(sys.argv[1])
    except FileNotFoundError:
        break
    except OSError:
        pass
"""


@contextmanager
def local(
    members: int | Mapping[str, str | Path] = 3,
    *,
    task: "type[Task] | str",
    data: str | Path | None = None,
    device: str = "auto",
) -> Iterator[FederationCalls]:
    """A federation on this machine: a coordinator, and a worker for each member, as processes with TLS and keys.

    Everything is in a temporary directory, which is deleted at the end of the block with all processes, and also when
    this process is killed. Take what you need before: `run.history`, `run.save(path)`, `run.report()`.

    Args:
        members: the directory of each member's own data by name; or a number of members, which share the task's data.
        task: the name of a task, or its class. The class of a cell is written as source into a module on this
            machine, with the imports, functions, classes and constants that it uses.
        data: the directory of the task's data, with a number of members.
        device: where members train: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ArgumentError, ArgumentTypeError: an argument cannot be used.
        PackagesMissing: PyTorch is not installed.
        SocketPathTooLong: the path of the directory for temporary files is too long.
        ProcessError: a process failed to start; the message has the end of its output.
    """
    need("members train with", "torch", extra="torch")
    sources = _sources(members, data)
    with _directory() as directory:
        if isinstance(task, str):
            kind, name, code = None, task, None
        else:
            kind = task
            name, code = importable(task, directory / "code")
        options = ["--task", name, "--device", device, *(["--code", str(code)] if code is not None else [])]
        start_server()  # it imports PyTorch while this process imports the rest
        with LocalFederation(directory / "federation", sorted(sources)) as stage:
            stage.directory.mkdir()
            stage.finish(stage.founding("local"))
            stage.serve()
            with client.connect(stage.home) as stub:
                stage.enroll(stub)
                stage.pin_rosters()
                stage.attend(stub, {member: [*options, *own] for member, own in sources.items()})
            yield FederationCalls(stage.home, task=(name, kind))


def _sources(members: int | Mapping[str, str | Path], data: str | Path | None) -> dict[str, list[str]]:
    """The options of each member's worker that name its data."""
    if isinstance(members, Mapping):
        if data is not None:
            raise ArgumentError("data or members: the data of all members, or of each; not both")
        for name, directory in members.items():
            if not Path(directory).is_dir():
                raise ArgumentError(f"members: {name}: {directory} is not a directory")
        found = {name: ["--data", str(Path(directory).absolute())] for name, directory in members.items()}
    elif isinstance(members, int) and 1 <= members <= _MOST:
        common = [] if data is None else ["--data", str(Path(data).absolute())]
        found = {f"member-{number}": [*common, "--set", f"part={number}/{members}"] for number in range(1, members + 1)}
    else:
        raise ArgumentError(f"members: a number from 1 to {_MOST}, or directories by name; got {members!r}")
    if not found:
        raise ArgumentError("members: name one or more, each with the directory of its data")
    return found


@contextmanager
def _directory() -> Iterator[Path]:
    """A directory that is deleted at the end, or when this process ends before."""
    directory = Path(tempfile.mkdtemp(prefix="fedpareto-local-"))
    cleaner = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CLEANER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C does not reach it
    )
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if cleaner.stdin is not None:
            with suppress(OSError):
                cleaner.stdin.close()
        cleaner.wait()
