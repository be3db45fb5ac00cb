"""The progress of a simulation: a line in a notebook, a bar on a terminal."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from federation.text import counted
from fedpareto.formatting import percent

if TYPE_CHECKING:
    from rich.console import Console

    from fedpareto.simulation.simulation_progress import SimulationProgress

_SECONDS = 0.2  # between two changes of a line in a notebook

Tell = Callable[["SimulationProgress"], object]


@contextmanager
def shown() -> Iterator[Tell]:
    """A function that shows the progress of each round in a notebook or on the terminal of standard error, if any."""
    display = notebook_display()
    if display is not None:
        yield NotebookLine(display)
        return
    from rich.console import Console  # noqa: PLC0415 - a notebook does not need it

    with bar(Console(stderr=True)) as tell:
        yield tell


def notebook_display() -> Callable[[str], Callable[[str], object]] | None:
    """A function that shows a text in the notebook and returns a function that replaces it; None outside a notebook."""
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
    """One line of a notebook's output with the progress; `display` is as from `notebook_display`."""

    def __init__(
        self, display: Callable[[str], Callable[[str], object]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._display = display
        self._clock = clock
        self._replace: Callable[[str], object] | None = None
        self._changed = -math.inf

    def __call__(self, progress: "SimulationProgress") -> None:
        """Shows the progress at most five times a second, and always at the end."""
        now = self._clock()
        if now - self._changed < _SECONDS and progress.done < progress.total:
            return
        self._changed = now
        if self._replace is None:
            self._replace = self._display(line(progress))
        else:
            self._replace(line(progress))


def line(progress: "SimulationProgress") -> str:
    """The progress in one line."""
    numbers: list[tuple[str, str, Callable[[float], str]]] = [
        ("accuracy/mean", "mean accuracy", percent),
        ("accuracy/worst5", "worst 5 %", percent),
        ("loss/train", "training loss", lambda value: f"{value:.4g}"),
    ]
    parts = [
        f"{label} {format_(progress.metrics[name])}" for name, label, format_ in numbers if name in progress.metrics
    ]
    left = (progress.total - progress.done) / progress.rate if progress.rate > 0 else math.inf
    rest = f", {left:.0f} s left" if 0 < left < math.inf else ""
    return ", ".join(
        [f"{progress.done} of {counted(progress.total, 'round')}: {progress.rate:.1f} rounds/s{rest}", *parts]
    )


@contextmanager
def bar(console: "Console") -> Iterator[Tell]:
    """A function that shows the progress as a bar; without a terminal it shows nothing."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns: tuple[Any, ...] = ("rounds", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]:.1f}/s"))
    hidden = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as drawn:
        task = drawn.add_task("rounds", total=None, rate=0.0)
        yield lambda now: drawn.update(task, completed=now.done, total=now.total, rate=now.rate)
