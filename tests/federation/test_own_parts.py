"""A rule, an attack, a task and a metric that exist in this file alone, through a simulation: no other file names them.

`federation/work/test_new_kind.py` does the same for a kind of work.
"""

import re
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from rich.console import Console

from federation.record import metric_definitions
from federation.record.metric_definitions import Definition, Unit
from federation.v1.admin_pb2 import GetRoundResponse
from fedpareto import Attack, Combination, DataSource, Metric, Pool, Rows, Rule, Task, conclude, option, simulate
from fedpareto.cli.show import round_lines, round_tables
from fedpareto.simulation.history import History

SPEC = """
name = "own-parts"
task = "tests.federation.test_own_parts:Points"
rounds = 2
algorithm = { name = "tests.federation.test_own_parts:Shortest", share = 0.5 }
train = { steps = 2, batch_size = 10 }
[simulation]
clients = 4
partition = "iid"
attackers = 1
attack = "tests.federation.test_own_parts:Longer:factor=1000"
"""


class Points(Task):
    """Two classes of points in the plane."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    def pool(self, source: DataSource) -> Pool:
        x = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
        return Pool(x, (x.sum(1) > 0).long())

    def metrics(self) -> dict[str, Metric]:
        return {"ones": Metric(ONES)}


class Ones:
    """The share of the points to which the model gives the class 1."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.ones = self.points = 0

    def update(self, output: torch.Tensor, y: torch.Tensor) -> None:
        self.ones += int(output.argmax(1).sum())
        self.points += len(y)

    def compute(self) -> float:
        return self.ones / self.points


ONES = Ones()  # one for all evaluations


@dataclass(frozen=True, kw_only=True)
class Shortest(Rule):
    """Averages the shortest updates, and measures how large a part of all the length is theirs."""

    share: float = option(0.5, "share of the clients that count", "(0, 1]")

    def combine(self, rows: Rows) -> Combination:
        lengths = np.sqrt(np.diag(rows.gram))
        shortest = np.argsort(lengths, kind="stable")[: round(self.share * len(lengths))]
        weights = np.zeros(len(lengths))
        weights[shortest] = 1.0 / len(shortest)
        return conclude(rows.gram, weights, weights, **{"length/kept": lengths[shortest].sum() / lengths.sum()})


@dataclass(frozen=True)
class Longer(Attack):
    """Sends its update times c."""

    factor: float = option(10.0, "c, multiplies the update", "(0, inf)")

    def on_update(self, own, *, peers, m, seed):  # type: ignore[no-untyped-def]
        return own * np.float32(self.factor)


KEPT = Definition("share of the length of all updates that is kept", Unit.SHARE, source="a test", group="length")


@pytest.fixture(scope="module")
def history() -> History:
    """A simulation with all four."""
    done = simulate(SPEC, threads=1, progress=lambda _: None)
    assert (done.state, done.reason) == ("COMPLETED", "")
    return done


def test_a_rule_of_a_test_file_alone_makes_the_steps_of_a_run(history: History) -> None:
    assert history.spec.algorithm.name == "tests.federation.test_own_parts:Shortest"
    weights = {record["client"]: record["weight"] for record in history.reply_records if record["round"] == 0}
    assert sorted(weights.values()) == [0.0, 0.0, 0.5, 0.5]


def test_an_attack_of_a_test_file_alone_is_simulated(history: History) -> None:
    (attacker,) = history.attackers
    for round_ in (0, 1):
        records = {record["client"]: record for record in history.reply_records if record["round"] == round_}
        norms = {client: record["norm"] for client, record in records.items()}
        assert norms.pop(attacker) > 100 * max(norms.values())
        assert records[attacker]["weight"] == 0.0


def test_a_task_of_a_test_file_alone_is_trained_and_its_metric_measured(history: History) -> None:
    first, last = history.round_records
    assert last["loss/train"] < first["loss/train"]
    tested = [record for record in history.client_records if record["round"] == 1 and record["split"] == "test"]
    own = [record["ones"] for record in tested]
    assert len(own) == 4
    counts = [record["ones"] * record["samples"] for record in tested]  # of each evaluation alone
    np.testing.assert_allclose(counts, np.round(counts))
    assert last["metric/ones/worst"] == min(own)


def test_a_metric_of_a_test_file_alone_is_recorded_and_shown_with_its_group_label_and_unit(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = metric_definitions.DEFINITIONS
    monkeypatch.setattr(metric_definitions, "DEFINITIONS", MappingProxyType({**known, "length/kept": KEPT}))
    metrics = {name: value for name, value in history.round_records[0].items() if isinstance(value, float)}
    kept = metrics["length/kept"]
    assert 0 < kept < 0.01
    item = GetRoundResponse()
    item.summary.metrics.update({**metrics, "length/kept": 0.25})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(round_tables.round_(item))
    assert re.search(r"^length +kept 25\.0 % *$", capture.get(), re.MULTILINE)
    assert round_lines.heading(["length/kept"]) == " round           kept"
    assert round_lines.line(0, {"length/kept": 0.25}, [], ["length/kept"]) == "     0         25.0 %"
