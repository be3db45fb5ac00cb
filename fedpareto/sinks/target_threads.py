"""Takes the rounds of a run to its targets, each on a thread of its own: a target that hangs delays no other."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from federation.plugins import PluginError
from federation.text import counted
from fedpareto.sinks.sink import FollowedRun, RoundNumbers, RunEnd, Sink, SinkError
from fedpareto.sinks.targets import SinkTarget

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts to reach a target
_PATIENCE = 300.0  # seconds that a target may take for one call after the run has ended


@dataclass(frozen=True)
class Delivered:
    """What a target has in the end: its rounds, and what it lacks, in words; empty if it lacks nothing."""

    target: str
    rounds: int
    problem: str = ""


class Deliveries:
    """The targets of one run. Rounds that have ended are kept until the end: a target may be away for long."""

    def __init__(
        self,
        run: FollowedRun,
        targets: Sequence[SinkTarget],
        tell: Callable[[str], object],
        *,
        pause: float = _FIRST_PAUSE,
    ) -> None:
        """Starts the threads. `tell` is told, from any of them, when a target cannot be reached, and when it can."""
        self.run = run
        self.changed = threading.Condition()
        self.rounds: list[RoundNumbers] = []
        self.end: RunEnd | None = None
        self._targets = [_Delivery(self, target, tell, pause) for target in targets]
        for target in self._targets:
            threading.Thread(target=target.work, name=f"sink-{target.target.name}", daemon=True).start()

    def add(self, numbers: RoundNumbers) -> None:
        """Takes a round that has ended, in order; one that was added before is left out."""
        with self.changed:
            if numbers.round == len(self.rounds):
                self.rounds.append(numbers)
                self.changed.notify_all()

    @property
    def shown(self) -> list[str]:
        """The targets for people."""
        return [each.target.shown for each in self._targets]

    @property
    def takes_files(self) -> bool:
        """True if a target takes the model, its card and the report."""
        return any(each.target.kind.takes_files for each in self._targets)

    def finish(self, end: RunEnd, *, patience: float = _PATIENCE) -> list[Delivered]:
        """Says that the run has ended, and waits for the targets.

        A target that cannot be reached now gets one more attempt; one that does not return from a call for `patience`
        seconds is left to itself.
        """
        with self.changed:
            self.end = end
            self.changed.notify_all()
            begun = time.monotonic()
            for each in self._targets:
                while not each.over and (left := max(each.since, begun) + patience - time.monotonic()) > 0:
                    self.changed.wait(left)
        return [each.delivered() for each in self._targets]


class _Delivery:
    """One target, on its thread."""

    def __init__(
        self, all_targets: Deliveries, target: SinkTarget, tell: Callable[[str], object], pause: float
    ) -> None:
        self.target = target
        self.over = False
        self.since = time.monotonic()  # since when the present call lasts
        self._all = all_targets
        self._tell = tell
        self._first_pause = self._pause = pause
        self._next = 0  # the first round that the target lacks
        self._problem = ""
        self._away = False

    def work(self) -> None:
        """Goes on until the target has everything, or cannot get it."""
        try:
            while not self._attempt():
                self._wait()
        except (SinkError, PluginError) as error:
            self._problem = self.target.told(error)
            self._tell(f"{self.target.shown} gets nothing more: {self._problem}")
        finally:
            with self._all.changed:
                self.over = True
                self._all.changed.notify_all()

    def delivered(self) -> Delivered:
        """What the target has, once this is over, or if it hangs."""
        problem = self._problem if self.over else "it does not answer"
        return Delivered(self.target.shown, self._next, problem)

    def _attempt(self) -> bool:
        """Takes everything to the target. True at the end, False if the target cannot be reached now."""
        last = self._all.end is not None  # nothing more will come: the last attempt if this one fails
        sink: Sink | None = None
        try:
            sink = self.target.make()
            self._next = sink.open(self._all.run)
            while not isinstance(following := self._following(), RunEnd):
                sink.write(following)
                self._next = following.round + 1
                self._answers()
            sink.finish(following)
            self._answers()
        except (SinkError, PluginError):
            raise
        except (Exception, SystemExit) as error:
            self._lost(error)
            return last
        finally:
            if sink is not None:
                with suppress(Exception, SystemExit):
                    sink.close()
        return True

    def _following(self) -> RoundNumbers | RunEnd:
        """Waits for the next round that the target lacks, or for the run's end if it lacks none."""
        with self._all.changed:
            while self._next >= len(self._all.rounds):
                if self._all.end is not None:
                    self.since = time.monotonic()
                    return self._all.end
                self._all.changed.wait()
            self.since = time.monotonic()
            return self._all.rounds[self._next]

    def _answers(self) -> None:
        """Notes that the target has taken something: opening it may work while this does not."""
        self.since = time.monotonic()
        if self._away:
            self._tell(f"{self.target.shown} answers again")
        self._away, self._problem, self._pause = False, "", self._first_pause

    def _lost(self, error: BaseException) -> None:
        """Says once that the target cannot be reached."""
        self._problem = self.target.told(error)
        if not self._away:
            have = counted(self._next, "round")
            self._tell(
                f"{self.target.shown} cannot be reached, it has {have}; trying again, the others go on: {self._problem}"
            )
        self._away = True

    def _wait(self) -> None:
        """Waits before the next attempt; not after the run's end."""
        deadline = time.monotonic() + self._pause
        with self._all.changed:
            while self._all.end is None and (left := deadline - time.monotonic()) > 0:
                self._all.changed.wait(left)
            self.since = time.monotonic()
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
