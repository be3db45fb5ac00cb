"""Statistics as a session of the mode `sum`: the totals over the members, and no member's own numbers."""

from collections.abc import Generator, Sequence

import numpy as np

from federation.aggregation.interface import TooFewUpdatesError, Vector
from federation.aggregation.phases import AlgorithmPhase, Replies, RoundContext
from federation.aggregation.secure.private_rule import drawn, make_setting
from federation.aggregation.secure.session import secure_sum
from federation.aggregation.secure.settled import Cohort, Sum
from federation.statistics.data_columns import ColumnError
from federation.statistics.result import StatisticsResult, summed
from federation.statistics.words import word_count
from federation.work.statistics.work import Statistics


def description(
    context: RoundContext, work: Statistics, clients: Sequence[str]
) -> Generator[AlgorithmPhase, Replies, tuple[StatisticsResult, Sum]]:
    """The result of one sum of the members' statistics, and the sum.

    Raises:
        Voided, TooFewUpdatesError: as `secure_sum`; also if no data can have these totals.
    """
    private = context.private
    if private is None:
        raise ValueError("the run has no private rounds")
    invited = drawn(context, (name for name in clients if name in private.keys and name not in private.named))
    if not invited:
        raise TooFewUpdatesError("no member can describe its data")
    setting = make_setting(context, private, work.name, word_count(work.columns, work.bins), invited)

    def ones(cohort: Cohort) -> Vector:
        return np.ones(len(cohort.members))

    total = yield from secure_sum(setting, ones)
    try:
        found = summed(total.words.astype(np.uint64), total.record.survivors, work.columns, work.bins, work.splits)
    except ColumnError as error:
        # Section 2e: some member has sent what no data have; nobody can tell which one.
        raise TooFewUpdatesError(f"statistics: {error}") from error
    return found, total
