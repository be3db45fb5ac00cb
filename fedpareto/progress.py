"""How far a simulation is, shown where somebody looks: a line in a notebook, a bar on a terminal."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.simulate import Progress

_SECONDS = 0.2  # between two changes of a line in a notebook

Tell = Callable[["Progress"], object]


@contextmanager
def shown() -> Iterator[Tell]:
    """What to tell of each round, so that it is shown: in a notebook, or on the terminal of standard error.

    Anywhere else nothing is shown.
    """
    display = notebook_display()
    if display is not None:
        yield NotebookLine(display)
    elif sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield lambda progress: None


def notebook_display() -> Callable[[str], Callable[[str], object]] | None:
    """Shows a text in the notebook that this runs in, and returns what replaces it; None where there is no notebook."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    module: Any = import_module("IPython.display")

    def show(text: str) -> Callable[[str], object]:
        handle = module.display(module.Pretty(text), display_id=True)
        return lambda later: handle.update(module.Pretty(later))

    return show


class NotebookLine:
    """One line of a notebook's output, which says how far a simulation is.

    Args:
        display: shows a text and returns what replaces it.
        clock: seconds.
    """

    def __init__(
        self, display: Callable[[str], Callable[[str], object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._display = display
        self._clock = clock
        self._replace: Callable[[str], object] | None = None
        self._changed = -math.inf

    def __call__(self, progress: "Progress") -> None:
        """Shows how far it is; not more often than people can read, and always at the end."""
        now = self._clock()
        if now - self._changed < _SECONDS and progress.done < progress.total:
            return
        self._changed = now
        if self._replace is None:
            self._replace = self._display(line(progress))
        else:
            self._replace(line(progress))


def line(progress: "Progress") -> str:
    """How far a simulation is, in one line."""
    numbers: list[tuple[str, str, Callable[[float], str]]] = [
        ("accuracy/mean", "mean accuracy", _percent),
        ("accuracy/worst5", "worst 5 %", _percent),
        ("loss/train", "training loss", lambda value: f"{value:.4g}"),
    ]
    words = [
        f"{label} {format_(progress.metrics[name])}" for name, label, format_ in numbers if name in progress.metrics
    ]
    left = (progress.total - progress.done) / progress.rate if progress.rate > 0 else math.inf
    rest = f", {left:.0f} s left" if 0 < left < math.inf else ""
    return ", ".join([f"round {progress.done} of {progress.total}: {progress.rate:.1f} rounds/s{rest}", *words])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


@contextmanager
def _bar() -> Iterator[Tell]:
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns: tuple[Any, ...] = ("rounds", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.1f}/s"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rounds", total=None, rate=0.0)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.total, rate=progress.rate)
