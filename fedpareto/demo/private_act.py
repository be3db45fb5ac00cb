"""The fourth act: private rounds, in which one hospital cheats."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from federation.v1.admin_pb2 import GetRoundRequest, GetRunRequest
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.demo.demo_results import Ended, how_it_ended
from fedpareto.demo.guess import Guess, guess
from fedpareto.series import metric


@dataclass(frozen=True, kw_only=True)
class PrivateResult(Ended):
    """The result of the private run beside an open one with the same first model.

    Attributes:
        accuracy: the hospitals' mean after the last round, in [0, 1].
        open: the guess from the vectors of the open run's first round.
        masked: the guess from those of the private run's first round.
        named: the hospitals that were named as cheaters, each with the reason.
    """

    accuracy: float
    open: Guess
    masked: Guess
    named: Mapping[str, str]


def private(stub: AdminStub, home: Path, open_run: str, run_id: str) -> PrivateResult:
    """Reads the result from the record and the blobs of the coordinator in `home`."""
    run = stub.GetRun(GetRunRequest(run=run_id)).run
    named: dict[str, str] = {}
    for number in range(run.rounds_done):
        for void in stub.GetRound(GetRoundRequest(run=run_id, round=number)).voided:
            named |= {member.client_id: member.reason for member in void.named}
    return PrivateResult(
        **how_it_ended(run),
        accuracy=metric(run.latest, "accuracy/mean"),
        open=guess(stub, home, open_run, 0),
        masked=guess(stub, home, run_id, 0),
        named=named,
    )
