"""Delays before another attempt: exponential back-off with full jitter.

Full jitter (a uniform draw below the ceiling) spreads the members of a federation over time when its coordinator comes
back, while equal delays would make them return all at once.
"""

from collections.abc import Callable


class Backoff:
    """The delays between attempts. `first` and `longest` are the ceilings of the first and of every delay, in seconds.

    `uniform` draws a number between its two arguments, such as `random.Random(seed).uniform`.
    """

    def __init__(self, uniform: Callable[[float, float], float], *, first: float = 0.2, longest: float = 30.0) -> None:
        self._uniform = uniform
        self._first = first
        self._longest = longest
        self._failures = 0

    def delay(self) -> float:
        """Seconds to wait after one more failure."""
        # The exponent is bounded because 2.0**1024 overflows, after a few hours without a coordinator.
        ceiling = min(self._longest, self._first * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return self._uniform(0.0, ceiling)

    def reset(self) -> None:
        """An attempt succeeded: the next failure is a first one."""
        self._failures = 0

    def ease(self) -> None:
        """An attempt succeeded, if briefly: try again soon, but do not spin."""
        self._failures = min(self._failures, 2)
