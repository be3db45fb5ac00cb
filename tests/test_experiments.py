"""The papers' experiments: every file can be run, numbers land in the right place, interrupted ones go on."""

import csv
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from harness import wait_for
from typer.testing import CliRunner

from coordinator.aggregation.registry import algorithm
from experiments import measures, plots, provenance, record, tables
from experiments.definition import Experiment, ExperimentError, merged, parse, slug
from experiments.derived import derived
from experiments.loading import load, names
from experiments.record import write_results
from experiments.results import DamagedError, Job, Result, Store, difference
from experiments.runner import Event, Runner, Settings, other
from federation.attacks import parse_attack
from federation.runs import RunSpec
from federation.tasks import Part, available
from fedpareto.cli.failure import Failure
from fedpareto.cli.main import app
from simulation.history import History

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT.parent / "shared" / "tables"

every_experiment = pytest.mark.parametrize("name", names())
every_simulation = pytest.mark.parametrize("name", [name for name in names() if load(name).kind == "simulation"])

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
def _one_thread() -> Iterator[None]:
    """Models this small are trained fastest by one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(changes: str = "") -> Experiment:
    return parse("tiny", TINY + changes)


def result(method: str, seed: int, mean: float, condition: str = "") -> Result:
    curve = [{"round": float(t), "mean": mean - 10 + t} for t in (1, 2, 3)]
    return Result(method, condition, seed, {}, {"mean": mean, "std": 1.0, "seconds": 1.0}, curve)


@every_simulation
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


def test_the_page_of_experiments_lists_each_with_its_size() -> None:
    text = (ROOT / "docs/experiments.md").read_text()
    for name in names():
        experiment, quick = load(name), load(name).in_quick_form()
        sizes = f"{len(experiment.cells())} × {len(experiment.seeds)} | {experiment.spec['rounds']}"
        runs = f"{len(quick.cells()) * len(quick.seeds)} × {quick.spec['rounds']}"
        assert f"| `{name}` | {experiment.title} | {experiment.source} | {sizes} | {runs} |" in text


def test_published_numbers_are_those_of_the_reference_tables() -> None:
    if not TABLES.is_dir():
        pytest.skip(f"no reference tables beside the project: {TABLES} does not exist")
    copies = [path for path in (ROOT / "experiments/catalogue").glob("*.csv") if (TABLES / path.name).exists()]
    assert len(copies) == 7
    assert [path.name for path in copies if path.read_text() != (TABLES / path.name).read_text()] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("nonsense = 1", "nonsense: no such key"),
        ("conditions = [{ name = 'a' }, { name = 'a' }]", "conditions: twice 'a'"),
        ("curves = { file = 'none.csv', columns = {} }", "curves: there is no file 'none.csv' beside the experiment"),
        ("quick.methods = ['FedProx']", "no method 'FedProx': there are 'FedAvg', 'FedMGDA+ eps=0.1'"),
        ("derived.delta_m = { mean = 'alone' }", "no method 'alone': there are 'FedAvg', 'FedMGDA+ eps=0.1'"),
        ("seeds = ", "not a TOML document"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(changes: str, message: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        tiny(changes)
    assert message in str(refused.value)


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
    assert cells[0].spec(3).simulation.clients == 2
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
    table = tables.comparison(tiny(), results)
    assert table.header == ("Method", "Seeds", "Avg.", "published", "Δ", "Std")
    assert table.rows == (("FedAvg", "2", "81.00 ± 1.00", "80.42 ± 0.76", "+0.58", "1.00 ± 0.00"),)
    assert table.markdown().splitlines()[1] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert tables.comparison(tiny(), results, narrow=True).rows == (("FedAvg", "2", "81.00 (+0.58)", "1.00"),)


def test_one_seed_has_no_deviation_and_what_was_not_published_no_difference() -> None:
    table = tables.comparison(tiny(), [result("FedMGDA+ eps=0.1", 1, 80.0)])
    assert table.rows[0][2:5] == ("80.00", "79.33 ± 1.11", "+0.67")
    assert str(tables.Spread(math.nan)) == "–"


def test_methods_and_conditions_make_a_grid_of_what_is_there() -> None:
    experiment = load("robustness")
    results = [
        result("FedAvg", 0, 50.0, "no attack"),
        result("FedAvg", 0, 10.0, "ALIE 20 %"),
        result("median", 0, 40.0, "no attack"),
    ]
    table = tables.grids(experiment, results)[0]
    assert table.header == ("Method", "no attack", "ALIE 20 %")
    assert table.rows == (("FedAvg", "50.00", "10.00"), ("median", "40.00", ""))


def test_runs_whose_rounds_were_all_skipped_say_so_and_are_not_like_those_that_were_not_made(tmp_path: Path) -> None:
    skipped = Result("FedAvg", "ALIE 20 %", 0, {}, {"rounds": 2.0, "skipped": 2.0}, [])
    results = [result("FedAvg", 0, 50.0, "no attack"), skipped, result("median", 0, 40.0, "no attack")]
    experiment = load("robustness")
    table = tables.grids(experiment, results)[0]
    assert table.rows == (("FedAvg", "50.00", "skipped"), ("median", "40.00", ""))
    assert tables.comparison(experiment, results, narrow=True).rows[1][3] == "skipped"
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert plots._heat(axes, experiment, next(item for item in experiment.plots if item.kind == "heat"), results)
    assert [text.get_text() for text in axes.texts] == ["50", "skipped", "40"]
    write_results(tmp_path / "results.csv", results)
    assert next(row for row in csv.DictReader((tmp_path / "results.csv").open()) if row["skipped"])["mean"] == ""


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


def at(experiment: Experiment, method: str, left: float, right: float) -> Result:
    """A run that ends with these losses, and accuracies that go with them."""
    cell = next(cell for cell in experiment.cells() if cell.method.name == method)
    losses = {"loss/test/left": left, "loss/test/right": right, "loss/test/third": left + right}
    final = {**losses, "mean": 60.0, "accuracy/left": 100 - 50 * left, "accuracy/right": 100 - 50 * right}
    curve = [
        {"round": float(t), "steps": 5.0 * t, "uploaded": 0.5 * t, "mean": 20.0 * t, "loss/test/left": left + 2 - t}
        | {"loss/test/right": right}
        for t in (1, 2, 3)
    ]
    return Result(method, "", 1, cell.spec(1).model_dump(mode="json"), final, curve)


def on_the_front(experiment: Experiment) -> list[Result]:
    ends = {
        "r = 4.0": (0.2, 0.8),
        "r = 1.0": (0.4, 0.5),
        "r = 0.25": (0.7, 0.3),
        "left": (0.2, 2.0),
        "right": (2.0, 0.2),
    }
    return [at(experiment, method, *end) for method, end in ends.items()]


def test_points_on_a_front_have_places_and_an_order_that_is_that_of_their_preferences() -> None:
    experiment = two_objectives()
    found = {item.method: item.final for item in derived(experiment, on_the_front(experiment))}
    places = {method: (final.get("front/wanted"), final.get("front/place")) for method, final in found.items()}
    assert places == {
        **{"r = 4.0": (1, 1), "r = 1.0": (2, 2), "r = 0.25": (3, 3)},
        **{"left": (None, None), "right": (None, None)},
    }
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


def test_fronts_radars_and_curves_over_bytes_are_drawn(tmp_path: Path) -> None:
    experiment = two_objectives()
    drawn = plots.draw(experiment, derived(experiment, on_the_front(experiment)), tmp_path)
    names_of_files = ["plane-loss-test-left", "radar-loss-test", "curves-mean-over-uploaded", "curves-mean"]
    assert [path.stem for path in drawn] == names_of_files
    assert plots.draw(experiment, [], tmp_path) == []


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


def test_results_are_stored_whole_with_unknown_numbers_and_count_for_their_specification_only(tmp_path: Path) -> None:
    store, job = Store(tmp_path), Job(tiny().cells()[0], 7)
    assert store.find(job) is None
    store.keep(job, {"mean": 80.0, "std": math.nan}, [{"round": 1.0}])
    found = store.find(job)
    assert found is not None
    assert found.final["mean"] == 80.0
    assert math.isnan(found.final["std"])
    changed = Job(parse("tiny", TINY.replace("rounds = 3", "rounds = 4")).cells()[0], 7)
    assert (changed.name, store.find(changed)) == (job.name, None)
    store.forget(job)
    assert store.find(job) is None


def test_a_key_that_came_later_changes_nothing_of_results_unless_the_experiment_gives_it(tmp_path: Path) -> None:
    store, job = Store(tmp_path), Job(tiny().cells()[0], 7)
    store.keep(job, {"mean": 80.0}, [])
    file = tmp_path / "runs" / f"{job.name}.json"
    document = json.loads(file.read_text())
    del document["spec"]["train"]["measure"]
    file.write_text(json.dumps(document))
    found = store.find(job)
    assert found is not None
    assert found.spec == job.document
    given = TINY.replace("rounds = 3", "rounds = 3, train.measure = true")
    assert store.find(Job(parse("tiny", given).cells()[0], 7)) is None
    document["spec"]["train"]["of another time"] = 1
    file.write_text(json.dumps(document))
    assert store.find(job) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), ""),
        (("rounds = 3", "rounds = 4"), "rounds = 3, not 4"),
        (("train.steps = 2", "train.steps = 5"), "train.steps = 2, not 5"),
        (("rounds = 3", "rounds = 3, limits.skipped_rounds = 7"), "limits.skipped_rounds = 3, not 7"),
        (('name = "fedavg"', 'name = "fedmgda"'), 'algorithm.name = "fedavg", not "fedmgda"'),
    ],
)
def test_results_of_another_specification_say_in_what_they_differ(
    tmp_path: Path, changes: tuple[str, str], message: str
) -> None:
    store, job = Store(tmp_path), Job(tiny().cells()[0], 7)
    store.keep(job, {"mean": 80.0}, [])
    other = Job(parse("tiny", TINY.replace(*changes) if changes else TINY).cells()[0], 7)
    assert store.other(other) == message
    assert difference({"a": {"b": 1}, "gone": 1}, {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 2}}) == (
        "a.c = unset, not 2"
    )


HEADING = b'"method": "FedAvg", "condition": "", "seed": 7, "spec": {}'
DAMAGE = {
    b"[]": "(the document): Input should be an object",
    b'"x"': "(the document): Input should be an object",
    b"null": "(the document): Input should be an object",
    b"\xff\xfe\x00": "(the document): Invalid JSON: expected value at line 1 column 1",
    b'{%b, "rounds": []}' % HEADING: "final: missing",
    b'{%b, "final": {"mean": "80"}, "rounds": []}' % HEADING: "final.mean: Input should be a valid number",
    b'{%b, "final": {}, "rounds": [{"mean": 80}]}' % HEADING: "rounds.0: no round",
    b"": "(the document): Invalid JSON: EOF while parsing a value at line 1 column 0",
}


@pytest.mark.parametrize(("content", "why"), DAMAGE.items())
def test_a_damaged_result_is_none_and_made_again(tmp_path: Path, content: bytes, why: str) -> None:
    store, job = Store(tmp_path), Job(tiny().cells()[0], 7)
    assert store.damage(job) == ""
    file = tmp_path / "runs" / "fedavg-7.json"
    file.parent.mkdir()
    file.write_bytes(content)
    assert store.find(job) is None
    assert store.other(job) == ""
    assert store.damage(job) == f"runs/fedavg-7.json cannot be read ({why})"
    store.keep(job, {"mean": 80.0}, [{"round": 1.0}])
    assert store.find(job) is not None


def test_a_directory_in_the_place_of_a_result_is_set_aside(tmp_path: Path) -> None:
    store, job = Store(tmp_path), Job(tiny().cells()[0], 7)
    (tmp_path / "runs" / "fedavg-7.json").mkdir(parents=True)
    (tmp_path / "runs" / "fedavg-7.json" / "mine").touch()
    assert store.find(job) is None
    assert store.damage(job) == "runs/fedavg-7.json cannot be read (Is a directory)"
    store.keep(job, {"mean": 80.0}, [])
    assert store.find(job) is not None
    assert (tmp_path / "runs" / "fedavg-7.json.bad" / "mine").exists()
    (tmp_path / "runs" / "fedavg-7.json").unlink()
    (tmp_path / "runs" / "fedavg-7.json").mkdir()
    store.forget(job)
    assert store.damage(job) == ""


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"sessions": 3}', '{"sessions": [1]}', '{"sessions": [{"command": "x"}]}', "{"]
)
def test_a_damaged_record_of_calls_is_no_record(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    assert record.read(store).sessions == []
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DamagedError, match=r"run\.json cannot be read"):
        record.read(store)
    assert record.set_aside(store) == ["run.json.bad"]
    assert record.read(store).sessions == []
    assert (tmp_path / "run.json.bad").read_text() == content


def test_the_csv_file_has_a_row_for_each_result_and_leaves_missing_numbers_empty(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_results(path, [result("a, b", 1, 80.0), Result("c", "", 2, {}, {"mean": math.nan, "extra": 1.0}, [])])
    first, second = csv.DictReader(path.open())
    assert (first["method"], first["mean"], first["extra"]) == ("a, b", "80", "")
    assert (second["mean"], second["extra"], second["std"]) == ("nan", "1", "")


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


def test_what_is_measured_is_in_percent_and_can_leave_attackers_out() -> None:
    everybody = measures.final(history())
    assert (everybody["mean"], everybody["pooled"], everybody["client/client-002"]) == (50.0, 35.0, 0.0)
    honest = measures.final(history(), exclude=("client-002",))
    assert (honest["mean"], honest["std"], honest["variance"]) == (75.0, 25.0, 625.0)
    assert (honest["pooled"], honest["loss/train"], honest["worst"]) == (87.5, 1.5, 50.0)
    assert (honest["improved"], honest["skipped"], honest["refusals"], honest["seconds"]) == (75.0, 1.0, 1.0, 3.0)
    assert "client/client-002" not in honest
    assert [item["round"] for item in measures.rounds(history())] == [2.0]


def test_a_run_that_is_stopped_goes_on_where_it_was_and_comes_to_the_same(tmp_path: Path) -> None:
    job = Job(tiny().cells()[0], 1)
    stopped, straight = Store(tmp_path / "stopped"), Store(tmp_path / "straight")
    runner = Runner(stopped, Settings())
    events: list[Event] = []

    def stop_after_the_first_round(event: Event) -> None:
        events.append(event)
        runner.stop()

    runner.run([job, job], stop_after_the_first_round)
    assert [event.kind for event in events] == ["round", "stopped"]
    assert stopped.workspace(job).is_dir()
    for store in (stopped, straight):
        ended: list[Event] = []
        Runner(store, Settings()).run([job], ended.append)
        assert (ended[-1].kind, ended[-1].done) == ("finished", 3)
        assert not store.workspace(job).exists()
    ours, theirs = stopped.find(job), straight.find(job)
    assert ours is not None
    assert theirs is not None
    assert {**ours.final, "seconds": 0} == {**theirs.final, "seconds": 0}
    assert [item["round"] for item in ours.rounds] == [2.0, 3.0]


@pytest.fixture(scope="module")
def under_way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of which the one run is under way, after its first round."""
    directory = tmp_path_factory.mktemp("under-way")
    runner = Runner(Store(directory), Settings())
    runner.run([Job(tiny().cells()[0], 1)], lambda event: runner.stop())
    return directory


def made(store: Store, job: Job) -> Event:
    """How a run ends that is made, or goes on, now."""
    events: list[Event] = []
    Runner(store, Settings()).run([job], events.append)
    return events[-1]


def test_a_run_under_way_of_another_specification_is_left_alone(tmp_path: Path, under_way: Path) -> None:
    store = Store(shutil.copytree(under_way, tmp_path / "out"))
    job = Job(parse("tiny", TINY.replace("rounds = 3", "rounds = 4")).cells()[0], 1)
    assert other(store, job) == "rounds = 3, not 4"
    event = made(store, job)
    why = f"the interrupted run in {store.workspace(job)} cannot be used (it is of another specification: rounds = 3, "
    assert event.reason == why + "not 4): --anew makes it again"
    same = Job(tiny().cells()[0], 1)
    assert other(store, same) == ""
    assert made(store, same).kind == "finished"


def test_a_run_under_way_goes_on_with_what_was_written_when_it_began(tmp_path: Path, under_way: Path) -> None:
    store = Store(shutil.copytree(under_way, tmp_path / "out"))
    # The same to a reader, in another order.
    text = TINY.replace("rounds = 3, simulation.clients = 4", "simulation.clients = 4, rounds = 3")
    assert made(store, Job(parse("tiny", text).cells()[0], 1)).kind == "finished"


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("coordinator.db", b"x" * 4096, "(sqlite3.DatabaseError) file is not a database"),
        ("coordinator.toml", b"x", "coordinator.toml is not TOML: "),
        ("signing.key", b"x", "signing.key is damaged: it does not hold a private key"),
        ("blobs", b"x", "the bytes of blob "),
        ("blobs", None, "there is no blob blake3:"),
    ],
)
def test_a_run_under_way_that_is_damaged_says_what_to_do(
    tmp_path: Path, under_way: Path, file: str, content: bytes | None, why: str
) -> None:
    store, job = Store(shutil.copytree(under_way, tmp_path / "out")), Job(tiny().cells()[0], 1)
    place = store.workspace(job) / file
    for path in [path for path in place.rglob("*/*/*") if path.is_file()] if place.is_dir() else [place]:
        path.unlink() if content is None else path.write_bytes(content)
    reason = made(store, job).reason
    assert reason.startswith(f"the interrupted run in {store.workspace(job)} cannot be used (")
    assert reason.endswith("): --anew makes it again")
    assert why in reason
    assert "\n" not in reason
    assert "Background on this error" not in reason
    assert store.workspace(job).is_dir()


def test_a_run_that_another_process_is_making_says_so(tmp_path: Path, under_way: Path) -> None:
    from storage.database import Database

    store, job = Store(shutil.copytree(under_way, tmp_path / "out")), Job(tiny().cells()[0], 1)
    database = Database.open(f"sqlite:///{store.workspace(job)}/coordinator.db")
    database.lock_exclusive()
    assert made(store, job).reason == f"another process is making this run, in {store.workspace(job)}"
    database.close()
    assert made(store, job).kind == "finished"


def test_a_run_that_fails_says_why_its_updates_were_not_accepted_and_keeps_its_record(tmp_path: Path) -> None:
    text = TINY.replace("rounds = 3", "rounds = 3, limits.skipped_rounds = 2, train.learning_rate = 1e30")
    store, job = Store(tmp_path), Job(parse("tiny", text).cells()[0], 1)
    for _ in range(2):  # neither is it made again by itself
        event = made(store, job)
        assert (event.kind, event.done) == ("failed", 2)
        assert "the run ended FAILED: 2 rounds in a row were skipped" in event.reason
        assert "; 8 of 8 updates not accepted: training-diverged; " in event.reason
        assert f"its record is in {store.workspace(job)}, --anew makes it again" in event.reason
        assert (store.workspace(job) / "coordinator.db").exists()


def of_a_parent_that_is_killed(directory: Path, pids: "multiprocessing.Queue[int]") -> None:
    """Makes two runs beside each other, one of them without an end, and tells the ids of its children."""
    jobs = [
        Job(parse("tiny", TINY.replace("rounds = 3", f"rounds = {rounds}")).cells()[0], seed)
        for seed, rounds in enumerate((1, 1_000_000))
    ]
    seen: set[tuple[int, str]] = set()

    def tell(event: Event) -> None:
        seen.add((event.job.seed, event.kind))
        if {(0, "finished"), (1, "round")} <= seen:
            for child in multiprocessing.active_children():
                pids.put(child.pid or 0)
            pids.put(0)
            seen.clear()

    Runner(Store(directory), Settings(parallel=2)).run(jobs, tell)


@pytest.mark.parametrize("ended", ["its parent", "each child"])
def test_children_whose_parent_is_killed_end_and_so_do_those_that_are_told_to(tmp_path: Path, ended: str) -> None:
    context = multiprocessing.get_context("forkserver")
    pids: multiprocessing.Queue[int] = context.Queue()
    parent = context.Process(target=of_a_parent_that_is_killed, args=(tmp_path, pids))
    parent.start()
    children = list(iter(lambda: pids.get(timeout=60), 0))
    assert len(children) == 2
    if ended == "its parent":
        parent.kill()
    else:
        for child in children:
            os.kill(child, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, children)), "the end of the children", 30)
    parent.join()
    endless = Job(parse("tiny", TINY.replace("rounds = 3", "rounds = 1000000")).cells()[0], 1)
    runner = Runner(Store(tmp_path), Settings())
    events: list[Event] = []
    runner.run([endless], lambda event: (events.append(event), runner.stop()))
    assert [event.kind for event in events] == ["round", "stopped"]


def is_running(pid: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_runs_beside_each_other_are_processes_that_fail_finish_and_stop_by_themselves(tmp_path: Path) -> None:
    jobs = [
        Job(parse("tiny", TINY.replace(*change)).cells()[0], seed)
        for seed, change in enumerate((("clients = 4", "clients = 5000"), ("", ""), ("rounds = 3", "rounds = 1000000")))
    ]
    store = Store(tmp_path)
    runner = Runner(store, Settings(parallel=2))
    last: dict[int, Event] = {}

    def stop_when_the_endless_one_is_all_that_is_left(event: Event) -> None:
        last[event.job.seed] = event
        if {seed: item.kind for seed, item in last.items()} == {0: "failed", 1: "finished", 2: "round"}:
            runner.stop()

    runner.run(jobs, stop_when_the_endless_one_is_all_that_is_left)
    assert {seed: event.kind for seed, event in last.items()} == {0: "failed", 1: "finished", 2: "stopped"}
    assert "5000" in last[0].reason
    assert [store.find(job) is not None for job in jobs] == [False, True, False]
    assert store.workspace(jobs[2]).is_dir()


def test_a_run_whose_process_is_killed_fails_alone(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    jobs = [
        Job(parse("tiny", TINY.replace("rounds = 3", f"rounds = {rounds}")).cells()[0], seed)
        for seed, rounds in enumerate((1, 1_000_000))
    ]
    ends: dict[int, Event] = {}

    def kill_what_is_left(event: Event) -> None:
        if event.kind != "round":
            ends[event.job.seed] = event
        if event.job.seed == 1 and 0 in ends:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()

    Runner(Store(tmp_path), Settings(parallel=2)).run(jobs, kill_what_is_left)
    assert {seed: (event.kind, event.reason) for seed, event in ends.items()} == {
        0: ("finished", ""),
        1: ("failed", "its process ended with -9"),
    }


def test_the_command_runs_an_experiment_makes_only_what_is_missing_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.loading.load", lambda name: parse(name, TINY))
    out = tmp_path / "out"
    first = CliRunner().invoke(app, ["experiment", "run", "tiny", "--out", str(out), "--methods", "fedavg"])
    assert first.exit_code == 0, first.output
    assert "1/1  FedAvg, seed 1: mean" in first.output
    again = CliRunner().invoke(app, ["experiment", "run", "tiny", "--out", str(out), "--json"])
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert [item["method"] for item in document["results"]] == ["FedAvg", "FedMGDA+ eps=0.1"]
    assert [len(part["runs"]) for part in document["record"]["sessions"]] == [1, 1]
    assert document["figures"] == ["curves-mean.png", "bars-mean.png", "sweep-mean.png", "heat-mean.png"]
    assert len(list(csv.DictReader((out / "curves.csv").open()))) == 4
    table = (out / "table.md").read_text()
    (out / "table.md").unlink()
    compared = CliRunner().invoke(app, ["experiment", "compare", "tiny", "--out", str(out)])
    assert compared.exit_code == 0, compared.output
    assert (out / "table.md").read_text() == table
    assert "2 of 2 runs" in table


def command(*arguments: object) -> tuple[int, str]:
    """The exit code of an `experiment` command, and all that it says."""
    done = CliRunner().invoke(app, ["experiment", *map(str, arguments)])
    if isinstance(done.exception, Failure):
        return done.exception.code, done.output + done.exception.message
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def tiny_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue holds the tiny experiment, under every name."""
    monkeypatch.setattr("experiments.loading.load", lambda name: parse(name, TINY))


@pytest.mark.usefixtures("tiny_is_there")
def test_nothing_of_another_specification_is_replaced_unasked_and_no_table_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("run", "tiny", "--rounds", 1, "--methods", "fedavg")[0] == 0
    out = Path("results/tiny-1-rounds")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    code, said = command("run", "tiny", "--out", out)
    assert code == 2
    assert (
        "1 of these 2 runs are in results/tiny-1-rounds with another specification (rounds = 1, not 3): name another "
        "--out, or --anew to replace them" in said
    )
    code, said = command("compare", "tiny", "--out", out)
    assert code == 2
    assert "1 finished runs in results/tiny-1-rounds, none of this specification: was it --quick, --rounds N?" in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert command("compare", "tiny", "--rounds", 1)[0] == 0
    assert command("compare", "tiny", "--quick", "--rounds", 1)[1].startswith(
        "no results in results/tiny-quick-1-rounds"
    )
    assert command("run", "tiny", "--out", out, "--methods", "fedavg", "--anew")[0] == 0
    assert command("compare", "tiny", "--out", out)[0] == 0


@pytest.mark.usefixtures("tiny_is_there")
def test_anew_removes_nothing_while_another_process_makes_one_of_the_runs(tmp_path: Path, under_way: Path) -> None:
    from storage.database import Database

    out = shutil.copytree(under_way, tmp_path / "out")
    workspace = Store(out).workspace(Job(tiny().cells()[0], 1))
    database = Database.open(f"sqlite:///{workspace}/coordinator.db")
    database.lock_exclusive()
    code, said = command("run", "tiny", "--out", out, "--anew")
    database.close()
    assert code == 2
    assert "--anew removes nothing while another process makes one of these runs" in said
    assert f"pid {os.getpid()}" in said
    assert workspace.is_dir()


@pytest.mark.usefixtures("tiny_is_there")
def test_a_run_under_way_with_other_settings_is_refused_before_anything_is_made(
    tmp_path: Path, under_way: Path
) -> None:
    out = shutil.copytree(under_way, tmp_path / "out")
    code, said = command("run", "tiny", "--out", out, "--rounds", 2)
    assert code == 2
    assert "1 of these 2 runs are in " in said
    assert "(rounds = 3, not 2)" in said
    assert [path.name for path in out.iterdir()] == ["work"]
    assert command("run", "tiny", "--out", out, "--rounds", 2, "--methods", "fedavg", "--anew")[0] == 0


@pytest.mark.usefixtures("tiny_is_there")
def test_damaged_files_are_told_of_and_paths_may_have_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("Z[/b]")
    assert command("run", "tiny", "--out", out, "--rounds", 1)[0] == 0
    (out / "runs" / "fedavg-1.json").write_text("[]")
    (out / "run.json").write_text("[]")
    why = "cannot be read ((the document): Input should be an object)"
    code, said = command("compare", "tiny", "--out", out, "--rounds", 1)
    assert code == 0
    assert f"run.json {why}: kept as run.json.bad and results.csv.bad and curves.csv.bad, and begun anew\n" in said
    assert f"runs/fedavg-1.json {why}: left out\n" in said
    assert (out / "run.json.bad").read_text() == "[]"
    code, said = command("run", "tiny", "--out", out, "--rounds", 1)
    assert code == 0
    assert said.count(f"runs/fedavg-1.json {why}: made again\n") == 1
    assert "in Z[/b]: table.md, " in said
    assert [len(part["runs"]) for part in json.loads((out / "run.json").read_text())["sessions"]] == [1, 1]
    (out / "table.md").unlink()
    (out / "table.md").mkdir()
    assert command("compare", "tiny", "--out", out, "--rounds", 1) == (1, f"cannot use {out}/table.md: Is a directory")


@pytest.mark.usefixtures("tiny_is_there")
def test_no_tables_are_written_while_nothing_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.runner.Runner.run", lambda self, jobs, tell: None)
    out = tmp_path / "out"
    assert command("run", "tiny", "--out", out)[0] == 130
    assert [path.name for path in out.iterdir()] == ["run.json"]


def test_the_list_says_whether_data_is_there(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data.gz").touch()
    listed = CliRunner().invoke(app, ["experiment", "list", "--data", str(tmp_path), "--json"])
    there = {item["name"]: item["data_there"] for item in json.loads(listed.stdout)["experiments"]}
    assert set(there) == set(names())
    without_data = [
        "drift-digits",
        "fair-digits",
        "improved-digits",
        "leakage-digits",
        "objectives-digits",
        "objectives-served",
        "preferences-digits",
        "private-digits",
        "robustness-digits",
        "robustness-objectives",
    ]
    assert [name for name, found in there.items() if found] == sorted(["fedmgda-adult-bias", *without_data])
    assert CliRunner().invoke(app, ["experiment", "list"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "fedfv-table9"], "no experiment 'fedfv-table9': there are "),
        (["run", "fedfv-table3"], "fedfv-table3 needs data: --data DIR, with FashionMNIST/raw in it"),
        (["run", "fedfv-table3", "--data", "."], ". lacks the data of fedfv-table3: FashionMNIST/raw"),
        (["run", "robustness", "--quick", "--methods", "FedSGD"], "no method 'FedSGD': there are 'FedAvg', "),
        (["run", "robustness", "--quick", "--seeds", "one"], "--seeds 'one': expected whole numbers"),
        (["run", "robustness", "--quick", "--seeds=-1"], "seed: Input should be greater than or equal to 0"),
        (["run", "robustness", "--quick", "--device", "foo"], "no device 'foo': use auto, cpu, cuda or cuda:N"),
        (["run", "robustness", "--quick", "--backend", "foo"], "no backend 'foo': there are auto, stacked, loop"),
        (["run", "robustness-digits", "--out", "/dev/null"], "cannot use /dev/null: File exists"),
        (["run", "robustness-digits", "--out", "/dev/null/x"], "cannot use /dev/null/x: Not a directory"),
        (["compare", "ours", "--out", "nowhere"], "no results in nowhere: `fedpareto experiment run ours` makes them"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_can(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["experiment", *arguments]).exception
    assert isinstance(refused, Failure)
    assert refused.code == 2
    assert message in refused.message


def test_a_command_on_record_names_no_directories() -> None:
    words = ["fedpareto", "experiment", "run", "a", "--data", "/home/me/data", "--out=/home/me/x y", "--seeds", "1,2"]
    assert provenance.command(words) == "fedpareto experiment run a --data DATA --out=OUT --seeds 1,2"
