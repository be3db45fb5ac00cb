"""The metrics on record are those that docs/reference/metrics.md defines: computed a second time, from that page."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from federation.aggregation import diagnostics
from federation.aggregation.metrics import metrics, run_metrics
from federation.aggregation.metrics.round_metrics import RoundMetrics
from federation.aggregation.metrics.run_metrics import RunMetrics, StepFacts
from federation.aggregation.metrics.step_rate import scheduled_rate
from federation.record.metric_definitions import DEFINITIONS
from tests.compared_metrics import differences
from tests.coordinator.rounds.scene import EXACT, begin
from tests.stage import Stage
from tests.verification.independent_metrics import check
from tests.verification.independent_verifier import Wrong
from tests.verification.record_vectors import OUTCOMES, vector
from tests.verification.scene import NAMES, Edited, checked, exported, refusal

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
DECAY = "server = { learning_rate = 0.7, decay = 0.5, decay_every = 1 }"

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


def without_one(patch: pytest.MonkeyPatch) -> None:
    of_step = RunMetrics.of_step

    def planted(self: RunMetrics, facts: StepFacts) -> RoundMetrics:
        found = of_step(self, facts)
        return replace(found, spans={name: span for name, span in found.spans.items() if name != "descent_min"})

    patch.setattr(RunMetrics, "of_step", planted)


def of_another_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_metrics, "scheduled_rate", lambda run, number: scheduled_rate(run, max(number - 1, 0)))


def with_one_too_many(patch: pytest.MonkeyPatch) -> None:
    of_step = RunMetrics.of_step
    spent = RoundMetrics.exact({"epsilon/clients": 1.0})
    patch.setattr(RunMetrics, "of_step", lambda self, facts: of_step(self, facts) | spent)


# Errors in the function that says which metrics a round has: what the page's numbers say, and what a verifier says that
# has no such error.
ASSEMBLED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "left out": (without_one, "round 0: .*descent_min is None, not", "the record lacks descent_min"),
    "of another round": (of_another_round, "round 1: .*step/rate is 0.7, not 0.4", "the record says step/rate = 0.7;"),
    "too many": (
        with_one_too_many,
        "round 0: nothing gives epsilon/clients",
        "the record says epsilon/clients = 1.0; nothing that was signed gives this number",
    ),
}


@pytest.mark.parametrize("error", ASSEMBLED)
def test_an_error_in_the_list_of_a_rounds_metrics_is_found(stage: Stage, tmp_path: Path, error: str) -> None:
    plant, by_the_page, by_verifiers = ASSEMBLED[error]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        run, players = stage.begin(*NAMES[:3], rounds=2, algorithm="fedavg", more=f"selection.minimum = 3\n{DECAY}")
        stage.complete(run, *players)
        bundle = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))
        with pytest.raises(Wrong, match=by_the_page):
            check(tmp_path / "run.fedpareto")
        assert checked(bundle, tmp_path)
        assert differences(stage, run) == [], "one function agrees with itself"
    assert by_verifiers in refusal(bundle, tmp_path)
    assert by_verifiers in differences(stage, run)[0]


@pytest.mark.full
def test_the_distance_of_losses_from_a_preference_follows_from_the_page(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage, "fedcmoo-pref", f"{EXACT}\nalgorithm.preference = [1, 2, 3]")
    stage.complete(run, *players.values())
    assert check(exported(stage, run, tmp_path / "run.fedpareto")) >= {"preference/divergence"}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_metrics_of_a_run_are_those_of_the_page(name: str) -> None:
    assert check(vector(name)) >= COMPARED[name]


def test_nothing_of_ours_computes_the_second_values() -> None:
    here = Path(__file__).parent
    files = [here / f"independent_{name}.py" for name in ("metrics", "evaluation", "rules", "sums")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {one.module or "" for one in imports if isinstance(one, ast.ImportFrom)}
    names |= {alias.name for one in imports if isinstance(one, ast.Import) for alias in one.names}
    rooms = [one for one in imports if isinstance(one, ast.ImportFrom) and one.module == "tests.verification"]
    names = names - {"tests.verification"} | {f"{one.module}.{alias.name}" for one in rooms for alias in one.names}
    ours = {name for name in names if name.partition(".")[0] in {"federation", "verification", "coordinator", "tests"}}
    beside = {f"tests.verification.independent_{name}" for name in ("evaluation", "rules", "sums", "verifier")}
    assert ours == {"federation.v1", "tests.paths", *beside}
