"""The results of the demo's runs, read from the coordinator's record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from federation.v1.admin_pb2 import AlertSeverity, Run
from federation.v1.admin_pb2_grpc import AdminStub
from fedpareto.admin_messages import name_of
from fedpareto.demo.hospitals import EIGHT, HOSPITALS, TWO
from fedpareto.run_table import MemberNumber
from fedpareto.series import mean, metric
from fedpareto.web.sections.shown_run import ShownRun


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run at its end: COMPLETED, or `reason` gives the cause. `model` is the digest of the final model."""

    run_id: str
    name: str
    algorithm: str
    state: str
    reason: str
    rounds_done: int
    model: str


@dataclass(frozen=True, kw_only=True)
class DemoResult(Ended):
    """The result of a run of the hospitals.

    Attributes:
        attacked: True if a hospital attacked.
        seconds: from its first round to its last.
        accuracy: of each hospital on its own test images after the last evaluated round, in [0, 1].
        cosine: of each hospital's update with the step, averaged over the rounds.
        alerts: about the run, without notices.
    """

    attacked: bool
    seconds: float
    accuracy: Mapping[str, float]
    cosine: Mapping[str, float]
    alerts: Sequence[str]

    @property
    def eight(self) -> float:
        """The mean accuracy of the eight hospitals with the usual scanner."""
        return mean(self.accuracy.get(name, math.nan) for name in EIGHT)

    @property
    def two(self) -> float:
        """The mean accuracy of the two hospitals with the other scanner."""
        return mean(self.accuracy.get(name, math.nan) for name in TWO)

    @property
    def mean(self) -> float:
        """The mean accuracy of all."""
        return mean(self.accuracy.values())


@dataclass(frozen=True, kw_only=True)
class Served(Ended):
    """The result of a run with two objectives.

    Attributes:
        accuracy: of each objective, after the last evaluated round, in [0, 1].
        loss: of each objective, likewise: its cross-entropy, without the scale.
        bytes_up: the bytes that one member sent in a round, on average.
    """

    accuracy: Mapping[str, float]
    loss: Mapping[str, float]
    bytes_up: float

    @property
    def worse(self) -> float:
        """The cross-entropy of the objective with the larger one."""
        return max(self.loss.values())


def how_it_ended(run: Run) -> dict[str, Any]:
    """The fields of `Ended`."""
    names = ("run_id", "name", "algorithm", "reason", "rounds_done", "model")
    return {**{name: getattr(run, name) for name in names}, "state": name_of(run, "state")}


def outcome(stub: AdminStub, run_id: str, *, attacked: bool) -> DemoResult:
    """Reads the result of a run of the hospitals."""
    data = ShownRun.read(stub, run_id)
    run, final = data.run, data.final
    over = run.HasField("started") and run.HasField("ended")
    return DemoResult(
        **how_it_ended(run),
        attacked=attacked,
        seconds=(run.ended.ToNanoseconds() - run.started.ToNanoseconds()) / 1e9 if over else math.nan,
        accuracy=final.values if final is not None and final.measure == "accuracy" else {},
        cosine={name: mean(data.row(MemberNumber.COSINE, name)) for name in HOSPITALS},
        alerts=[alert.message for alert in run.alerts if alert.severity != AlertSeverity.ALERT_SEVERITY_NOTICE],
    )


def served(stub: AdminStub, run_id: str, scales: Mapping[str, float]) -> Served:
    """Reads the result of a run with objectives, whose losses are cross-entropies times `scales`."""
    data = ShownRun.read(stub, run_id)
    run = data.run
    return Served(
        **how_it_ended(run),
        accuracy={name: metric(run.latest, f"accuracy/objective/{name}") for name in scales},
        loss={name: metric(run.latest, f"loss/test/{name}") / scale for name, scale in scales.items()},
        bytes_up=mean(data.up),
    )
