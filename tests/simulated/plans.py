"""The runs of the schedules: specifications, models, and the updates of their clients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from federation.digests import digest
from federation.spec.computation import Computation, Descend, Differentiate, Measure
from federation.spec.run_spec import with_columns, with_models
from federation.statistics.data_columns import Column
from federation.statistics.held import HeldData
from federation.v1.common_pb2 import AssignmentManifest
from federation.vectors import Layout, Tensor, to_bytes
from federation.work.base import Result
from tests.simulated.faults import AWAY, KILLED_AT_WELCOME, LEAVES, LOST

TASK = "made-up"
FEDERATION = "simulated"
CERTIFICATE = "c1"  # the serial number of each member's certificate
DEADLINE_SECONDS = 3000
MEASURED_EVERY = 40  # one schedule of so many evaluates privately
MEASURING_EVERY = 20  # one schedule of so many measures models or describes data, and makes no step
LEAVING_EVERY = 30  # of one schedule of so many, members leave the federation
LAYOUT = Layout((Tensor("layer.weight", (4, 3)), Tensor("layer.bias", (3,))))
OBJECTIVES = ("left", "right")
HEADS = Layout((Tensor("encoder.weight", (4, 3)), *(Tensor(f"heads.{name}.weight", (3,)) for name in OBJECTIVES)))
_COMMON = f"""
name = "simulated"
task = "{TASK}"
seed = 3
limits.norm = 1e30
"""
_EVALUATES = f"""evaluate.deadline_seconds = {DEADLINE_SECONDS}
evaluate.splits = ["train", "test"]
"""
COLUMNS = (Column(name="age", low=0.0, high=100.0), Column(name="ill", classes=2))


@dataclass(frozen=True)
class Plan:
    """A run, and the clients that work for it.

    Attributes:
        name: of the plan.
        rounds: of the run.
        more: TOML lines of its specification.
        samples: of each client, by name.
        cancelling: the size of the first coordinate of each client's update, by name, so that large ones cancel each
            other: a sum in another order gives another result. Empty for updates of one size.
        layout: of the model.
        objectives: of the task.
        asking: TOML lines of who is asked; empty for all clients, each of whom must reply.
        alike: True if all clients compute the same, so that every choice of clients gives the same result.
        faults: kinds of faults that strike this plan alone, with their chances.
        kind: of the run: "evaluate" measures `rounds` models, "statistics" describes data.
    """

    name: str
    rounds: int
    more: str
    samples: Mapping[str, int]
    cancelling: Mapping[str, float] = field(default_factory=dict)
    layout: Layout = LAYOUT
    objectives: tuple[str, ...] = ("loss",)
    asking: str = ""
    alike: bool = False
    faults: Mapping[str, float] = field(default_factory=dict)
    kind: str = "train"

    @property
    def document(self) -> bytes:
        """The specification."""
        asking = self.asking or f"selection.minimum = {len(self.samples)}\nselection.quorum = 1.0"
        head = f'{_COMMON}kind = "{self.kind}"\n'
        if self.kind == "statistics":
            text = f"{head}{asking}\n[statistics]\nopen = true\ndeadline_seconds = {DEADLINE_SECONDS}\nbins = 4\n"
            return with_columns(text.encode(), COLUMNS)
        if self.kind == "evaluate":
            text = f"{head}{_EVALUATES}{asking}\n"
            return with_models(text.encode(), [digest(model) for model in self.models])
        trains = f"train.deadline_seconds = {DEADLINE_SECONDS}\nrounds = {self.rounds}\n"
        return f"{head}{_EVALUATES}{trains}{asking}\n{self.more}".encode()

    @property
    def makes_steps(self) -> bool:
        """False for a run that only measures models or describes data."""
        return self.kind == "train"

    @property
    def models(self) -> list[bytes]:
        """The models with which the rounds of a run without a step begin, the initial one first."""
        begins = range(self.rounds if self.kind == "evaluate" else 1)
        return [to_bytes(self.layout, np.linspace(-1 - n, 1, self.layout.size, dtype=np.float32)) for n in begins]

    @property
    def private(self) -> bool:
        """True for a run with private rounds."""
        return "privacy.secure" in self.more

    @property
    def evaluates_privately(self) -> bool:
        """True if members show no measurement of their own."""
        return "secure = " in self.more and "disclose" not in self.more

    @property
    def model(self) -> bytes:
        """The initial model."""
        return self.models[0]

    def held(self, client: str) -> HeldData:
        """The data of a client, of which a run without a step describes two columns."""
        return _Held(client, 60 * self.samples[client])

    def computed(self, client: str, order: AssignmentManifest, computation: Computation | None) -> Result:
        """The result of a client's computation: it follows from the client, the round, the kind and the model alone."""
        samples = self.samples[client]
        match computation:
            case Descend(targets=names):
                rows = {name: self._row(client, order, name) for name in names}
            case Differentiate():
                rows = {name: self._row(client, order, name) for name in order.objectives}
            case Measure(splits=splits):
                drawn = _drawn("measured", client, order.base_model).uniform(0.1, 0.9, 2 * len(splits)).tolist()
                measured = {f"{split}/{kind}": drawn.pop() for split in splits for kind in ("loss", "accuracy")}
                return Result({}, {}, measured | {f"{split}/samples": 8.0 for split in splits}, samples)
            case _:
                return Result({}, {}, {}, samples)
        losses = {name: 1.0 + place / 7 for place, name in enumerate((*self.objectives, "loss"))}
        return Result(rows, losses, {}, samples)

    def _row(self, client: str, order: AssignmentManifest, name: str) -> np.ndarray:
        words = (order.base_model, order.round, order.kind, name)
        vector = _drawn("row", "" if self.alike else client, *words).standard_normal(self.layout.size)
        if self.alike:
            vector = np.round(64 * vector) * 3 / 64  # its thirds are exact, so the mean of two, three or four is
        if self.cancelling:
            # Not stationary: the rest is long enough, so that only the first coordinate almost vanishes.
            vector *= 1e10
            vector[0] = self.cancelling[client] * _drawn("first", *words).uniform(1, 2)
        return np.asarray(vector, dtype=np.float32)


class _Held(HeldData):
    """A column of numbers, and one of classes."""

    def __init__(self, client: str, count: int) -> None:
        drawn = _drawn("held", client)
        self._x, self._y = drawn.uniform(10, 90, (count, 1)), drawn.integers(0, 2, count).astype(float)

    @property
    def columns(self) -> tuple[Column, ...]:
        return COLUMNS

    def parts(self, split: str) -> Iterator[tuple[Any, Any]]:
        yield self._x, self._y


def _drawn(*words: object) -> np.random.Generator:
    return np.random.default_rng(int(digest("/".join(map(str, words)).encode())[7:39], 16))


_PRIVATE = 'algorithm.name = "fedavg-n"\nprivacy = { secure = "sum", disclose = ["evaluation"], stage_seconds = 3000 }'
_THREE = {"ann": 10, "ben": 20, "cleo": 30}
# The third is asked only if it is the only one: while it is away, the whole pool is named, and more than are wanted.
_NAMED = """selection = { method = "count", count = 1, by = "samples", always = ["ann", "ben"], minimum = 2 }"""
# A member that is away for longer than the grace is lost, and asked once more.
_LOSING = "selection.minimum = 3\nselection.quorum = 0.3\nselection.grace_seconds = 40"
_FIVE = {"ann": 10, "ben": 20, "cleo": 30, "dan": 10, "eve": 10}


@cache
def plans() -> Mapping[str, Plan]:
    """All plans, by name."""
    known = (
        Plan(
            "average",
            2,
            'algorithm.name = "fedavg"\nalgorithm.prior = "uniform"',
            _THREE,
            {"ann": 1e16, "ben": -1e16, "cleo": 1.0},
        ),
        Plan("pareto", 2, 'algorithm.name = "fedmgda+"\nserver = { optimizer = "adam", learning_rate = 0.1 }', _THREE),
        Plan(
            "objectives",
            1,
            'algorithm.name = "fedcmoo"\nobjectives.names = ["left", "right"]\njacobian.deadline_seconds = '
            f"{DEADLINE_SECONDS}",
            _THREE,
            layout=HEADS,
            objectives=OBJECTIVES,
        ),
        Plan(
            "named",
            3,
            'algorithm.name = "fedavg"\nalgorithm.prior = "uniform"',
            _THREE,
            asking=_NAMED,
            alike=True,
            faults={AWAY: 0.03, KILLED_AT_WELCOME: 0.2},
        ),
        Plan(
            "leaving",
            3,
            'algorithm.name = "fedavg"\nalgorithm.prior = "uniform"',
            {**_THREE, "dan": 10},
            asking="selection.minimum = 2\nselection.quorum = 0.5",
            alike=True,
            faults={LEAVES: 0.02},
        ),
        Plan("evaluate", 2, "", _THREE, asking=_LOSING, faults={LOST: 0.3}, kind="evaluate"),
        Plan("describe", 1, "", _THREE, asking=_LOSING, faults={LOST: 0.3}, kind="statistics"),
        Plan("private", 1, _PRIVATE, _FIVE),
        Plan("measured", 1, _PRIVATE.replace('disclose = ["evaluation"], ', ""), {**_FIVE, "finn": 10}),
        Plan("private of six", 1, _PRIVATE, {**_FIVE, "finn": 10}),  # goes on without one; only for planted bugs
    )
    return {plan.name: plan for plan in known}


def plan_of(seed: int) -> Plan:
    """The plan of a seed: the quick ones are played more often."""
    known = plans()
    if seed % MEASURED_EVERY == MEASURED_EVERY - 1:
        return known["measured"]
    if seed % LEAVING_EVERY == LEAVING_EVERY - 2:
        return known["leaving"]
    if seed % MEASURING_EVERY == 3:
        return known["evaluate" if seed // MEASURING_EVERY % 2 else "describe"]
    names = (*["average"] * 5, "named", *["pareto"] * 3, *["objectives"] * 3, "private")
    return known[names[seed % len(names)]]
