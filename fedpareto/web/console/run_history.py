"""The numbers of a run over its rounds and members, in arrays: what the figures of the console are made of."""

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from federation.record.metric_definitions import SCORED
from federation.record.results import accepted
from federation.v1.admin_pb2 import ExportRoundsResponse, Participation, RoundSummary
from federation.v1.common_pb2 import AssignmentState, RoundState
from fedpareto.formatting import natural

Array = NDArray[np.float32]
S = TypeVar("S", bound=np.generic)


class MemberNumber(StrEnum):
    """A number of a member in a round; `LOSS` is that of the model before the round, as the member reports it."""

    SCORE = "score"
    WEIGHT = "weight"
    COSINE = "cosine"
    LOSS = "loss"
    NORM = "norm"
    COEFFICIENT = "coefficient"


class Outcome(StrEnum):
    """How a round ended for a member; the shapes of strips have these names."""

    NONE = ""
    REPLIED = "replied"
    DECLINED = "declined"
    REFUSED = "refused"
    MISSING = "missing"
    NOT_NEEDED = "not-needed"


OUTCOMES = tuple(Outcome)
_STATES: Mapping[int, Outcome] = {
    AssignmentState.ASSIGNMENT_STATE_FULFILLED: Outcome.REPLIED,
    AssignmentState.ASSIGNMENT_STATE_REFUSED: Outcome.REFUSED,
    AssignmentState.ASSIGNMENT_STATE_DECLINED: Outcome.DECLINED,
    AssignmentState.ASSIGNMENT_STATE_EXPIRED: Outcome.MISSING,
}
_ENDED = (RoundState.ROUND_STATE_COMPLETED, RoundState.ROUND_STATE_SKIPPED)
_SPARE = 64  # columns that an array grows by at least


@dataclass(frozen=True)
class RoundLine:
    """A round in numbers, with its failures, as a list of rounds shows it.

    `failed` maps each member whose reply was missing or did not count to its outcome and the reason.
    """

    number: int
    state: str
    reason: str
    started: float  # seconds since 1970; NaN if unknown
    seconds: float
    asked: int
    accepted: int
    mean: float  # of the members' accuracies, or of their losses
    worst: float
    worst_client: str
    failed: Mapping[str, tuple[Outcome, str]] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """True if the round made no step, or a member failed in it."""
        return self.state == "SKIPPED" or bool(self.failed)


class RunHistory:
    """The rounds of a run that have ended and were read, with the numbers of each member in arrays.

    Rounds may be read in any order. `scored` names what the members' scores are: a split and "accuracy" or "loss", of
    the first round that measured one.
    """

    def __init__(self, preferred: str = "") -> None:
        self.preferred = preferred  # the metric that stops the run, such as "auc"; empty for accuracy, else loss
        self.members: list[str] = []
        self.lines: dict[int, RoundLine] = {}
        self.whole: set[int] = set()  # the rounds that were read with every client's part
        self.scored: tuple[str, str] | None = None
        self.undisclosed: set[str] = set()
        self.samples: dict[str, int] = {}
        self._index: dict[str, int] = {}
        self._arrays = {measure: np.full((0, 0), np.nan, dtype=np.float32) for measure in MemberNumber}
        self._outcomes: NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)
        self.stop = 0  # one more than the largest round that was read
        self.version = 0
        self._lock = threading.Lock()  # two threads read a long run: one its past, and one its present

    # --- reading

    def add(self, item: ExportRoundsResponse) -> None:
        """Takes a round, unless it has not ended."""
        if item.summary.state in _ENDED:
            with self._lock:
                self._add(item)

    def _add(self, item: ExportRoundsResponse) -> None:
        summary = item.summary
        number = summary.round
        self._make_room(number, [part.client_id for part in item.participations] + [s.client_id for s in item.scores])
        self.undisclosed.update(summary.undisclosed)
        failed: dict[str, tuple[Outcome, str]] = {}
        for part in item.participations:
            at, outcome = self._index[part.client_id], _outcome(part)
            self._outcomes[at, number] = OUTCOMES.index(outcome)
            if outcome in (Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING):
                failed[part.client_id] = outcome, part.reason
            if accepted(item.phases, part):
                self.samples[part.client_id] = part.samples
            for measure, value in _numbers(part):
                self._arrays[measure][at, number] = value
        self._add_scores(item, number)
        self.lines[number] = self._line(summary, failed)
        self.whole.add(number)
        self.stop = max(self.stop, number + 1)
        self.version += 1

    def add_summary(self, summary: RoundSummary) -> None:
        """Takes a round in numbers, until it is read with every client's part."""
        if summary.state not in _ENDED:
            return
        with self._lock:
            if summary.round in self.lines:
                return
            self._make_room(summary.round, [])
            self.undisclosed.update(summary.undisclosed)
            self.lines[summary.round] = self._line(summary, {})
            self.stop = max(self.stop, summary.round + 1)
            self.version += 1

    def _add_scores(self, item: ExportRoundsResponse, number: int) -> None:
        scores = {scored.client_id: dict(scored.scores) for scored in item.scores}
        if not scores:
            return
        self.scored = self.scored or self._measured(scores)
        if self.scored is None:
            return
        name = "/".join(self.scored)
        for client, values in scores.items():
            at = self._index[client]
            self._arrays[MemberNumber.SCORE][at, number] = values.get(name, math.nan)

    def _measured(self, scores: Mapping[str, Mapping[str, float]]) -> tuple[str, str] | None:
        for measure in filter(None, (self.preferred, "accuracy", "loss")):
            for split in SCORED:
                if any(f"{split}/{measure}" in values for values in scores.values()):
                    return split, measure
        return None

    def _make_room(self, number: int, names: list[str]) -> None:
        for name in names:
            if name not in self._index:
                self._index[name] = len(self.members)
                self.members.append(name)
        rows, columns = self._outcomes.shape
        if len(self.members) > rows or number >= columns:
            rows = max(rows, len(self.members))
            columns = columns if number < columns else max(number + _SPARE, number * 5 // 4)
            for measure, array in self._arrays.items():
                self._arrays[measure] = _grown(array, rows, columns, np.nan)
            self._outcomes = _grown(self._outcomes, rows, columns, 0)

    def _line(self, summary: RoundSummary, failed: Mapping[str, tuple[Outcome, str]]) -> RoundLine:
        metrics = summary.metrics
        measure = self.scored[1] if self.scored else "accuracy"
        measure = measure if f"{measure}/mean" in metrics else "accuracy" if "accuracy/mean" in metrics else "loss"
        mean = metrics.get(f"{measure}/mean", math.nan)
        if measure == "loss":
            mean = next((metrics[f"loss/{s}"] for s in SCORED if f"loss/{s}" in metrics), math.nan)
        return RoundLine(
            number=summary.round,
            state=RoundState.Name(summary.state).removeprefix("ROUND_STATE_"),
            reason=summary.reason,
            started=summary.started.ToNanoseconds() / 1e9 if summary.HasField("started") else math.nan,
            seconds=summary.seconds,
            asked=summary.asked,
            accepted=summary.accepted,
            mean=mean,
            worst=metrics.get(f"{measure}/worst", math.nan),
            worst_client=summary.worst_client,
            failed=failed,
        )

    # --- showing

    @property
    def order(self) -> list[int]:
        """The rows of the members, by their names."""
        return sorted(range(len(self.members)), key=lambda at: natural(self.members[at]))

    @property
    def names(self) -> list[str]:
        """The members by name."""
        return sorted(self.members, key=natural)

    def missing(self, stop: int) -> Iterator[tuple[int, int]]:
        """The spans of rounds below `stop` that lack every client's part: the first, and one after the last."""
        first = None
        for number in range(stop + 1):
            absent = number < stop and number not in self.whole
            if absent and first is None:
                first = number
            elif not absent and first is not None:
                yield first, number
                first = None

    def values(self, measure: MemberNumber) -> Array:
        """The numbers of all members in all rounds, (members, rounds), in the order of `members`; NaN if unknown."""
        array: Array = self._arrays[measure][: len(self.members), : self.stop]
        return array

    def outcomes(self) -> NDArray[np.uint8]:
        """How each round ended for each member, (members, rounds), as places in `OUTCOMES`."""
        codes: NDArray[np.uint8] = self._outcomes[: len(self.members), : self.stop]
        return codes

    def outcomes_of(self, client: str, most: int) -> list[tuple[int, Outcome]]:
        """The last rounds that asked a member, at most `most`, with their outcomes, in order."""
        if client not in self._index:
            return []
        row = self.outcomes()[self._index[client]]
        asked = np.flatnonzero(row)[-most:]
        return [(int(number), OUTCOMES[row[number]]) for number in asked]

    def row(self, measure: MemberNumber, client: str) -> Array:
        """A member's numbers over the rounds; empty if it took no part."""
        at = self._index.get(client)
        none: Array = np.zeros(0, dtype=np.float32)
        return none if at is None else self.values(measure)[at]

    def first_and_last(self) -> tuple[dict[str, float], dict[str, float]]:
        """Each member's first and its last known score."""
        first, last = dict[str, float](), dict[str, float]()
        scores = self.values(MemberNumber.SCORE)
        for name, row in zip(self.members, scores, strict=True):
            known = row[np.isfinite(row)]
            if known.size:
                first[name], last[name] = float(known[0]), float(known[-1])
        return first, last

    @property
    def evaluated(self) -> int:
        """The number of rounds after which a member was evaluated."""
        return int(np.isfinite(self.values(MemberNumber.SCORE)).any(axis=0).sum())

    def newest(self, measure: MemberNumber, client: str) -> float:
        """A member's last known number."""
        row = self.row(measure, client)
        known = row[np.isfinite(row)]
        return float(known[-1]) if known.size else math.nan


def _grown(array: NDArray[S], rows: int, columns: int, fill: float) -> NDArray[S]:
    larger: NDArray[S] = np.full((rows, columns), fill, dtype=array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger


def _outcome(part: Participation) -> Outcome:
    if part.state == AssignmentState.ASSIGNMENT_STATE_CANCELLED:
        return Outcome.NOT_NEEDED if part.reason.startswith(("not-needed", "run-ended")) else Outcome.MISSING
    return _STATES.get(part.state, Outcome.NONE)


def _numbers(part: Participation) -> Iterator[tuple[MemberNumber, float]]:
    yield MemberNumber.LOSS, part.loss_before
    if part.weight or part.update_norm:
        yield MemberNumber.WEIGHT, part.weight
        yield MemberNumber.COSINE, part.cosine
        yield MemberNumber.NORM, part.update_norm
        yield MemberNumber.COEFFICIENT, part.coefficient
