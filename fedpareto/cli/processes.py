"""Processes that a command starts, and that end with it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from fedpareto.cli.failure import Failure

_GRACE_SECONDS = 10.0
_SERVE_SECONDS = 60.0  # for the start of a coordinator
_POLL_SECONDS = 0.02
_TAIL_LINES = 8


@dataclass(frozen=True)
class Child:
    """A `fedpareto` process, named in messages, whose output goes to `log`."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def failure(self, words: str = "") -> Failure:
        """The error for a process that ended too early or too late, with the last lines of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])
        ended = words or f"ended with exit code {self.process.returncode}"
        return Failure(f"{self.name} {ended}:\n{tail}\n({self.log})")


class Processes:
    """Started processes; leaving the context stops them all.

    Each has its own process group, so that Ctrl-C on the terminal reaches the parent alone, which stops them in order.
    Each dies with the parent even if that is killed (see `fedpareto.cli.child`).
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*self._children)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, name: str, arguments: Sequence[str], log: Path, *, standard_input: bytes = b"") -> Child:
        """Starts `fedpareto ARGUMENTS`; its output is appended to `log`, and its input must fit into a pipe.

        With -P it imports nothing from the current directory.
        """
        with _uninterrupted(), log.open("ab") as output:  # a Ctrl-C in between could lose the process
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedpareto.cli.child", str(os.getpid()), *arguments],
                stdin=subprocess.PIPE if standard_input else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            child = Child(name, process, log)
            self._children.append(child)
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin as pipe:  # if it has ended, its log says why
                    pipe.write(standard_input)
        return child

    def forget(self, *children: Child) -> None:
        """Takes processes that have ended off the list."""
        self._children = [child for child in self._children if child not in children]

    def stop(self, *children: Child) -> None:
        """Stops processes: SIGTERM, then SIGKILL after a while."""
        with _uninterrupted():
            for child in children:
                _signal(child, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            for child in children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
            for child in children:
                _signal(child, signal.SIGKILL)  # also the rest of its group
                child.process.wait()
            self.forget(*children)


def wait_for_all(children: Iterable[Child], seconds: float) -> None:
    """Waits until processes have ended; a Failure if one ended with an error or is not done in time."""
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise child.failure(f"is not done after {seconds:.0f} seconds") from None
        if child.process.returncode != 0:
            raise child.failure()


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float, children: Iterable[Child], *, pause: float = _POLL_SECONDS
) -> None:
    """Waits until `condition` holds, which is evaluated every `pause` seconds; `what` names it in the message.

    Raises:
        Failure: it does not hold in time, or one of `children` has ended meanwhile.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        for child in children:
            if child.process.poll() is not None:
                raise child.failure()
        if time.monotonic() > deadline:
            raise Failure(f"{what} is taking more than {seconds:.0f} seconds; giving up")
        time.sleep(pause)  # the condition is in files of other processes, which do not notify


def start_coordinator(processes: Processes, home: Path, log: Path, options: Sequence[str] = ()) -> Child:
    """Starts the coordinator of a directory and waits until it serves; a Failure if it ends or takes too long."""
    child = processes.start("the coordinator", ["coordinator", "serve", "--home", str(home), *options], log)
    ports = home / "ports.json"
    wait_until(lambda: _server_of(ports) == child.process.pid, "the start of the coordinator", _SERVE_SECONDS, [child])
    return child


@contextmanager
def short_lived_coordinator(home: Path, passphrase_file: Path | None = None) -> Iterator[None]:
    """Serves the coordinator's directory for reading while the block runs: no run advances meanwhile."""
    options = ["--hold", *(["--passphrase-file", str(passphrase_file)] if passphrase_file else [])]
    with tempfile.TemporaryDirectory(prefix="fedpareto-") as directory, Processes() as processes:
        start_coordinator(processes, home, Path(directory) / "coordinator.log", options)
        yield


def _server_of(ports: Path) -> int | None:
    try:
        return int(json.loads(ports.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _signal(child: Child, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGHUP until the block has ended."""
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
