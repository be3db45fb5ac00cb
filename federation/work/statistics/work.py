"""Statistics of columns of the client's data: no model is read and nothing is trained, so no update can follow."""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from federation.spec.computation import check_splits
from federation.statistics.data_columns import Column, ColumnError, check_columns
from federation.statistics.held import HeldData, chosen, held
from federation.statistics.rules import MemberRules
from federation.statistics.sums import ColumnSums, encoded, sums_of, width
from federation.work.base import Result, RowSchema, Shape, Shows, Terms, Work, WorkError, WorkingClient

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
        began, rules = time.perf_counter(), self._rules(client)
        if client.data is None:
            raise WorkError("this client's trainer keeps its data to itself", reason="statistics:data")
        try:
            samples, found = self.described(client.data)
        except ColumnError as error:
            raise WorkError(str(error), reason="statistics:column", wire=error.wire) from error
        if (problem := rules.problem(samples, self.bins)) is not None:
            reason, message = problem
            raise WorkError(message, reason=reason)
        told = encoded(samples, [rules.told(sums) for sums in found], self.columns)
        rows = {ROW: np.frombuffer(told.astype("<f8").tobytes(), dtype=np.uint8)}
        return replace(computed, rows=rows, seconds=time.perf_counter() - began)

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

    def _rules(self, client: WorkingClient) -> MemberRules:
        rules = client.site.statistics.get(client.origin.task)
        if rules is None:
            raise WorkError(
                f"the owner tells no statistics of {client.origin.task} in the open (statistics.open in policy.toml)",
                reason="policy:statistics",
            )
        return rules
