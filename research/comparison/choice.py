"""The rate of each rule and task: the best on the validation split, honest, with seeds that choose and do nothing else.

Five rates are tried; where the best is the lowest or the highest one tried, the next one is tried, too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from comparison.catalogue import AFTER, TASKS
from comparison.scores import score
from fedpareto.experiments.result_store import RunResult

GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
WIDER = (0.003, 0.01, 0.03, *GRID, 30.0, 100.0, 300.0)  # the steps of widening
SEEDS = (100, 101, 102)

Measure = Literal["mean", "worst"]
BY: tuple[Measure, ...] = ("mean", "worst")


@dataclass(frozen=True)
class ChosenRate:
    """What was chosen for a rule on a task.

    Attributes:
        rate: the rate with the best score; of equal ones the lowest. None while runs are missing.
        missing: the rates that have to be run before there is a choice: of the grid, or next to an edge.
    """

    rate: float | None
    missing: tuple[float, ...]


def choose(results: Iterable[RunResult], task: str, method: str, by: Measure = "mean") -> ChosenRate:
    """Chooses by the mean over the seeds of the score after the last round.

    A run that did not get there has the lowest score (`scores`). Runs that measured another split than validation, or
    were attacked, or have other seeds, do not count.
    """
    scores: dict[float, dict[int, float]] = {}
    for run in results:
        spec = run.spec
        if run.method == method and spec["task"] == task and run.seed in SEEDS and _chooses(spec):
            found = score(run.final.get(f"{AFTER[-1]}/{by}"), loss=TASKS[task].loss)
            scores.setdefault(spec["rate"], {})[run.seed] = found
    means = {rate: sum(own.values()) / len(SEEDS) for rate, own in scores.items() if len(own) == len(SEEDS)}
    if missing := tuple(rate for rate in GRID if rate not in means):
        return ChosenRate(None, missing)
    best = min(means, key=lambda rate: (-means[rate], rate))
    beside = [WIDER[place] for place in (WIDER.index(best) - 1, WIDER.index(best) + 1) if 0 <= place < len(WIDER)]
    missing = tuple(rate for rate in beside if rate not in means)
    return ChosenRate(None if missing else best, missing)


def _chooses(spec: Mapping[str, object]) -> bool:
    return spec["split"] == "validation" and not spec["attack"] and isinstance(spec["rate"], float)
