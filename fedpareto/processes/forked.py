"""Child processes that start without imports: forks of a server that has imported PyTorch, gRPC and the rest once.

Each child is a real process with its own memory, session, signals and exit code; only its start is quick (0.05 CPU
seconds, where a worker's imports take 4). It ends when its parent ends, also after a crash. The server itself makes no
gRPC call and starts no thread, so that forking it is safe.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, parent_process
from pathlib import Path
from types import ModuleType

from federation.process.sockets import short_enough
from federation.transport.tls import require_tls13

# The imports of coordinators, workers and commands. None of them may start a thread or make a gRPC call.
PRELOADED = [
    "fedpareto.processes.imported_once",  # the first one
    "alembic.command",
    "coordinator.services.stopped",
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.idna",
    "federation.tasks.digits",
    "federation.tasks.networks",
    "federation.training.torch_trainer",
    "fedpareto.cli.entry",
    "fedpareto.cli.admin.stopped",
    "psycopg",
    "pydantic.type_adapter",
    "rich.progress",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlite3",
    "storage.migrations",
    "torch",
    "fedpareto.cli.preloaded",  # the last one, which loads every command
]


def start_server() -> None:
    """Starts the fork server, which then imports its modules while this process does other work.

    Otherwise, the first forked process starts it. It imports nothing from the current directory, and ignores Ctrl-C.
    """
    require_tls13()  # gRPC reads these settings once, when the server loads it
    settings = {"GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        with short_enough():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class Forked:
    """A Python process; the methods are those of `subprocess.Popen`.

    Args:
        arguments: the arguments of `python`: `-m MODULE ...`, `-c PROGRAM ...` or `FILE ...`.
        output: the file to which standard output is appended.
        errors: the file for standard error; None is the same file.
        text: the file of standard input; None is empty.
        cwd: the working directory.
        env: the whole environment.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        errors: Path | None = None,
        *,
        text: Path | None = None,
        cwd: Path,
        env: Mapping[str, str],
    ) -> None:
        start_server()
        files = (str(text or os.devnull), str(output), str(errors or output))
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=run, args=([*arguments], files, str(cwd), dict(env)))
        with _without_program():
            self._process.start()
        self.pid = self._process.pid or 0  # it has one, since it was started

    @property
    def returncode(self) -> int | None:
        """The exit code; minus the signal's number when one ended it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, as `returncode`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it ends, for at most `timeout` seconds; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send(self, number: int) -> None:
        """Sends a signal to it and its children, if it still runs."""
        if self.poll() is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has just begun, or has just ended
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)


@contextmanager
def _without_program() -> Iterator[None]:
    """Hides the program of this process, which multiprocessing would run once more in the new one, such as a script."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def completed(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text: str = "",
    timeout: float = 120.0,
) -> "subprocess.CompletedProcess[str]":
    """`subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`, forked.

    Raises:
        subprocess.TimeoutExpired: it runs longer than `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        given, out, err = (Path(directory, name) for name in ("in", "out", "err"))
        given.write_text(text)
        process = Forked(arguments, out, err, text=given, cwd=cwd or Path.cwd(), env=os.environ if env is None else env)
        try:
            code = process.wait(timeout)
        except BaseException:
            process.send(signal.SIGKILL)
            raise
        return subprocess.CompletedProcess([*arguments], code, out.read_text(), err.read_text())


def run(arguments: list[str], files: tuple[str, str, str], cwd: str, env: dict[str, str]) -> None:
    """Runs the module, program or file of the arguments in the new process, as the interpreter does."""
    gc.enable()  # the server has disabled it
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number, file in enumerate(files):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has closed it
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - line by line
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        if arguments[0] == "-m":  # the path is the parent's: the working directory is not on it
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "-c", "exec"), {"__name__": "__main__"})  # noqa: S102 - as python -c
        else:
            sys.path[0] = str(Path(arguments[0]).parent)
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()


def _end_with_parent() -> None:
    """Kills this process and its children once the parent has ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
