"""Listeners: the parts of a coordinator that are told when something has changed."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, ParamSpec

log = logging.getLogger(__name__)

P = ParamSpec("P")


def _log(error: Exception) -> None:
    log.error("a part of the coordinator could not be told of a change", exc_info=error)


class Listeners(Generic[P]):
    """Those who are told of changes of one kind. Any thread may call.

    A listener is called in the thread that tells, with what has changed. No lock is held here meanwhile, so it may call
    any method. It must not wait. One that raises stops neither the other listeners nor the caller.

    Args:
        failed: called with what a listener has raised; by default, it is logged.
    """

    def __init__(self, failed: Callable[[Exception], None] = _log) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._listeners: list[Callable[P, object]] = []

    def __len__(self) -> int:
        return len(self._listeners)

    def listen(self, listener: Callable[P, object]) -> Callable[[], None]:
        """Calls `listener` after every change from now on. Returns a function that ends this."""
        with self._lock:
            self._listeners.append(listener)
        return partial(self._forget, listener)

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls every listener, in the order in which they came."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(*args, **kwargs)
            except Exception as error:
                self._failed(error)

    def _forget(self, listener: Callable[P, object]) -> None:
        with self._lock:
            self._listeners.remove(listener)
