"""Statistics of columns of the client's data: no model is read and nothing is trained, so no update can follow."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.digests import digest
from federation.spec.computation import check_splits
from federation.statistics.data_columns import Column, ColumnError, check_columns
from federation.statistics.held import HeldData, chosen, held
from federation.statistics.moved import Landmarks
from federation.statistics.rules import MemberRules
from federation.statistics.sums import ColumnSums, empty, encoded, sums_of, width
from federation.statistics.words import MOST_SAMPLES, Integers, to_words
from federation.work.base import Result, RowSchema, Shape, Shows, Terms, Work, WorkError, WorkingClient
from federation.work.statistics import one_sum

if TYPE_CHECKING:
    from federation.spec.run_spec import RunSpec

ROW = "statistics"


@dataclass(frozen=True, kw_only=True)
class Statistics(Work):
    """Describe columns of the client's data. The payload has `encoded` of them as bytes, little-endian."""

    name: ClassVar[str] = "statistics"
    doing: ClassVar[str] = "describing the data"
    decides: ClassVar[bool] = False
    needs_samples: ClassVar[bool] = False
    shows: ClassVar[Shows] = Shows.STATISTICS

    columns: tuple[Column, ...]
    bins: int
    splits: tuple[str, ...]

    @classmethod
    def of(cls, spec: "RunSpec") -> "Statistics":
        """The work of a run of the kind "statistics"."""
        asked = spec.statistics
        return cls(columns=asked.described, bins=asked.bins, splits=asked.splits)

    @classmethod
    def terms(cls, spec: "RunSpec") -> Terms:
        return Terms(spec.statistics.deadline_seconds, spec.selection.quorum)

    @property
    def payload(self) -> tuple[RowSchema, ...]:
        """The rows of a reply."""
        return (RowSchema(ROW, 8 * width(self.columns, self.bins), "U8"),)

    @property
    def from_round_model(self) -> bool:
        return False

    def rows(self, shape: Shape) -> tuple[RowSchema, ...]:
        try:
            check_splits(self.splits)
            check_columns(self.columns, self.bins)
        except ValueError as error:
            raise WorkError(str(error)) from None
        return self.payload

    def computation(self, client: WorkingClient) -> None:
        """None: no model is needed. Raises WorkError where the owner does not tell statistics in the open."""
        self._rules(client)

    def answer(self, client: WorkingClient, computed: Result) -> Result:
        """The statistics, by the rules of the owner."""
        began = time.perf_counter()
        samples, sums = self._told(client, self._rules(client), self.counted)
        told = encoded(samples, sums, self.columns)
        one_sum.tell(client, self.question)
        rows = {ROW: np.frombuffer(told.astype("<f8").tobytes(), dtype=np.uint8)}
        return replace(computed, rows=rows, seconds=time.perf_counter() - began)

    def counted(self, data: HeldData, rules: MemberRules) -> tuple[int, list[ColumnSums]]:
        """The number of samples, and the sums of each column as they are told in the open. Raises ColumnError."""
        samples, found = self.described(data)
        return samples, [rules.told(sums) for sums in found]

    def described(self, data: HeldData) -> tuple[int, list[ColumnSums]]:
        """The number of samples, and the sums of each column, without any rule. Raises ColumnError."""
        samples, found = 0, list[ColumnSums]()
        for split in self.splits:
            for x, y in data.parts(split):
                table = held(x, y, data.columns)
                sums = [sums_of(values, column, self.bins) for column, values in chosen(self.columns, table)]
                found = [one + other for one, other in zip(found, sums, strict=True)] if found else sums
                samples += len(y)
        if not found:  # no sample
            nothing = np.empty(0)
            found = [sums_of(nothing, column, self.bins) for column in self.columns]
        return samples, found

    @property
    def question(self) -> str:
        """The digest of all that is asked for: columns, ranges, classes, bins and splits."""
        columns = [[one.name, one.low, one.high, one.classes] for one in self.columns]
        return digest(json.dumps([columns, self.bins, self.splits], ensure_ascii=False).encode())

    def words(self, client: WorkingClient) -> Integers:
        """The statistics for a private sum, by the rules of the owner: `to_words`. Raises WorkError."""
        samples, told = self._told(client, client.site.summed[client.origin.task], self.moved)
        if samples > MOST_SAMPLES:
            message = f"a private sum takes at most {MOST_SAMPLES} samples of a member"
            raise WorkError(message, reason="statistics:samples")
        return self.in_words(samples, told)

    def in_words(self, samples: int, sums: Sequence[ColumnSums]) -> Integers:
        """The words of these samples, whose sums of each column are given."""
        return to_words(samples, sums, self.columns)

    def moved(self, data: HeldData, rules: MemberRules) -> tuple[int, list[ColumnSums]]:
        """The number of samples, and the sums of each column as a private sum has them. Raises ColumnError."""
        samples, found = self.described(data)
        if rules.smallest == 1:
            return samples, [rules.told(sums) for sums in found]
        marks = [Landmarks(column, self.bins, rules.smallest) for column in self.columns]
        for part in self._parts(data):
            for mark, values in zip(marks, part, strict=True):
                mark.add(values)
        moves = [mark.moves() for mark in marks]
        told: list[ColumnSums | None] = [None] * len(moves)
        for part in self._parts(data):
            for at, (move, values) in enumerate(zip(moves, part, strict=True)):
                before, sums = told[at], None if move is None else move.told(values)
                told[at] = sums if before is None or sums is None else before + sums
        return samples, [empty(sums) if one is None else one for one, sums in zip(told, found, strict=True)]

    def _parts(self, data: HeldData) -> Iterator[list[NDArray[np.float64]]]:
        """The values of each column, in parts."""
        for split in self.splits:
            for x, y in data.parts(split):
                yield [values for _, values in chosen(self.columns, held(x, y, data.columns))]

    def _told(
        self,
        client: WorkingClient,
        rules: MemberRules,
        form: Callable[[HeldData, MemberRules], tuple[int, list[ColumnSums]]],
    ) -> tuple[int, list[ColumnSums]]:
        """The number of samples, and the sums of each column in a form, by these rules. Raises WorkError."""
        if client.data is None:
            raise WorkError("this client's trainer keeps its data to itself", reason="statistics:data")
        try:
            samples, found = form(client.data, rules)
            if (problem := rules.problem(samples, self.bins)) is not None:
                reason, message = problem
                raise WorkError(message, reason=reason)
            return samples, found
        except ColumnError as error:
            raise WorkError(str(error), reason="statistics:column", wire=error.wire) from error

    def _rules(self, client: WorkingClient) -> MemberRules:
        rules = client.site.statistics.get(client.origin.task)
        if rules is None:
            raise WorkError(
                f"the owner tells no statistics of {client.origin.task} in the open (statistics.open in policy.toml)",
                reason="policy:statistics",
            )
        return rules
