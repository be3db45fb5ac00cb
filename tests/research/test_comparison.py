"""The comparison of rules: rates are chosen without test data, runs are paired, and bounds are those of Student's t."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from comparison import laboratory, picture, tasks
from comparison.catalogue import ATTACKERS, ATTACKS, MEMBERS, TASKS
from comparison.choice import BY, GRID, SEEDS, ChosenRate, choose
from comparison.laboratory import measure
from comparison.scores import score
from comparison.specification import ComparisonSpecification
from comparison.verdict import RULES, against_rivals, lower_bound, under_attacks
from federation.tasks import Dataset, Splits
from fedpareto.experiments.loading import load
from fedpareto.experiments.result_store import RunResult, Store
from tests.fedpareto.experiments import scene
from tests.paths import DOCS

RATES = DOCS / "results/comparison-rates"

one_thread = scene.one_thread  # a fixture


def specification(**changes: Any) -> ComparisonSpecification:
    given = {"name": "x", "seed": 3, "task": "scanners", "algorithm": {"name": "fedavg"}, "rate": 1.0, "rounds": 15}
    return ComparisonSpecification.model_validate({**given, **changes})


def run(method: str, seed: int, final: Mapping[str, float], condition: str = "honest", **spec: Any) -> RunResult:
    whole = {"task": "scanners", "split": "test", "attack": "", "attackers": 0, "rate": 1.0, **spec}
    return RunResult(method, f"{whole['task']}, {condition}", seed, whole, dict(final), [])


def honest(method: str, *, mean: list[float], worst: list[float], **spec: Any) -> list[RunResult]:
    pairs = enumerate(zip(mean, worst, strict=True))
    return [run(method, seed, {"100/mean": first, "100/worst": second}, **spec) for seed, (first, second) in pairs]


def tried(rates: Mapping[float, float], *, seeds: tuple[int, ...] = SEEDS, **spec: Any) -> list[RunResult]:
    """Runs whose score is that of their rate."""
    return [
        run("FedAvg", seed, {"100/mean": value, "100/worst": value}, rate=rate, **{"split": "validation", **spec})
        for rate, value in rates.items()
        for seed in seeds
    ]


@pytest.fixture
def with_other_test_data(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Replaces the test split of every member by noise with labels at random."""

    def apply() -> None:
        deal = tasks._dealt

        def spoilt(name: str, directory: Path | None, seed: int) -> tuple[Splits, ...]:
            noise = torch.Generator().manual_seed(0)

            def other(split: Dataset) -> Dataset:
                labels = torch.randint(0, 10, split.y.shape, generator=noise)
                return Dataset(torch.rand(split.x.shape, generator=noise), labels)

            return tuple(replace(own, test=other(own.test)) for own in deal(name, directory, seed))

        monkeypatch.setattr(tasks, "_dealt", spoilt)

    return apply


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_choosing_a_rate_reads_no_test_split(with_other_test_data: Callable[[], None]) -> None:
    chooses, measures = specification(split="validation"), specification()
    kind = tasks.TurnedDigits
    assert laboratory._document(chooses, TASKS["scanners"], kind)["evaluate"]["splits"] == ["validation"]
    validation, tested = measure(chooses, None)[0], measure(measures, None)[0]
    with_other_test_data()
    again = measure(chooses, None)[0]
    del validation["cpu"], again["cpu"]
    assert again == validation
    assert measure(measures, None)[0]["15/mean"] < tested["15/mean"] - 20  # the noise is there to be read


def test_all_runs_that_choose_measure_the_validation_split_with_seeds_that_no_other_run_has() -> None:
    chooses, compares = load("comparison-rates"), load("comparison")
    for cell in chooses.cells():
        assert ComparisonSpecification.model_validate(cell.given(100)).split == "validation", cell.label
    assert chooses.seeds == SEEDS
    assert not {*SEEDS} & {*compares.seeds}


def test_a_rate_is_the_best_mean_over_the_seeds_and_an_edge_asks_for_the_next_rate() -> None:
    peak = {0.1: 50.0, 0.3: 60.0, 1.0: 70.0, 3.0: 65.0, 10.0: 20.0}
    assert choose(tried(peak), "scanners", "FedAvg") == ChosenRate(1.0, ())
    rising = {rate: 10.0 * place for place, rate in enumerate(GRID)}
    assert choose(tried(rising), "scanners", "FedAvg") == ChosenRate(None, (30.0,))
    assert choose(tried({**rising, 30.0: 5.0}), "scanners", "FedAvg") == ChosenRate(10.0, ())
    assert choose(tried(peak, seeds=SEEDS[:2]), "scanners", "FedAvg") == ChosenRate(None, GRID)


def test_of_equal_rates_the_lowest_is_chosen_and_a_run_that_diverged_is_the_worst() -> None:
    equal = {0.1: 50.0, 0.3: 70.0, 1.0: 70.0, 3.0: math.nan, 10.0: math.nan}
    assert choose(tried(equal), "scanners", "FedAvg") == ChosenRate(0.3, ())


def test_runs_on_the_test_split_of_other_seeds_or_under_attack_choose_nothing() -> None:
    peak = {0.1: 50.0, 0.3: 60.0, 1.0: 70.0, 3.0: 65.0, 10.0: 20.0}
    better = {0.1: 99.0}
    for other in (tried(better, split="test"), tried(better, seeds=(0, 1, 2)), tried(better, attack="sign-flip")):
        assert choose([*tried(peak), *other], "scanners", "FedAvg").rate == 1.0


def test_a_lower_loss_is_the_better_one_and_two_percent_of_it_are_two_points() -> None:
    assert score(0.098, loss=True) - score(0.1, loss=True) == pytest.approx(2.0, abs=0.03)
    assert score(None, loss=True) == score(math.nan, loss=True) == score(1e9, loss=True) < score(99.0, loss=True)
    assert score(71.0, loss=False) - score(math.nan, loss=False) == 71.0


def test_a_lower_bound_is_that_of_students_t() -> None:
    values = [1.0, 2.5, -0.5, 3.0, 0.0]
    quantile = 2.7764451052  # of the t distribution with 4 degrees of freedom, at 97.5 %
    assert lower_bound(values) == pytest.approx(np.mean(values) - quantile * np.std(values, ddof=1) / math.sqrt(5))
    assert lower_bound([4.0]) == lower_bound([]) == -math.inf


def test_a_rule_is_compared_with_a_rival_seed_by_seed() -> None:
    """The seeds differ by far more than the rules; unpaired, the bound would be far below the margin."""
    level = [50.0, 60.0, 70.0, 80.0, 90.0]
    ours = honest("FedMGDA+", mean=[value + 1 for value in level], worst=[value - 9 for value in level])
    theirs = honest("FedAvg", mean=level, worst=level)
    bound = next(item for item in against_rivals([*reversed(ours), *theirs], "FedMGDA+", "scanners") if item.seeds)
    assert (bound.against, bound.seeds) == ("FedAvg", 5)
    assert [bound.mean, bound.worst] == pytest.approx([1.0, -9.0])
    assert bound.shown  # in the mean


@pytest.mark.parametrize(("mean", "worst", "shown"), [(-1.9, -9.0, True), (-9.0, -1.9, True), (-2.1, -2.1, False)])
def test_a_rule_is_not_dominated_if_it_holds_in_the_mean_or_in_the_worst_member(
    mean: float, worst: float, shown: bool
) -> None:
    ours = honest("FedMGDA+", mean=[70 + mean] * 5, worst=[50 + worst] * 5)
    results = [*ours, *honest("FedAvg", mean=[70.0] * 5, worst=[50.0] * 5)]
    assert next(item for item in against_rivals(results, "FedMGDA+", "scanners") if item.seeds).shown is shown


def test_a_rival_or_a_task_that_was_not_run_is_not_shown() -> None:
    bounds = against_rivals(honest("FedMGDA+", mean=[90.0] * 5, worst=[90.0] * 5), "FedMGDA+", "scanners")
    assert [bound.against for bound in bounds] == [rule for rule in RULES if rule != "FedMGDA+"]
    assert not any(bound.shown for bound in bounds)


def test_a_bound_of_fewer_seeds_than_planned_shows_nothing() -> None:
    ours = honest("FedMGDA+", mean=[90.0] * 4, worst=[90.0] * 4)
    results = [*ours, *honest("FedAvg", mean=[70.0] * 4, worst=[50.0] * 4)]
    bound = next(item for item in against_rivals(results, "FedMGDA+", "scanners") if item.seeds)
    assert [bound.mean, bound.worst] == [20.0, 40.0]
    assert not bound.shown


def test_an_attacked_run_is_compared_on_the_members_that_do_not_attack() -> None:
    """Member 9, which attacks, is the worst of the honest run: without the pairing the attack would look good."""
    values = {f"100/member/{number}": 80.0 for number in range(9)}
    results = []
    for seed in range(3):
        results.append(run("Krum", seed, {**values, "100/member/9": 10.0, "100/mean": 73.0, "100/worst": 10.0}))
        attacked = {**values, "100/member/0": 77.0}
        results.append(run("Krum", seed, attacked, "flipped sign, one of ten", attack="sign-flip", attackers=1))
    (bound,) = (item for item in under_attacks(results, "Krum", "scanners") if item.seeds)
    assert [bound.seeds, bound.mean, bound.worst] == pytest.approx([3, -1 / 3, -3.0])
    assert not bound.shown  # both have to hold


def test_an_attack_that_makes_the_run_diverge_and_one_that_was_not_run_are_not_shown() -> None:
    values = {f"100/member/{number}": 80.0 for number in range(MEMBERS)}
    results = [run("FedAvg", seed, values) for seed in range(3)]
    condition, early = "scaled by 100, three of ten", "scaled by 100, one of ten"
    failed = {f"100/member/{number}": math.nan for number in range(7)}
    for seed in range(3):
        results.append(run("FedAvg", seed, failed, condition, attack="scale=100", attackers=3))
        results.append(run("FedAvg", seed, {}, early, attack="scale=100", attackers=1))
    bounds = {bound.against: bound for bound in under_attacks(results, "FedAvg", "scanners")}
    assert bounds[condition].mean == bounds[early].mean == pytest.approx(-80.0)
    assert len(bounds) == len(ATTACKS) * len(ATTACKERS)
    assert not any(bound.shown for bound in bounds.values())


def test_the_conditions_of_the_comparison_are_each_task_honest_and_under_each_attack() -> None:
    wanted: dict[str, dict[str, Any]] = {f"{task}, honest": {"task": task} for task in TASKS}
    for task in TASKS:
        for attack, spelled in ATTACKS.items():
            for share, attackers in ATTACKERS.items():
                wanted[f"{task}, {attack}, {share}"] = {"task": task, "attack": spelled, "attackers": attackers}
    assert {condition.name: condition.spec for condition in load("comparison").conditions} == wanted
    assert tuple(method.name for method in load("comparison-rates").methods) == RULES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "digits"}, "one of scanners"),
        ({"rate": 0.0}, "positive"),
        ({"rate": -1.0}, "positive"),
        ({"attack": "sign-flip"}, "give both or neither"),
        ({"attackers": 3}, "give both or neither"),
        ({"attack": "sign-flip", "attackers": 10}, "less than 10"),
        ({"personal": True}, "no last layer"),
        ({"split": "train"}, "validation"),
        ({"rates": {"shards": 1.0}}, "none for the task 'scanners'"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        specification(**changes)


def test_the_rate_of_another_task_does_not_make_a_run_another_one() -> None:
    given = {"name": "x", "seed": 0, "task": "scanners", "algorithm": {"name": "fedavg"}}
    first = ComparisonSpecification.model_validate({**given, "rates": {"scanners": 3.0}})
    second = ComparisonSpecification.model_validate({**given, "rates": {"scanners": 3.0, "shards": 10.0}})
    assert first == second
    assert first.rate == 3.0


def test_a_held_out_task_is_not_run_before_the_rule_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comparison.laboratory.FIXED_RULE", "")
    for task in ("cameras", "dirichlet", "river"):
        with pytest.raises(ValueError, match="held out"):
            measure(specification(task=task), None)


@pytest.mark.parametrize("name", ["TurnedDigits", "ShardedDigits", "ServedDigits"])
def test_each_seed_deals_anew_ten_members_of_about_one_size_whose_splits_share_no_sample(name: str) -> None:
    first, second = tasks._dealt(name, None, 0), tasks._dealt(name, None, 1)
    assert len(first) == MEMBERS
    for place, size in enumerate((89, 36, 54)):
        assert {len((own.train, own.validation, own.test)[place]) for own in first} <= {size - 1, size, size + 1}
    seen = [row.tobytes() for own in first for split in own for row in split.x.numpy()]
    assert len(seen) - len(set(seen)) < 5  # some images are there twice in the source
    assert not torch.equal(first[0].train.x, second[0].train.x)


def test_the_minority_is_drawn_by_the_seed() -> None:
    drawn = {tasks.minority(tasks.TurnedDigits, seed) for seed in range(20)}
    assert len(drawn) > 10
    assert all(len(set(members)) == 2 and set(members) <= set(range(MEMBERS)) for members in drawn)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_runs_with_one_seed_have_the_same_data_minority_and_attackers_for_every_rule() -> None:
    attacked = {"attack": "scale=100", "attackers": 3, "rounds": 1, "rate": 1e-9}
    one = measure(specification(algorithm={"name": "krum"}, **attacked), None)
    other = measure(specification(algorithm={"name": "fedfv"}, **attacked), None)
    assert one[1] == other[1]  # a rate of nearly nothing leaves the model that the seed made


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_a_run_measures_honest_members_the_minority_and_what_one_sample_is_worth() -> None:
    final, rounds = measure(specification(attack="sign-flip", attackers=3), None)
    members = [final[f"15/member/{number}"] for number in range(7)]
    assert not any(name.startswith("15/member/7") for name in final)
    assert final["15/mean"] == pytest.approx(np.mean(members))
    assert final["15/worst"] == min(members)
    assert final["sample"] == pytest.approx(100 / 54)
    assert [row["round"] for row in rounds] == [5.0, 10.0, 15.0]


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_a_run_that_diverges_has_no_measure_and_one_that_fails_otherwise_is_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_fast(kind: tasks.Dealt, output: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": 1e30 * torch.nn.functional.cross_entropy(output, y)}

    monkeypatch.setattr(tasks.TurnedDigits, "losses", too_fast)
    final, _ = measure(specification(rate=1e30), None)
    assert "15/mean" not in final

    def broken(kind: tasks.Dealt, output: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        raise ZeroDivisionError

    monkeypatch.setattr(tasks.TurnedDigits, "losses", broken)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        measure(specification(), None)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
def test_one_epoch_more_at_the_member_and_a_personal_last_layer_serve_members_of_few_classes_better() -> None:
    """Members of shards know two or three classes, which a model of their own tells apart."""
    shared = measure(specification(task="shards"), None)[0]["15/mean"]
    assert measure(specification(task="shards", tuned=True), None)[0]["15/mean"] > shared
    assert measure(specification(task="shards", personal=True), None)[0]["15/mean"] > shared


def test_the_chosen_rates_are_those_of_the_committed_runs() -> None:
    """Each complete choice stands in comparison.toml: that by the worst member where it is another rate."""
    runs = list(Store(RATES).runs().values())
    for method in load("comparison").methods:
        if "rates" in method.spec:
            rule = method.name.partition(", ")[0]
            by_mean, by_worst = ({task: choose(runs, task, rule, by).rate for task in TASKS} for by in BY)
            wanted = {task: rate for task, rate in by_mean.items() if rate}
            if method.spec.get("chosen") == "worst":
                wanted = {task: rate for task, rate in by_worst.items() if rate and rate != by_mean[task]}
            assert method.spec["rates"] == wanted, method.name


def test_every_cell_with_a_rate_is_a_valid_specification() -> None:
    for name in ("comparison", "comparison-rates"):
        experiment = load(name)
        for cell in experiment.cells():
            spec = cell.document
            if "rate" in spec or spec["task"] in spec["rates"]:
                assert ComparisonSpecification.model_validate(cell.given(0)).task in TASKS


@pytest.mark.full
def test_the_picture_has_a_panel_for_each_task_that_was_run(tmp_path: Path) -> None:
    results = honest("FedAvg", mean=[70.0, 72.0], worst=[50.0, 55.0])
    results += honest("FedAvg", mean=[0.2, 0.3], worst=[0.4, math.nan], task="river")
    picture.draw(results, tmp_path / "mean-worst.png")
    assert (tmp_path / "mean-worst.png").stat().st_size > 10_000
    assert picture.interval([1.0, 3.0])[1] == pytest.approx(12.7062047362)
