"""The numbers of a run over its rounds and members, in arrays: what each page about a run is made of.

Here alone an exported round becomes numbers. Rounds are read once and in any order, and no message with every member's
part is kept: a run of a thousand rounds and a hundred members takes a few megabytes.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from federation.record.metric_definitions import OWN, SCORED
from federation.record.results import accepted
from federation.v1.admin_pb2 import (
    ExportRoundsResponse,
    MemberSummary,
    Objectives,
    Participation,
    PhaseProgress,
    RoundSummary,
)
from federation.v1.common_pb2 import AssignmentState, RoundState
from fedpareto.formatting import natural

Array = NDArray[np.float32]
S = TypeVar("S", bound=np.generic)
M = TypeVar("M", bound=Message)


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
FAILURES = (Outcome.DECLINED, Outcome.REFUSED, Outcome.MISSING)
_ENDED = (RoundState.ROUND_STATE_COMPLETED, RoundState.ROUND_STATE_SKIPPED)
_SPARE = 64  # columns that an array grows by at least


@dataclass(frozen=True)
class MemberPart:
    """A member's part in a round that asked it for more than an evaluation.

    Attributes:
        counts: whether its reply entered the step.
        reason: why it did not; empty if it did.
        samples: on which it trained, as it states; None without a reply.
        payload: bytes that it sent.
        answered: whether it answered a phase.
        numbers: NaN where one is not known.
        epsilon: that its own noise has spent, as it states; None without noise.
    """

    name: str
    outcome: Outcome
    counts: bool
    reason: str
    samples: int | None
    payload: int
    answered: bool
    numbers: Mapping[MemberNumber, float]
    epsilon: float | None

    @property
    def weighed(self) -> bool:
        """True if it has a weight or a length: its update was read, or privacy hides both."""
        return bool(self.numbers[MemberNumber.WEIGHT] or self.numbers[MemberNumber.NORM])


def parts_of(item: ExportRoundsResponse) -> Iterator[MemberPart]:
    """The members' parts in a round, by name."""
    for part in item.participations:
        yield MemberPart(
            name=part.client_id,
            outcome=_outcome(part),
            counts=accepted(item.phases, part),
            reason=part.reason,
            samples=part.samples if part.envelope else None,
            payload=part.payload_bytes,
            answered=bool(part.answered),
            numbers={
                MemberNumber.LOSS: part.loss_before,
                MemberNumber.NORM: part.update_norm,
                MemberNumber.WEIGHT: part.weight,
                MemberNumber.COEFFICIENT: part.coefficient,
                MemberNumber.COSINE: part.cosine,
            },
            epsilon=part.privacy.epsilon if part.HasField("privacy") else None,
        )


@dataclass(frozen=True)
class RoundLine:
    """A round in numbers, with its failures.

    Attributes:
        summary: the round as the coordinator sums it up, with its metrics.
        mean: of the members' scores.
        worst: of them.
        failed: of each member whose reply was missing or did not count, the outcome and the reason.
        unneeded: the members without whose reply the round went on, each with the reason.
        senders: the members that sent a payload; likewise `fetchers`, which got the model to answer or to evaluate.
        phases: of the round, in order; empty until it is read with every member's part.
        objectives: of a task that has several.
    """

    summary: RoundSummary
    mean: float
    worst: float
    failed: Mapping[str, tuple[Outcome, str]] = field(default_factory=dict)
    unneeded: Mapping[str, str] = field(default_factory=dict)
    senders: int = 0
    fetchers: int = 0
    phases: Sequence[PhaseProgress] = ()
    objectives: Objectives = field(default_factory=Objectives)

    @property
    def number(self) -> int:
        """The round, from 0."""
        return self.summary.round

    @property
    def state(self) -> str:
        """COMPLETED or SKIPPED."""
        return RoundState.Name(self.summary.state).removeprefix("ROUND_STATE_")

    @property
    def has_failed(self) -> bool:
        """True if the round made no step, or a member failed in it."""
        return self.state == "SKIPPED" or bool(self.failed)


@dataclass(frozen=True)
class RoundScores:
    """What the members measured after a round: by member, numbers with names such as "test/accuracy"."""

    round: int
    scores: Mapping[str, Mapping[str, float]]


class RunTable:
    """The rounds of a run that have ended and were read, with the numbers of each member in arrays.

    `scored` names what the members' scores are: a split, and the metric that stops the run (`preferred`), "accuracy" or
    "loss", as the first round has it that measured one. `evaluation` is the newest that is known.
    """

    def __init__(self, preferred: str = "") -> None:
        self.preferred = preferred  # such as "auc"; empty for accuracy, else loss
        self.members: list[str] = []
        self.lines: dict[int, RoundLine] = {}
        self.whole: set[int] = set()  # the rounds that were read with every client's part
        self.scored: tuple[str, str] | None = None
        self.document = b""  # of the result of a run that describes data, JSON
        self.evaluation: RoundScores | None = None
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
        parts = list(parts_of(item))
        self._make_room(number, [part.name for part in parts] + [scored.client_id for scored in item.scores])
        self.undisclosed.update(summary.undisclosed)
        failed: dict[str, tuple[Outcome, str]] = {}
        unneeded: dict[str, str] = {}
        for part in parts:
            at = self._index[part.name]
            self._outcomes[at, number] = OUTCOMES.index(part.outcome)
            if part.outcome in FAILURES:
                failed[part.name] = part.outcome, part.reason
            elif part.outcome is Outcome.NOT_NEEDED:
                unneeded[part.name] = part.reason
            if part.counts:
                self.samples[part.name] = part.samples or 0
            for measure, value in part.numbers.items():
                if measure is MemberNumber.LOSS or part.weighed:
                    self._arrays[measure][at, number] = value
        self._add_scores(item, number)
        self.document = item.document or self.document
        self.stop = max(self.stop, number + 1)
        fetchers = {part.name for part in parts if part.answered}
        fetchers.update(scored.client_id for scored in item.scores)
        self.lines[number] = self._line(
            summary,
            failed=failed,
            unneeded=unneeded,
            senders=sum(part.payload > 0 for part in parts),
            fetchers=len(fetchers),
            phases=[_copied(phase) for phase in item.phases],
            objectives=_copied(item.objectives),
        )
        self.whole.add(number)
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
            self.lines[summary.round] = self._line(summary)
            self.stop = max(self.stop, summary.round + 1)
            self.version += 1

    def _add_scores(self, item: ExportRoundsResponse, number: int) -> None:
        scores = {scored.client_id: dict(scored.scores) for scored in item.scores}
        if not scores:
            return
        if self.evaluation is None or number > self.evaluation.round:
            self.evaluation = RoundScores(number, scores)
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

    def _line(self, summary: RoundSummary, **read: Any) -> RoundLine:
        metrics, measure = summary.metrics, self.scored[1] if self.scored else "accuracy"
        names = (measure, f"{OWN}{measure}", "accuracy", "loss")
        name = next((name for name in names if f"{name}/mean" in metrics), "loss")
        mean = metrics.get(f"{name}/mean", math.nan)
        if name == "loss":
            mean = next((metrics[f"loss/{s}"] for s in SCORED if f"loss/{s}" in metrics), math.nan)
        return RoundLine(_copied(summary), mean, metrics.get(f"{name}/worst", math.nan), **read)

    def snapshot(self) -> "RunTable":
        """The table as it is: what another thread adds to this one is not in it."""
        with self._lock:
            copy = RunTable(self.preferred)
            for name in ("scored", "evaluation", "stop", "version", "_outcomes"):
                setattr(copy, name, getattr(self, name))
            for name in ("members", "lines", "whole", "undisclosed", "samples", "_index", "_arrays"):
                setattr(copy, name, getattr(self, name).copy())
        return copy

    # --- showing

    @property
    def numbers(self) -> list[int]:
        """The rounds that are known, in order."""
        return sorted(self.lines)

    @property
    def newest_line(self) -> RoundLine | None:
        """The last round that is known; None without any."""
        return self.lines[max(self.lines)] if self.lines else None

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

    def summaries(self) -> list[MemberSummary]:
        """How the rounds ended for each member that was asked, and why its reply last did not come or did not count."""
        reasons = {name: (n, why) for n in self.numbers for name, (_, why) in self.lines[n].failed.items()}
        summaries = []
        for name, row in zip(self.members, self.outcomes(), strict=True):
            counts = {outcome: int((row == OUTCOMES.index(outcome)).sum()) for outcome in OUTCOMES[1:]}
            summary = MemberSummary(client_id=name, asked=sum(counts.values()))
            for outcome, count in counts.items():
                setattr(summary, outcome.replace("-", "_"), count)
            if name in reasons:
                summary.last_reason_round, summary.last_reason = reasons[name]
            summaries.append(summary)
        return [summary for summary in summaries if summary.asked]

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


def _copied(message: M) -> M:
    """A message of its own: a part of another one would keep all of that in memory."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _outcome(part: Participation) -> Outcome:
    if part.state == AssignmentState.ASSIGNMENT_STATE_CANCELLED:
        return Outcome.NOT_NEEDED if part.reason.startswith(("not-needed", "run-ended")) else Outcome.MISSING
    return _STATES.get(part.state, Outcome.NONE)
