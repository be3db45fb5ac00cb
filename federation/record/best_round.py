"""The best round of a run, found while its rounds are read one after the other."""

import math
from collections.abc import Callable, Mapping

from federation.record.metric_definitions import SCORED

STOPS = "stop/best"


class BestSoFar:
    """The round that `export --best` takes by the metric that stops the run, or else by accuracy, or else by loss.

    With a metric that stops the run it is the round with the best value of it; without one that with the highest
    "accuracy/mean", or else with the lowest "loss/test". Of equals the round with the lower loss is taken, then the
    later one, as `best_round_of` does. It needs the memory of a few numbers, however many rounds a run has.
    """

    def __init__(self) -> None:
        self._stop_loss = ""
        self._stop: float | None = None
        self._stopping: _Candidate | None = None
        self._accurate: dict[str, _Candidate] = {}  # by the loss that decides between equals
        self._losses: set[str] = set()  # that a round has recorded
        self._lowest: _Candidate | None = None

    def add(self, number: int, metrics: Mapping[str, float], split: Callable[[], str]) -> None:
        """Reads the metrics of a round. Rounds come in ascending order.

        Args:
            number: of the round.
            metrics: that it has recorded.
            split: gives the split of the metric that stops the run, whose loss decides between equals. It is called
                once, for the first round that has recorded such a metric.
        """

        def recorded(name: str) -> float | None:
            value = metrics.get(name, math.nan)
            return value if math.isfinite(value) else None

        best = recorded(STOPS)
        if best is not None and best != self._stop:
            self._stop_loss = self._stop_loss or f"loss/{split()}"
            self._stop, self._stopping = best, None
        if self._stop is not None and recorded("stop/value") == self._stop:
            self._stopping = _better(self._stopping, _Candidate(self._stop, recorded(self._stop_loss), number))
        accuracy = recorded("accuracy/mean")
        for name in _LOSSES:
            loss = recorded(name)
            if loss is not None:
                self._losses.add(name)
            if accuracy is not None:
                candidate = _Candidate(accuracy, loss, number)
                self._accurate[name] = _better(self._accurate.get(name), candidate)
        if (loss := recorded("loss/test")) is not None:
            self._lowest = _better(self._lowest, _Candidate(-loss, loss, number))

    @property
    def number(self) -> int | None:
        """The number of the best round so far; None if none has been measured."""
        if self._stop is not None:
            found = self._stopping
        elif self._accurate:
            found = self._accurate[next((name for name in _LOSSES if name in self._losses), _LOSSES[0])]
        else:
            found = self._lowest
        return None if found is None else found.number


_LOSSES = tuple(f"loss/{split}" for split in SCORED)


class _Candidate:
    """A round with its rank; a higher rank is better."""

    def __init__(self, value: float, loss: float | None, number: int) -> None:
        self.rank = value, -math.inf if loss is None else -loss, number
        self.number = number


def _better(one: _Candidate | None, other: _Candidate) -> _Candidate:
    return other if one is None or other.rank > one.rank else one
