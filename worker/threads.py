"""The threads of a worker, which end together."""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from federation.errors import Error
from federation.owners_code import without_exit

LOGGER = logging.getLogger("fedpareto.worker")
# The time that a stop gives a training step or a call to end. The coordinator sends dropped assignments again.
STOP_SECONDS = 10.0
LOOK_SECONDS = 1.0


class WorkerEndedError(Error):
    """A thread of the worker has ended, and nobody has asked the worker to end."""


class WorkerThreads:
    """Threads that end together: when one returns or fails, or when `stop` is called; at the latest after the block.

    Those that are to end are stopped in reverse order, and waited for, up to `STOP_SECONDS` for each.

    Attributes:
        ending: set once they are to end.
        failure: the exception that ended the first of them; None only if they were asked to end.
    """

    def __init__(self) -> None:
        self.ending = threading.Event()
        self.failure: Exception | None = None
        self._asked = False
        self._threads: list[threading.Thread] = []
        self._stops: list[Callable[[], None]] = []
        # A signal handler may put into a SimpleQueue at any moment; the lock of an Event could be held by the very
        # thread that the handler interrupts.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for stop in reversed(self._stops):
            stop()
        for thread in self._threads:
            thread.join(STOP_SECONDS)

    def start(self, name: str, work: Callable[[], object], stop: Callable[[], None] | None = None) -> None:
        """Starts a thread; `stop` makes its work return, unless `ending` does."""

        def run() -> None:
            try:
                with without_exit(WorkerEndedError):
                    work()
                if not (self._asked or self.ending.is_set()):
                    raise WorkerEndedError(f"the {name} thread has ended, and nobody asked it to")
            except Exception as error:
                if self.failure is None and not self.ending.is_set():
                    self.failure = error
                elif not isinstance(error, type(self.failure)):  # or it has the same cause
                    LOGGER.exception("the %s thread failed while stopping", name)
            finally:
                self._ended.put(None)

        # Daemons: a step of training that takes longer than the owner's patience does not keep the process alive.
        thread = threading.Thread(target=run, name=f"worker-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        if stop is not None:
            self._stops.append(stop)

    def wait(self) -> None:
        """Waits until they are to end."""
        # The wait is short, since Python runs a signal's handler in this thread only between two waits.
        while not self.ending.is_set():
            with suppress(queue.Empty):
                self._ended.get(timeout=LOOK_SECONDS)
                self.ending.set()

    def stop(self) -> None:
        """Makes `wait` return; safe in a signal handler."""
        self._asked = True
        self._ended.put(None)
