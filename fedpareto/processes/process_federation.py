"""A federation of processes in a directory: the coordinator and its workers, each with its own keys, TLS and files."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from federation.errors import Error
from fedpareto.processes.forked import Forked, completed

COMMAND = ("-m", "fedpareto")
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 8


class ProcessError(Error):
    """A process failed or took too long; the message ends with the last lines of its output."""


class Process:
    """A started process, whose output is appended to `log`; it ends when this process ends.

    It is a fork of a server that has imported everything. With `forks` False it is an interpreter of its own, and its
    memory holds only its own imports.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, *, forks: bool = True, cwd: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        log.touch()
        env, directory = {**os.environ, "COLUMNS": "100"}, cwd or Path.cwd()
        self.popen: Forked | subprocess.Popen[bytes]
        if forks:
            self.popen = Forked(arguments, log, cwd=directory, env=env)
            return
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=env,
                start_new_session=True,  # Ctrl-C on the terminal reaches the parent alone, which stops its processes
            )

    @property
    def text(self) -> str:
        """Its output so far, from the log."""
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Sends a signal to it and its children, if it still runs."""
        if isinstance(self.popen, Forked):
            self.popen.send(number)
        elif self.popen.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """Kills it and its children, and waits for its end."""
        self.send(signal.SIGKILL)
        self.popen.wait()

    def error(self, problem: str = "") -> ProcessError:
        """The error for a process that ended too early or too late, with the last lines of its output."""
        tail = "\n".join(self.text.strip().splitlines()[-_TAIL_LINES:])
        ended = problem or f"ended with exit code {self.popen.returncode}"
        return ProcessError(f"{self.name} {ended}:\n{tail}\n({self.log})")


class ProcessFederation:
    """The processes of one federation; leaving the context stops them all.

    Attributes:
        directory: holds everything: `coordinator`, a directory for each member, and the logs of the processes.
        home: the coordinator's directory.
        forks: see `Process`.
        seconds: the time limit of each call and wait.
    """

    def __init__(self, directory: Path, *, seconds: float = 120.0) -> None:
        self.directory = directory.absolute()
        self.home = self.directory / "coordinator"
        self.processes: list[Process] = []
        self.forks, self.seconds = True, seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*self.processes)

    def fedpareto(self, *arguments: str, code: int | None = 0, standard_input: str = "") -> str:
        """Runs `fedpareto ARGUMENTS` to its end; returns its standard output.

        Raises:
            ProcessError: its exit code is not `code`; None is any.
        """
        command = f"fedpareto {' '.join(arguments)}"
        try:
            done = completed(
                ["-m", "fedpareto", *arguments], cwd=self.directory, text=standard_input, timeout=self.seconds
            )
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{command} takes more than {self.seconds:.0f} seconds; giving up") from None
        if code not in (None, done.returncode):
            raise ProcessError(f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}".rstrip())
        return done.stdout

    def admin(self, *arguments: str, code: int | None = 0) -> Any:
        """The JSON document of an admin command. Errors as of `fedpareto`."""
        text = self.fedpareto("admin", *arguments, "--home", str(self.home / "admin"), "--json", code=code)
        return json.loads(text) if text.strip() else None

    def join_string(self, name: str) -> str:
        """A join string for a member of this name."""
        return str(self.admin("join-string", name)["join_string"])

    def init(self, *options: str) -> None:
        """Makes the federation: certificate authority, keys, database."""
        self.fedpareto("coordinator", "init", "--home", str(self.home), *options)

    def serve(self, *options: str, program: Sequence[str] = COMMAND) -> Process:
        """Starts the coordinator, and waits until it serves.

        Raises:
            ProcessError: it ended, or takes too long.
        """
        arguments = [*program, "coordinator", "serve", "--home", str(self.home), *options]
        process = self.spawn("coordinator", arguments)
        self.wait(lambda: serving(self.home) == process.popen.pid, "the start of the coordinator", process)
        return process

    def join(self, name: str) -> Path:
        """Enrolls a member; returns the directory of its worker."""
        home = self.directory / name
        self.fedpareto("worker", "join", "--home", str(home), standard_input=self.join_string(name))
        return home

    def work(self, name: str, *options: str, program: Sequence[str] = COMMAND) -> Process:
        """Starts a member's worker, with one thread."""
        home = self.directory / name
        return self.spawn(name, [*program, "worker", "run", "--home", str(home), "--set", "threads=1", *options])

    def spawn(self, name: str, arguments: Sequence[str]) -> Process:
        """Starts a process with a log of its own."""
        with uninterrupted():  # a Ctrl-C in between could lose the process
            process = self.process(name, arguments)
            self.processes.append(process)
        return process

    def process(self, name: str, arguments: Sequence[str]) -> Process:
        """A process of the federation's kind."""
        return Process(name, arguments, self.directory / f"{name}.log", forks=self.forks)

    def wait(self, condition: Callable[[], bool], what: str, *processes: Process, pause: float = _POLL_SECONDS) -> None:
        """Waits until `condition` holds, which is evaluated every `pause` seconds; `what` names it in the message.

        Raises:
            ProcessError: it does not hold in time, or one of the processes has ended meanwhile.
        """
        deadline = time.monotonic() + self.seconds
        while not condition():
            for process in processes:
                if process.popen.poll() is not None:
                    raise process.error()
            if time.monotonic() > deadline:
                raise ProcessError(f"{what} takes more than {self.seconds:.0f} seconds; giving up")
            time.sleep(pause)  # the condition is in other processes or their files, which do not notify

    def finish(self, *processes: Process) -> None:
        """Waits until processes have done their work.

        Raises:
            ProcessError: one of them ended with an error, or is not done in time.
        """
        self.wait(lambda: all(process.popen.poll() is not None for process in processes), "the end of a command")
        for process in processes:
            if process.popen.poll() != 0:
                raise process.error()
        self.processes = [process for process in self.processes if process not in processes]

    def stop(self, *processes: Process) -> None:
        """Stops processes: SIGTERM, then SIGKILL after a while."""
        with uninterrupted():
            for process in processes:
                process.send(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.popen.wait(max(0.0, deadline - time.monotonic()))
            for process in processes:
                process.kill()
            self.processes = [process for process in self.processes if process not in processes]

    def close(self) -> None:
        """Kills every process."""
        for process in reversed(self.processes):
            process.kill()


def serving(home: Path) -> int | None:
    """The process that last served a coordinator's directory, by its ports.json; None if there is none."""
    try:
        return int(json.loads((home / "ports.json").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Leaves the block, with its clean-up, also on SIGTERM and SIGHUP."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGHUP until the block has ended; other threads than the main one get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *arguments: caught.append(arguments)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0][0])
