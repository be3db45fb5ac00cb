"""A program that is given a text on its standard input, and a time in which it has to end."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

_LOOK_SECONDS = 0.2  # between two looks at a program that runs
_SHORT_SECONDS = 0.02  # the same, of one that is about to end
MAX_SAID = 4000  # bytes of its standard error that are passed on


def run_program(
    command: Sequence[str],
    text: bytes,
    *,
    environment: Mapping[str, str],
    seconds: float,
    stop_by: Callable[[], float | None] = lambda: None,
    said: Callable[[bytes], object] | None = None,
) -> str:
    """Runs a program, and returns what went wrong, in words; empty if nothing did.

    What it leaves running has the rest of its time, and is then ended. A process that has left its session, and has
    closed all files that it was given, is no longer counted to it.

    Args:
        command: the program and its arguments; no shell reads them.
        text: its standard input. Its standard output is not read.
        environment: all its variables.
        seconds: its time.
        stop_by: a monotonic time that may be set while it runs, as this process stops: its time is over then.
        said: gets the beginning of its standard error; None has no use for it.
    """
    inherited, alive = os.pipe()  # the program and all that it starts hold `alive` until they end
    with os.fdopen(os.memfd_create("facts"), "wb") as given, os.fdopen(inherited, "rb") as ends:
        given.write(text)
        given.flush()
        given.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if said is None else subprocess.PIPE,
                env=environment,
                pass_fds=[alive],
                start_new_session=True,  # so that its children can be ended with it
            )
        except OSError as error:
            return f"cannot be started ({error.strerror or error})"
        finally:
            os.close(alive)
        try:
            return _wait(process, ends.fileno(), time.monotonic() + seconds, f"{seconds:g} s", stop_by, said)
        finally:
            if process.stderr is not None:
                process.stderr.close()


def _wait(
    process: "subprocess.Popen[bytes]",
    ends: int,
    ends_by: float,
    limit: str,
    stop_by: Callable[[], float | None],
    said: Callable[[bytes], object] | None,
) -> str:
    errors = -1 if process.stderr is None else process.stderr.fileno()
    held, left, watched = True, MAX_SAID, select.poll()  # select() takes no file with a large number
    for file in {ends, errors} - {-1}:
        watched.register(file, select.POLLIN)
    while True:
        ready = [file for file, _ in watched.poll(_LOOK_SECONDS * 1000 if held else _SHORT_SECONDS * 1000)]
        if ends in ready:
            held = False
            watched.unregister(ends)
        if errors in ready and said is not None:
            part = os.read(errors, 1 << 16)
            if part[:left]:
                said(part[:left])
            left = max(0, left - len(part))
            if not part:
                watched.unregister(errors)
        # It is not waited for yet, so that its number stays its own, and no other process is ended.
        over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if over and not held and errors not in ready:
            break
        if (stop := stop_by()) is not None and stop < ends_by:
            ends_by, limit = stop, f"{max(0.0, stop - time.monotonic()):.0f} s, as this process stops"
        if time.monotonic() > ends_by:
            break
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    if not over:
        return f"was ended after {limit}"
    if status:
        return f"ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
    return ""
