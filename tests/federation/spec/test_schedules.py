"""The server's rate over the rounds: its period, what a short run makes of it, and what tables say of it."""

from pathlib import Path

import pytest

from coordinator.rounds.runs.specification import cautions, parse_run
from federation.aggregation.metrics.step_rate import scheduled_rate, server_rate
from federation.spec.run_spec import SpecError
from fedpareto.experiments import comparison_tables
from fedpareto.experiments.definition import Cell, Experiment, parse
from fedpareto.experiments.experiment_runner import Event, ExperimentRunner, RunnerSettings
from fedpareto.experiments.loading import load
from fedpareto.experiments.result_store import Job, RunResult, Store
from tests.fedpareto.experiments.scene import catalogue, simulated

DECAYING = """
title = "Decaying"
seeds = [0]
columns = [{ title = "Avg.", measure = "mean" }]
spec = { task = "digits", rounds = 2000, simulation.clients = 3, train.steps = 1, evaluate.every = 0 }
quick.spec.rounds = 40
methods = [
    { name = "FedAvg" },
    { name = "FedMGDA+", spec.server = { learning_rate = 2.0, decay = 0.1 } },
    { name = "FedMGDA+ often", spec.server = { decay = 0.1, decay_every = 50 } },
]
"""


def periods(experiment: Experiment) -> list[object]:
    return [cell.document.get("server", {}).get("decay_every") for cell in experiment.cells()]


def rate(cell: Cell, t: int) -> float:
    spec = simulated(cell)
    eta = 1.0 if spec.server.learning_rate == "auto" else spec.server.learning_rate
    return server_rate(eta, spec.server.decay, t, spec.rounds, spec.server.decay_every)


def test_the_rate_falls_once_in_a_period_and_comes_to_the_same_share_whatever_the_period() -> None:
    assert [server_rate(1.0, 0.01, t, 20, 10) for t in (0, 9, 10, 19)] == pytest.approx([1.0, 1.0, 0.1, 0.1])
    assert server_rate(1.0, 0.1, 100, 2000) == server_rate(1.0, 0.1, 100, 2000, 100)
    assert server_rate(1.0, 0.01, 20, 20, 10) == pytest.approx(server_rate(1.0, 0.01, 20, 20, 5))


def test_the_inverse_rate_is_that_of_theorem_2_of_fedmgda_plus() -> None:
    c = 4.0
    run = f'name = "a"\ntask = "digits"\nrounds = 100\nserver = {{ learning_rate = {1 / c}, schedule = "inverse" }}'
    spec = parse_run(run)[0]
    rates = [scheduled_rate(spec, t) for t in range(100)]
    assert rates == pytest.approx([2 / (c * (t + 2)) for t in range(100)], rel=1e-15)
    automatic = parse_run(run.replace("learning_rate = 0.25", 'learning_rate = "auto"'))[0]
    assert scheduled_rate(automatic, 2) == 0.5  # "auto" begins at 1
    with pytest.raises(SpecError, match='decay is for schedule = stepwise, not for "inverse"'):
        parse_run(run.replace("schedule", "decay = 0.1, schedule"))


def test_an_experiment_with_fewer_rounds_has_shorter_periods_in_proportion() -> None:
    whole = parse("decaying", DECAYING)
    assert periods(whole) == [None, None, 50]
    assert periods(whole.in_quick_form()) == [None, 2, 1]
    assert periods(whole.with_rounds(200)) == periods(whole.in_quick_form().with_rounds(200)) == [None, 10, 5]
    assert periods(whole.with_rounds(3)) == [None, 1, 1]  # a period is at least one round
    for experiment in (whole, whole.in_quick_form(), whole.with_rounds(200)):
        cell = experiment.cells()[1]
        assert rate(cell, 0) == 2.0
        assert rate(cell, int(experiment.spec["rounds"]) - 1) == pytest.approx(2.0 * 0.1**0.95)


@pytest.mark.parametrize("name", [name for name, one in catalogue().items() if one.kind == "simulation"])
def test_no_experiment_names_a_decay_that_has_no_effect(name: str) -> None:
    for experiment in (load(name), load(name).in_quick_form()):
        for cell in experiment.cells():
            spec = simulated(cell)
            if spec.server.decay:
                assert rate(cell, spec.rounds - 1) < rate(cell, 0), cell.label


def test_a_decay_that_has_no_effect_is_said_before_a_run_begins() -> None:
    spec = 'name = "a"\ntask = "digits"\nrounds = {}\nserver = {{ decay = 0.1, decay_every = {} }}'
    (caution,) = cautions(*parse_run(spec.format(100, 100)))
    assert "server.decay = 0.1 has no effect" in caution
    assert "server.decay_every = 5 makes about 20" in caution
    assert cautions(*parse_run(spec.format(101, 100))) == cautions(*parse_run(spec.format(100, 5))) == ()


@pytest.mark.full
def test_the_rates_that_were_used_are_measured_and_stand_in_the_table(tmp_path: Path) -> None:
    experiment = parse("decaying", DECAYING).with_rounds(4)
    store = Store(tmp_path)
    events: list[Event] = []
    ExperimentRunner(store, RunnerSettings()).run([Job(cell, 0) for cell in experiment.cells()[:2]], events.append)
    found = [store.find(Job(cell, 0)) for cell in experiment.cells()[:2]]
    results = [item for item in found if item is not None]
    assert [(item.final["rate/first"], item.final["rate/last"]) for item in results] == [
        (1.0, 1.0),
        (2.0, pytest.approx(2.0 * 0.1**0.75)),
    ]
    table = comparison_tables.comparison(experiment, results)
    assert table.header == ("Method", "Server rate", "Seeds", "Avg.")
    assert [row[:2] for row in table.rows] == [("FedAvg", "1"), ("FedMGDA+", "2 to 0.356")]
    assert comparison_tables.comparison(experiment, results[:1]).header == ("Method", "Seeds", "Avg.")


def test_a_grid_has_the_rates_of_each_method_and_seeds_that_differ_have_none_in_common() -> None:
    def result(method: str, seed: int, last: float) -> RunResult:
        return RunResult(method, "no attack", seed, {}, {"mean": 1.0, "rate/first": 1.0, "rate/last": last}, [])

    grid = comparison_tables.grids(load("robustness"), [result("FedMGDA+", 0, 0.1), result("FedAvg", 0, 1.0)])[0]
    assert grid.header == ("Method", "Server rate", "no attack")
    assert [row[:2] for row in grid.rows] == [("FedAvg", "1"), ("FedMGDA+", "1 to 0.1")]
    grid = comparison_tables.grids(load("robustness"), [result("FedMGDA+", 0, 0.1), result("FedMGDA+", 1, 0.2)])[0]
    assert grid.rows[0][1] == comparison_tables.UNKNOWN


def test_a_run_of_an_older_record_that_tells_no_rate_leaves_the_rate_of_the_others() -> None:
    told = RunResult("FedMGDA+", "no attack", 0, {}, {"mean": 1.0, "rate/first": 1.0, "rate/last": 0.1}, [])
    older = RunResult("FedMGDA+", "no attack", 1, {}, {"mean": 1.0}, [])
    assert comparison_tables.grids(load("robustness"), [told, older])[0].rows[0][1] == "1 to 0.1"
