"""The table of a run: the same numbers in whatever order its rounds are read, and the scores that stop the run."""

import math

import numpy as np
import pytest

from federation.v1.admin_pb2 import ExportRoundsResponse
from federation.v1.common_pb2 import AssignmentState, RoundState
from fedpareto.run_table import MemberNumber, Outcome, RunTable

ENDS = (AssignmentState.ASSIGNMENT_STATE_FULFILLED, AssignmentState.ASSIGNMENT_STATE_DECLINED)


def a_round(number: int, *, over: bool = True) -> ExportRoundsResponse:
    """Ann replies in each round; ben, who is asked from round 1 on, declines in odd rounds."""
    item = ExportRoundsResponse()
    item.summary.round = number
    item.summary.state = RoundState.ROUND_STATE_COMPLETED if over else RoundState.ROUND_STATE_OPEN
    item.summary.metrics.update({"accuracy/mean": 0.1, "metric/auc/mean": 0.7, "metric/auc/worst": 0.6})
    item.phases.add(phase=0, kind="train", decides=True)
    for name in ("ann", "ben")[: 1 + (number > 0)]:
        end = ENDS[name == "ben" and number % 2]
        part = item.participations.add(client_id=name, state=end, reason="disk: full" if end == ENDS[1] else "")
        part.loss_before = math.nan
        if end == ENDS[0]:
            part.weight, part.update_norm, part.samples, part.envelope = 0.5, number + 1.0, 10, "digest"
            part.answered.append(0)
        scores = {"test/accuracy": 0.5, "test/auc": number / 10, "validation/auc": 0.9}
        item.scores.add(client_id=name, scores=scores)
    return item


def table_of(*order: int, preferred: str = "") -> RunTable:
    table = RunTable(preferred)
    for number in order:
        table.add(a_round(number))
    return table


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 3, 0, 1), (0, 1, 2, 3, 3)])
def test_rounds_that_are_read_in_any_order_make_the_same_table(order: tuple[int, ...]) -> None:
    first, other = table_of(0, 1, 2, 3), table_of(*order)
    assert (other.numbers, other.names, other.whole) == ([0, 1, 2, 3], ["ann", "ben"], {0, 1, 2, 3})
    for measure in MemberNumber:
        for name in first.names:
            np.testing.assert_array_equal(first.row(measure, name), other.row(measure, name))
    assert {one.client_id: one for one in first.summaries()} == {one.client_id: one for one in other.summaries()}
    assert first.evaluation == other.evaluation


def test_a_summary_of_a_member_counts_its_rounds_and_has_its_last_reason() -> None:
    ann, ben = table_of(0, 1, 2, 3).summaries()
    assert (ann.asked, ann.replied, ann.last_reason) == (4, 4, "")
    assert (ben.asked, ben.replied, ben.declined) == (3, 1, 2)
    assert (ben.last_reason, ben.last_reason_round) == ("disk: full", 3)
    assert table_of(0, 1).outcomes_of("ben", 9) == [(1, Outcome.DECLINED)]


def test_the_scores_and_their_mean_are_those_of_the_metric_that_stops_the_run() -> None:
    table = table_of(0, 1, 2, preferred="auc")
    assert table.scored == ("test", "auc")
    assert table.first_and_last()[1]["ann"] == pytest.approx(0.2)
    assert (table.lines[2].mean, table.lines[2].worst) == (0.7, 0.6)
    assert table_of(0).scored == ("test", "accuracy")
    assert table_of(0).lines[0].mean == 0.1


def test_a_round_that_goes_on_is_not_in_the_table() -> None:
    table = table_of(0)
    table.add(a_round(1, over=False))
    assert table.numbers == [0]


def test_what_is_added_later_is_not_in_a_snapshot() -> None:
    table = table_of(0)
    seen = table.snapshot()
    for number in range(1, 200):  # the arrays grow meanwhile
        table.add(a_round(number))
    assert (seen.numbers, seen.names, seen.stop, seen.whole, seen.scored) == (
        [0],
        ["ann"],
        1,
        {0},
        ("test", "accuracy"),
    )
    assert {measure: seen.values(measure).shape for measure in MemberNumber} == dict.fromkeys(MemberNumber, (1, 1))
    assert [summary.asked for summary in seen.summaries()] == [1]
    assert seen.evaluation is not None
    assert seen.evaluation.round == 0
