"""The bell of a run: wakes its conductor when something has changed, or when enough replies have come."""

import threading


class Bell:
    """A wait that any thread can end; one conductor waits at a time."""

    def __init__(self) -> None:
        self._heard = threading.Condition()
        self._rung = False
        self._replies = 0  # since the last wait
        self._enough = 1  # the number of replies that ends the wait

    def ring(self) -> None:
        """Ends the wait, or the next one."""
        with self._heard:
            self._rung = True
            self._heard.notify()

    def count_reply(self, times: int = 1) -> None:
        """Counts replies; ends the wait if enough have come."""
        with self._heard:
            self._replies += times
            if self._replies >= self._enough:
                self._heard.notify()

    def wait(self, seconds: float | None, replies: int) -> None:
        """Returns after a ring, after this number of replies since the last wait ended, or after these seconds."""
        with self._heard:
            self._enough = replies
            self._heard.wait_for(lambda: self._rung or self._replies >= replies, seconds)
            self._rung, self._replies = False, 0
