"""Processes that a command starts, and that are gone when it is."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fedpareto.cli.failure import Failure

_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 8


@dataclass(frozen=True)
class Child:
    """A `fedpareto` process that was started.

    Attributes:
        name: for messages.
        process: it.
        log: where its output goes.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def tail(self) -> str:
        """The last lines of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def failure(self) -> Failure:
        """What to raise when it has ended and should not have."""
        return Failure(f"{self.name} ended with exit code {self.process.returncode}:\n{self.tail()}\n({self.log})")


class Processes:
    """Started processes; leaving the context stops every one, whatever happened.

    Each has a process group of its own, so that Ctrl-C on the terminal reaches the parent alone, which stops them in
    order; each dies with the parent even if that is killed (see `fedpareto.cli.child`).
    """

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # To be ended politely is to leave, too.
        self._handlers = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            self._stop(self._children)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, name: str, arguments: Sequence[str], log: Path, *, standard_input: bytes = b"") -> Child:
        """Starts `fedpareto ARGUMENTS`; its output is appended to `log`. What it reads must fit into a pipe.

        With -P nothing in the current directory takes the place of our packages.
        """
        with _uninterrupted(), log.open("ab") as output:  # or a Ctrl-C could lose a process that was just made
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
                with suppress(BrokenPipeError), process.stdin as pipe:  # it may have ended: its log says why
                    pipe.write(standard_input)
        return child

    def stop(self, child: Child) -> None:
        """Stops one: SIGTERM, then SIGKILL after a while."""
        with _uninterrupted():
            self._stop([child])

    def forget(self, *children: Child) -> None:
        """Takes processes that have ended off the list."""
        self._children = [child for child in self._children if child not in children]

    def _stop(self, children: Iterable[Child]) -> None:
        leaving = list(children)
        for child in leaving:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in leaving:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        for child in leaving:
            _signal(child, signal.SIGKILL)  # also whatever it may have left in its group
            child.process.wait()
        self.forget(*leaving)


def wait_for_all(children: Iterable[Child], seconds: float) -> None:
    """Waits until processes have done their work and ended.

    Raises:
        Failure: one ended with an error, or is not done in time.
    """
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failure(f"{child.name} is not done after {seconds:.0f} seconds:\n{child.tail()}") from None
        if child.process.returncode != 0:
            raise child.failure()


def wait_until(
    condition: Callable[[], bool],
    what: str,
    seconds: float,
    children: Iterable[Child] = (),
    *,
    pause: float = _POLL_SECONDS,
) -> None:
    """Waits until `condition` holds.

    Args:
        condition: looked at every `pause` seconds.
        what: is being waited for, for the message.
        seconds: the longest wait.
        children: must be running meanwhile.
        pause: between two looks, in seconds.

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


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _signal(child: Child, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off Ctrl-C and SIGTERM until the block has ended."""
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
