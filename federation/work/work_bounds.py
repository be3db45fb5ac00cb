"""The bounds of an owner on the work of one assignment, and the first of them that some work exceeds.

Workers decline by these checks. Coordinators make them before a run, with the bounds that workers have told.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from federation.work.base import Work

LARGEST_BOUND = 2**53
"""The largest number that a worker tells."""

Problem = tuple[str, str]
"""The reason of a decline, and its message."""


@dataclass(frozen=True, kw_only=True)
class WorkBounds:
    """The bounds of an owner; the defaults allow all work.

    Attributes:
        samples: the fewest different training samples that an update or a gradient is made from.
        steps: the fewest optimiser steps in an update.
        max_steps: the most of them; 0 is any number.
        max_epochs: the most passes over the training samples for an update; 0 is any number.
        max_bytes: the most bytes that one assignment moves; 0 is any number.
        members: the fewest clients that are asked, with this one.
        rows: the most rows in an update; 0 is one for each objective that is served.

    Raises:
        ValueError: a number is below 0, above `LARGEST_BOUND`, or none.
    """

    samples: int = 0
    steps: int = 0
    max_steps: int = 0
    max_epochs: float = 0.0
    max_bytes: int = 0
    members: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value <= LARGEST_BOUND:  # nor is NaN
                raise ValueError(f"{item.name} = {value}: a bound is a number from 0 to {LARGEST_BOUND}")

    def problem_of_members(self, members: int) -> Problem | None:
        """The problem of an assignment that this number of clients gets; None if there is none."""
        if members >= self.members or self.members <= 1:
            return None
        return "limit:members", f"{members} clients are asked; this worker takes part with at least {self.members}"

    def problem_of_bytes(self, moved: int) -> Problem | None:
        """The problem of an assignment that moves this number of bytes; None if there is none."""
        if not self.max_bytes or moved <= self.max_bytes:
            return None
        text = f"{moved} bytes would be moved; this worker moves at most {self.max_bytes} for an assignment"
        return "limit:bytes", text

    def problem_of_work(self, work: Work, *, samples: int, objectives: int) -> Problem | None:
        """The problem of work for a client with this number of training samples, which serves so many objectives.

        None if there is none.
        """
        return next(self._problems(work, samples, objectives), None)

    def _problems(self, work: Work, samples: int, objectives: int) -> Iterator[Problem]:
        if (demand := work.demand(samples)) is None:
            return
        rows, steps = self.rows or objectives, f"{demand.steps} steps are asked for; this worker does at"
        if demand.rows > rows:
            yield "limit:rows", f"{demand.rows} rows are asked for; this worker gives at most {rows}"
        if self.max_steps and demand.steps > self.max_steps:
            yield "limit:steps", f"{steps} most {self.max_steps}"
        if self.max_epochs and demand.epochs > self.max_epochs:
            text = f"{demand.epochs:g} passes over the samples are asked for; this worker makes at most"
            yield "limit:epochs", f"{text} {self.max_epochs:g}"
        if demand.rows and demand.steps < self.steps:
            yield "limit:steps", f"{steps} least {self.steps}"
        if demand.samples < self.samples:
            text = f"it would be made from {demand.samples} of {samples} samples; this worker uses at least"
            yield "limit:samples", f"{text} {self.samples}"
