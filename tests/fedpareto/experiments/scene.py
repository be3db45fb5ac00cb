"""A tiny experiment, and a run of it that is under way."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

from federation.spec.run_spec import RunSpec
from fedpareto.experiments.definition import Cell, Experiment, parse
from fedpareto.experiments.experiment_runner import Event, ExperimentRunner, RunnerSettings
from fedpareto.experiments.loading import load, names
from fedpareto.experiments.result_store import Job, RunResult, Store
from fedpareto.simulation.history import History
from tests.paths import ROOT

TABLES = ROOT.parent / "shared" / "tables"


TINY = """
title = "Tiny"
source = "Nobody, 2026, table 0"
seeds = [1]
columns = [{ title = "Avg.", measure = "mean", published = "avg" }, { title = "Std", measure = "std" }]
published.file = "fedfv_table3_fmnist3.csv"
spec = { task = "digits", rounds = 3, simulation.clients = 4, train.steps = 2, evaluate.every = 2 }
quick.spec.rounds = 1
plots = [
    { kind = "curves", measure = "mean", title = "curves" },
    { kind = "bars", measure = "mean", title = "bars" },
    { kind = "sweep", measure = "mean", title = "sweep" },
    { kind = "heat", measure = "mean", title = "heat" },
]
methods = [
    { name = "FedAvg", spec.algorithm.name = "fedavg" },
    { name = "FedMGDA+ eps=0.1", spec.algorithm = { name = "fedmgda+", epsilon = 0.1 }, x = 0.1 },
]
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are trained fastest by one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def catalogue() -> Mapping[str, Experiment]:
    """All experiments that come with the program, by name: the parameters of tests, which are made in each process."""
    return MappingProxyType({name: load(name) for name in names()})


def simulated(cell: Cell, seed: int = 0) -> RunSpec:
    """The specification of a run of a cell, in an experiment of simulated federations."""
    spec = cell.spec(seed)
    assert isinstance(spec, RunSpec)
    return spec


def tiny(changes: str = "") -> Experiment:
    return parse("tiny", TINY + changes)


def tiny_job(seed: int = 1, old: str = "", new: str = "") -> Job:
    """A run of the first method, of an experiment in which one word is another one."""
    return Job(parse("tiny", TINY.replace(old, new) if old else TINY).cells()[0], seed)


def result(method: str, seed: int, mean: float, condition: str = "") -> RunResult:
    curve = [{"round": float(t), "mean": mean - 10 + t} for t in (1, 2, 3)]
    return RunResult(method, condition, seed, {}, {"mean": mean, "std": 1.0, "seconds": 1.0}, curve)


def history() -> History:
    """Two rounds of three clients, of which the last attacks."""
    scores = {"client-000": 0.5, "client-001": 1.0, "client-002": 0.0}
    clients = tuple(
        {"round": 1, "client": name, "split": split, "loss": 2 * value, "accuracy": value, "samples": samples}
        for (name, value), samples in zip(scores.items(), (10, 30, 60), strict=True)
        for split in ("train", "test")
    )
    rounds = tuple(
        {"round": t, "state": state, "reason": "", "seconds": 1.5, "improved": improved, "stationary": 0.0}
        for t, state, improved in ((0, "SKIPPED", None), (1, "COMPLETED", 0.75))
    )
    updates = ({"round": 1, "client": "client-002", "accepted": False, "reason": "not-finite"},)
    import numpy as np

    spec = RunSpec.parse('name = "a"\ntask = "digits"\nrounds = 2')
    return History("id", spec, "COMPLETED", "", np.zeros(1, np.float32), ("client-002",), 3.0, rounds, clients, updates)


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of which the one run is under way, after its first round."""
    directory = tmp_path_factory.mktemp("under-way")
    begun(Store(directory), tiny_job())
    return directory


def begun(store: Store, *jobs: Job) -> list[str]:
    """The kinds of the events of a runner that is stopped after the first one."""
    runner, kinds = ExperimentRunner(store, RunnerSettings()), list[str]()

    def stop(event: Event) -> None:
        kinds.append(event.kind)
        runner.stop()

    runner.run(jobs, stop)
    return kinds


def events_of(store: Store, job: Job) -> list[Event]:
    """What is told of a run that is made, or goes on, now."""
    events: list[Event] = []
    ExperimentRunner(store, RunnerSettings()).run([job], events.append)
    return events


def made(store: Store, job: Job) -> Event:
    """How a run ends that is made, or goes on, now."""
    return events_of(store, job)[-1]
