"""What the record of a round must have as metrics, while it is verified: each edit of them is refused."""

import math
from collections.abc import Iterable, Iterator, Mapping

import pytest
from sqlalchemy import select

from coordinator.services.checks.envelope_checks import EnvelopeChecks
from coordinator.services.checks.verified_rounds import RoundsCheck
from federation.aggregation.metrics.round_metrics import RoundMetrics
from federation.record.metric_definitions import DEFINITIONS
from storage.models import Round
from tests.stage import Stage

MEASURED = {"bytes/down", "iterations", "residual"}  # by the coordinator alone
Compared = tuple[RoundMetrics, dict[str, float]]


def watched(patch: pytest.MonkeyPatch) -> list[Compared]:
    """What each round that is verified from now on must have on record, and has."""
    found: list[Compared] = []
    compare = RoundMetrics.problem

    def problem(self: RoundMetrics, recorded: Mapping[str, float]) -> str:
        found.append((self, dict(recorded)))
        return compare(self, recorded)

    patch.setattr(RoundMetrics, "problem", problem)
    return found


def edits(recorded: Mapping[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    """The metrics of a round with one of them removed, and with one that the round has not."""
    for name in recorded:
        yield name, {other: value for other, value in recorded.items() if other != name}
    for name in {*DEFINITIONS, "loss/test/left", "weight/nobody", "metric/auc/mean", "made-up"} - recorded.keys():
        if "<" not in name:
            yield name, {**recorded, name: 0.5}


def check_exact(compared: Iterable[Compared]) -> None:
    """Each metric can be neither changed nor removed, and none can be added."""
    for metrics, recorded in list(compared):
        assert metrics.problem(recorded) == ""
        for name, edited in edits(recorded):
            assert metrics.problem(edited), name
        for name in recorded.keys() - MEASURED:
            for value in (recorded[name] + 0.001, recorded[name] - 0.001, math.nan, math.inf):
                said = metrics.problem({**recorded, name: value})
                assert said.startswith(f"the record says {name} = {value!r}"), said


def differences(stage: Stage, run: str) -> list[str]:
    """What a coordinator finds in the opened rounds of a run."""
    home = stage.served.home
    checks = EnvelopeChecks(home.federation_id, home.signing.chain)
    with stage.served.database.read() as session:
        check = RoundsCheck(session, checks, stage.blobs)
        rows = session.scalars(select(Round).where(Round.run_id == run).order_by(Round.number)).all()
        return [problem for row in rows for problem in check.problems(row, checks.of_round(session, row))]
