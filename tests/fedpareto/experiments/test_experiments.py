"""The papers' experiments: every file can be run, and numbers land in the right place."""

import json
import math
from pathlib import Path

import pytest
import tomli_w

from federation.aggregation.registry import algorithm
from federation.attacks import parse_attack
from federation.spec.run_spec import RunSpec
from federation.tasks import Part, available
from fedpareto.experiments import comparison_tables, measures, plots
from fedpareto.experiments.definition import Experiment, ExperimentError, merged, parse, slug
from fedpareto.experiments.derived import derived
from fedpareto.experiments.loading import load, names
from fedpareto.experiments.result_store import RunResult
from tests.fedpareto.experiments import scene as experiment_cases
from tests.fedpareto.experiments.scene import TABLES, TINY, catalogue, result, simulated, tiny
from tests.few import every
from tests.paths import ROOT

one_thread = experiment_cases.one_thread  # fixtures


every_experiment = pytest.mark.parametrize("name", names())
SIMULATIONS = [name for name, experiment in catalogue().items() if experiment.kind == "simulation"]
every_simulation = pytest.mark.parametrize("name", SIMULATIONS)


@pytest.mark.parametrize("name", every(2, SIMULATIONS))
def test_every_run_of_every_simulation_has_a_specification_an_algorithm_an_attack_and_a_task(name: str) -> None:
    whole = load(name)
    tasks = {item.name for item in available()}
    for experiment in (whole, whole.in_quick_form()):
        assert experiment.cells()
        for cell in experiment.cells():
            spec = RunSpec.parse(tomli_w.dumps(cell.given(experiment.seeds[0])))
            assert spec == cell.spec(experiment.seeds[0])
            algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
            assert spec.task in tasks
            Part(0, spec.simulation.clients, spec.simulation.partition, 0, spec.simulation.sizes)
            if spec.simulation.attack:
                parse_attack(spec.simulation.attack)


@every_experiment
def test_every_published_column_exists_and_every_curve_that_is_named_has_points(name: str) -> None:
    experiment = load(name)
    if experiment.published is not None:
        header = experiment.published.rows()[0].keys()
        assert {column.published for column in experiment.columns if column.published} <= header
        assert any(experiment.published_values(cell) for cell in experiment.cells())
    for method in experiment.methods:
        if method.curve and experiment.curves is not None:
            for measure in experiment.curves.columns:
                assert len(experiment.curves.curve(method.curve, measure)[0]) > 10


@every_experiment
def test_no_two_runs_of_an_experiment_share_a_specification(name: str) -> None:
    experiment = load(name)
    documents = [json.dumps(cell.document, sort_keys=True) for cell in experiment.cells()]
    assert len(set(documents)) == len(documents)


@pytest.mark.parametrize("name", ["fedmgda-epsilon", "fashion-mnist-epsilon"])
def test_the_epsilon_experiments_sweep_raw_updates_on_both_partitions_and_show_the_training_loss(name: str) -> None:
    experiment = load(name)
    swept = {cell.method.x: cell for cell in experiment.cells() if cell.method.x is not None}
    assert {0.0, 0.05, 0.1, 0.5, 1.0} <= swept.keys()
    for x, cell in swept.items():
        assert cell.document["algorithm"] == {"name": "fedmgda", "epsilon": x}
    assert {cell.document["simulation"]["partition"] for cell in experiment.cells()} == {"shards:5", "iid"}
    assert "loss/train" in {column.measure for column in experiment.columns}
    assert "train" in experiment.spec["evaluate"]["splits"]


def test_published_numbers_are_those_of_the_reference_tables() -> None:
    if not TABLES.is_dir():
        pytest.skip(f"no reference tables beside the project: {TABLES} does not exist")
    copies = [
        path for path in (ROOT / "fedpareto/experiments/catalogue").glob("*.csv") if (TABLES / path.name).exists()
    ]
    assert len(copies) == 7
    assert [path.name for path in copies if path.read_text() != (TABLES / path.name).read_text()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("nonsense = 1", "nonsense: no such key"),
        ("conditions = [{ name = 'a' }, { name = 'a' }]", "conditions: twice 'a'"),
        ("curves = { file = 'none.csv', columns = {} }", "curves: there is no file 'none.csv' beside the experiment"),
        ("quick.methods = ['FedProx']", "no method 'FedProx': there are 'FedAvg', 'FedMGDA+ eps=0.1'"),
        ("derived.delta_q = { reference = 'alone', weights = { a = 'b' } }", "no method 'alone'"),
        ("derived.delta_q = { reference = 'FedAvg', weights = { a = 'b' }, mu = 1.0 }", "give both or neither"),
        ("derived.delta_m = { mean = 'alone' }", "no method 'alone': there are 'FedAvg', 'FedMGDA+ eps=0.1'"),
        ("seeds = ", "not a TOML document"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(changes: str, message: str) -> None:
    with pytest.raises(ExperimentError, check=lambda error: message in str(error)):
        tiny(changes)


def test_a_method_that_names_a_published_row_which_is_not_there_is_refused() -> None:
    with pytest.raises(ExperimentError, match="no published row has"):
        parse("tiny", TINY.replace('name = "FedAvg",', 'name = "FedAvg", row = { method = "FedSGD" },'))


def test_a_wrong_specification_is_refused_with_the_method_and_the_key() -> None:
    cell = parse("tiny", TINY.replace("rounds = 3", "rounds = 0")).cells()[0]
    with pytest.raises(ExperimentError, match=r"tiny, FedAvg: rounds: .* got 0"):
        cell.spec(1)


def test_a_condition_changes_what_a_method_has_and_a_method_may_leave_conditions_out() -> None:
    experiment = load("fedmgda-adult-bias")
    cells = experiment.cells(["AFL gamma=0.1"], ["bias 1"])
    assert [cell.document["simulation"]["attack"] for cell in cells] == ["bias=1"]
    assert simulated(cells[0], 3).simulation.clients == 2
    assert experiment.published_values(cells[0])["phd_acc"] == "74.25"
    assert experiment.cells(["AFL gamma=0.1"], ["bias 5000"]) == ()


def test_what_it_takes_is_that_of_the_runs_that_are_left() -> None:
    text = TINY.replace("quick.spec.rounds = 1", "quick.spec.rounds = 1\ncost = { seconds = 2.0, quick = 0.5 }")
    experiment = parse("tiny", text)
    assert experiment.core_seconds(experiment.cells()[:1], 3) == 2.0 * 3 * 3
    quick = experiment.in_quick_form()
    assert quick.core_seconds(quick.cells()[:1], 1) == 0.5
    assert tiny().core_seconds(tiny().cells(), 1) is None


def test_sections_are_merged_and_other_values_replaced() -> None:
    assert merged({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}, "d": 3}) == {"a": {"b": 1, "c": [2]}, "d": 3}


def test_names_become_names_of_runs() -> None:
    assert slug("FedMGDA+ eps=0.05, NNM 20 %") == "fedmgda-plus-eps-0-05-nnm-20-percent"


def test_the_table_shows_ours_the_published_number_and_the_difference() -> None:
    results = [result("FedAvg", 1, 80.0), result("FedAvg", 2, 82.0)]
    table = comparison_tables.comparison(tiny(), results)
    assert table.header == ("Method", "Seeds", "Avg.", "published", "Δ", "Std")
    assert table.rows == (("FedAvg", "2", "81.00 ± 1.00", "80.42 ± 0.76", "+0.58", "1.00 ± 0.00"),)
    assert table.markdown().splitlines()[1] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert comparison_tables.comparison(tiny(), results, narrow=True).rows == (
        ("FedAvg", "2", "81.00 (+0.58)", "1.00"),
    )


def test_one_seed_has_no_deviation_and_what_was_not_published_no_difference() -> None:
    table = comparison_tables.comparison(tiny(), [result("FedMGDA+ eps=0.1", 1, 80.0)])
    assert table.rows[0][2:5] == ("80.00", "79.33 ± 1.11", "+0.67")
    assert str(comparison_tables.Spread(math.nan)) == "–"


def test_a_published_row_that_ends_early_lacks_numbers(tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("method,avg\nFedAvg\n")
    experiment = parse("tiny", TINY.replace("fedfv_table3_fmnist3.csv", "short.csv"), tmp_path)
    assert comparison_tables.comparison(experiment, [result("FedAvg", 1, 80.0)]).rows[0][2:5] == ("80.00", "–", "–")


def test_methods_and_conditions_make_a_grid_of_what_is_there() -> None:
    experiment = load("robustness")
    results = [
        result("FedAvg", 0, 50.0, "no attack"),
        result("FedAvg", 0, 10.0, "ALIE 20 %"),
        result("median", 0, 40.0, "no attack"),
    ]
    table = comparison_tables.grids(experiment, results)[0]
    assert table.header == ("Method", "no attack", "ALIE 20 %")
    assert table.rows == (("FedAvg", "50.00", "10.00"), ("median", "40.00", ""))


def test_runs_whose_rounds_were_all_skipped_say_so_and_are_not_like_those_that_were_not_made() -> None:
    skipped = RunResult("FedAvg", "ALIE 20 %", 0, {}, {"rounds": 2.0, "skipped": 2.0}, [])
    results = [result("FedAvg", 0, 50.0, "no attack"), skipped, result("median", 0, 40.0, "no attack")]
    experiment = load("robustness")
    table = comparison_tables.grids(experiment, results)[0]
    assert table.rows == (("FedAvg", "50.00", "skipped"), ("median", "40.00", ""))
    assert comparison_tables.comparison(experiment, results, narrow=True).rows[1][3] == "skipped"
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert plots._heat(axes, experiment, next(item for item in experiment.plots if item.kind == "heat"), results)
    assert [text.get_text() for text in axes.texts] == ["50", "skipped", "40"]


@pytest.mark.full
def test_every_kind_of_figure_is_drawn(tmp_path: Path) -> None:
    results = [result(method, seed, 80.0) for method in ("FedAvg", "FedMGDA+ eps=0.1") for seed in (1, 2)]
    drawn = plots.draw(tiny(), results, tmp_path)
    assert [path.name for path in drawn] == ["curves-mean.png", "bars-mean.png", "sweep-mean.png", "heat-mean.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    (tmp_path / "mine.png").touch()
    assert plots.draw(tiny(), [], tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["mine.png"]


def two_objectives() -> Experiment:
    """Three preferences and the two corners, in the plane of two losses, and what was measured."""
    methods = "".join(
        f'[[methods]]\nname = "r = {r}"\nspec.algorithm = {{ name = "fedcmoo-pref", preference = [{r}, 1.0] }}\n'
        for r in (4.0, 1.0, 0.25)
    )
    return parse(
        "front",
        """
        title = "Front"
        source = "Nobody"
        seeds = [1]
        columns = [{ title = "Avg.", measure = "mean" }]
        quick = {}
        spec = { task = "two-digits", rounds = 3 }
        derived.front = ["loss/test/left", "loss/test/right"]
        derived.delta_m = { "accuracy/left" = "left", "accuracy/right" = "right" }
        derived.after = [2, 9]
        derived.targets = [{ measure = "mean", value = 50.0 }, { measure = "loss/test/left", value = 1.0 }]
        plots = [
            { kind = "plane", measure = "loss/test/left", against = "loss/test/right", title = "plane", x = "right" },
            { kind = "radar", measure = "loss/test/", title = "radar" },
            { kind = "curves", measure = "mean", over = "uploaded", title = "curves" },
            { kind = "curves", measure = "mean", title = "curves" },
        ]
        [[methods]]
        name = "left"
        spec.algorithm = { name = "scalarised", weights = [1.0, 0.0] }
        [[methods]]
        name = "right"
        spec.algorithm = { name = "scalarised", weights = [0.0, 1.0] }
        """
        + methods,
    )


def at(experiment: Experiment, method: str, left: float, right: float) -> RunResult:
    """A run that ends with these losses, and accuracies that go with them."""
    cell = next(cell for cell in experiment.cells() if cell.method.name == method)
    losses = {"loss/test/left": left, "loss/test/right": right, "loss/test/third": left + right}
    final = {**losses, "mean": 60.0, "accuracy/left": 100 - 50 * left, "accuracy/right": 100 - 50 * right}
    curve = [
        {"round": float(t), "steps": 5.0 * t, "uploaded": 0.5 * t, "mean": 20.0 * t, "loss/test/left": left + 2 - t}
        | {"loss/test/right": right}
        for t in (1, 2, 3)
    ]
    return RunResult(method, "", 1, cell.spec(1).model_dump(mode="json"), final, curve)


def on_the_front(experiment: Experiment) -> list[RunResult]:
    ends = {
        "r = 4.0": (0.2, 0.8),
        "r = 1.0": (0.4, 0.5),
        "r = 0.25": (0.7, 0.3),
        "left": (0.2, 2.0),
        "right": (2.0, 0.2),
    }
    return [at(experiment, method, *end) for method, end in ends.items()]


def test_a_measure_after_some_rounds_is_that_of_the_round_if_there_was_one() -> None:
    experiment = two_objectives()
    for item in derived(experiment, on_the_front(experiment)):
        assert (item.final["after/2/mean"], item.final["mean"]) == (40.0, 60.0)
        assert not [name for name in item.final if name.startswith(("after/1/", "after/3/", "after/9/"))]


def test_points_on_a_front_have_places_and_an_order_that_is_that_of_their_preferences() -> None:
    experiment = two_objectives()
    found = {item.method: item.final for item in derived(experiment, on_the_front(experiment))}
    places = {method: (final.get("front/wanted"), final.get("front/place")) for method, final in found.items()}
    alone = dict.fromkeys(("left", "right"), (None, None))
    assert places == {"r = 4.0": (1, 1), "r = 1.0": (2, 2), "r = 0.25": (3, 3), **alone}
    assert [final["front/tau"] for final in found.values() if "front/tau" in final] == pytest.approx([1.0] * 3)
    assert found["r = 4.0"]["front/divergence"] == pytest.approx(0.0)
    assert found["r = 4.0"]["front/spread"] == pytest.approx(1.0)
    assert found["r = 1.0"]["front/spread"] == pytest.approx(1.25)
    swapped = [at(experiment, "r = 4.0", 0.7, 0.3), at(experiment, "r = 1.0", 0.4, 0.5)]
    assert [item.final["front/tau"] for item in derived(experiment, swapped)] == pytest.approx([-1.0] * 2)
    assert math.isnan(derived(experiment, swapped[:1])[0].final["front/tau"])


def test_losses_are_counted_against_runs_for_one_objective_of_the_same_seed_alone() -> None:
    experiment = two_objectives()
    results = on_the_front(experiment)
    found = {item.method: item.final for item in derived(experiment, results)}
    # 90 left alone, 90 right alone: 80 and 75 are 11.1 and 16.7 percent less.
    assert found["r = 1.0"]["delta_m"] == pytest.approx(100 / 2 * (10 / 90 + 15 / 90))
    lonely = derived(experiment, [item for item in results if item.method != "left"])
    assert not any("delta_m" in item.final for item in lonely)


def test_delta_q_weighs_the_losses_before_a_round_by_its_weights_against_the_last_ones_of_the_reference() -> None:
    changes = (
        'derived.delta_q = { reference = "FedAvg", weights = { "loss/train" = "weight/one" }, mu = 0.5, eta = 1.0 }'
    )
    curve = [{"round": t, "loss/train": 3.0 - t / 2, "weight/one": 1.0} for t in (1.0, 2.0, 3.0, 5.0)]
    best = RunResult("FedAvg", "", 1, {}, {"loss/train": 0.5}, [])
    other = RunResult("FedMGDA+ eps=0.1", "", 1, {}, {"loss/train": 0.9}, curve)
    final = derived(tiny(changes), [best, other])[1].final
    assert final["delta_q/last"] == pytest.approx(1.5)  # of round 2: after round 3 there is none at 4
    assert final["delta_q/drawn"] == pytest.approx((2.0 + 1.5 / 0.75) / (1 + 1 / 0.75))
    assert not any("delta_q" in name for item in derived(tiny(changes), [other]) for name in item.final)


def test_a_target_is_reached_in_the_first_evaluated_round_that_is_there_from_above_or_from_below() -> None:
    experiment = two_objectives()
    final = derived(experiment, [at(experiment, "r = 1.0", 0.4, 0.5)])[0].final
    assert (final["rounds_to/50/mean"], final["uploaded_to/50/mean"], final["steps_to/50/mean"]) == (3, 1.5, 15)
    assert final["rounds_to/1/loss/test/left"] == 2
    run = at(experiment, "r = 1.0", 0.4, 0.5)
    run.rounds[1]["mean"] = 50.0 - 1e-13  # as a mean of accuracies that is exactly 50
    assert derived(experiment, [run])[0].final["rounds_to/50/mean"] == 2
    final = derived(experiment, [at(experiment, "r = 1.0", 4.0, 0.5)])[0].final
    assert "rounds_to/1/loss/test/left" not in final


@pytest.mark.full
def test_fronts_radars_and_curves_over_bytes_are_drawn(tmp_path: Path) -> None:
    experiment = two_objectives()
    drawn = plots.draw(experiment, derived(experiment, on_the_front(experiment)), tmp_path)
    names_of_files = ["plane-loss-test-left", "radar-loss-test", "curves-mean-over-uploaded", "curves-mean"]
    assert [path.stem for path in drawn] == names_of_files
    assert plots.draw(experiment, [], tmp_path) == []


@pytest.mark.full
def test_what_objectives_come_to_is_measured_with_the_bytes_of_each_participant() -> None:
    import fedpareto

    text = 'name = "a"\ntask = "two-digits"\nrounds = 2\ntrain.steps = 2\nsimulation.clients = 3\n'
    found = {
        name: measures.rounds(history)[-1] | measures.final(history)
        for name in ("fsmgda", "scalarised")
        for history in [fedpareto.simulate(f'{text}algorithm.name = "{name}"', threads=1)]
    }
    last = found["fsmgda"]
    assert last["mean"] == pytest.approx((last["accuracy/left"] + last["accuracy/right"]) / 2, abs=1e-4)
    assert last["loss/test"] == pytest.approx((last["loss/test/left"] + last["loss/test/right"]) / 2)
    assert last["weight/left"] + last["weight/right"] == pytest.approx(1.0)
    assert (last["round"], last["steps"]) == (2, 4)
    assert last["upload/d"] == pytest.approx(2.0, rel=0.01)
    assert last["uploaded"] == pytest.approx(2 * 2 * 4 * 4788 / 1e6, rel=0.01)
    assert found["scalarised"]["upload/d"] == pytest.approx(1.0, rel=0.01)
    assert 0 < last["agreement"] <= 1
