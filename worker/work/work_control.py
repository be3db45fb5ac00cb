"""What controls work in progress."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Control:
    """Callbacks that control work in progress.

    Attributes:
        progress: receives the share of the computation that is done, from 0 to 1.
        stopped: is called before every step; True ends the work.
        pause: waits for some seconds; raises TrainingStopped if the work is stopped meanwhile.
        wanted: True while the reply is still wanted.
    """

    progress: Callable[[float], None]
    stopped: Callable[[], bool]
    pause: Callable[[float], None]
    wanted: Callable[[], bool]
