"""The metrics on record are those that docs/reference/metrics.md defines: computed a second time, from that page."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from federation.aggregation import diagnostics
from federation.aggregation.metrics import metrics
from federation.record.metric_definitions import DEFINITIONS
from tests.stage import Stage
from tests.verification.independent_metrics import check
from tests.verification.independent_verifier import Wrong
from tests.verification.record_vectors import OUTCOMES, vector
from tests.verification.scene import NAMES, exported

OF_ACCURACIES = {name for name in DEFINITIONS if name.startswith("accuracy/") and "<" not in name}
OF_UPDATES = {"conflicts", "conflict_depth", "conflict_mean", "stationarity", "stationarity/relative"}
OF_STEPS = {"direction_norm", "descent_min", "descent_share", "stationary", "step/rate", "bytes/up", *OF_UPDATES}
OF_MODELS = {*OF_ACCURACIES, "improved", "loss/train", "loss/test", "evaluated"}
OF_OBJECTIVES = {"weight/left", "weight/mid", "objective/conflicts", "objective/stationarity"}
COMPARED = {
    "open": {*OF_MODELS, *OF_STEPS, "entropy"},
    "multi-gradient": {*OF_MODELS, *OF_STEPS, "entropy"},
    "objectives": {*OF_MODELS, *OF_STEPS, *OF_OBJECTIVES},
    "interrupted": {*OF_STEPS, "bytes/refused", "entropy"},
}


Function = Callable[..., Any]


def opposite(share: Function) -> Function:
    """Counts an equal loss as worse, and those that fell too."""
    return lambda *given: 1.0 - share(*given)


def highest_for_lowest(accuracies: Function) -> Function:
    return lambda values: {**accuracies(values), "accuracy/worst5": max(values)}


def against_for_along(measure: Function) -> Function:
    def planted(*given: Any) -> dict[str, float]:
        found = measure(*given)
        return {**found, "descent_share": 1.0 - found["descent_share"]}

    return planted


PLANTED = {  # errors in the functions that the coordinator shares with those who verify its record
    "improved": (metrics, "improved", opposite),
    "accuracy/worst5": (metrics, "accuracies", highest_for_lowest),
    "descent_share": (diagnostics, "measure", against_for_along),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_error_in_a_shared_function_is_found(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, function, wrong = PLANTED[name]
    monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    run, players = stage.begin(*NAMES[:3], algorithm="fedavg", more="selection.minimum = 3")
    stage.complete(run, *players)
    with pytest.raises(Wrong, match=f"round 0: .*{name} is"):
        check(exported(stage, run, tmp_path / "run.fedpareto"))


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_metrics_of_a_run_are_those_of_the_page(name: str) -> None:
    assert check(vector(name)) >= COMPARED[name]


def test_nothing_of_ours_computes_the_second_values() -> None:
    here = Path(__file__).parent
    files = [here / "independent_metrics.py", here / "independent_evaluation.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {one.module or "" for one in imports if isinstance(one, ast.ImportFrom)}
    names |= {alias.name for one in imports if isinstance(one, ast.Import) for alias in one.names}
    ours = {name for name in names if name.partition(".")[0] in {"federation", "verification", "coordinator", "tests"}}
    beside = {f"tests.verification.independent_{name}" for name in ("evaluation", "verifier")}
    assert ours == {"federation.v1", "tests.paths", *beside}
