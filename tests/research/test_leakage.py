"""What a coordinator learns, and what it reaches with noise of its choice that `fedpareto verify` does not detect.

Attacks find what is there to find, and the views are those of the private round.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from federation.record.noise_rows import noise_defect
from federation.secure import masks, sketch
from federation.secure.blocks import blocks
from federation.secure.fields import F_P
from federation.secure.thresholds import S_BITS, Mode, truncated
from federation.vectors import to_bytes, update_layout, update_rows
from fedpareto.cli.main import app
from fedpareto.experiments import plots
from fedpareto.experiments.loading import load
from fedpareto.experiments.result_store import Measures, RunResult, Store
from leakage import labels, laboratory, measured_models, views
from leakage.accounting import epsilon, noise_multiplier
from leakage.evaluations import federation
from leakage.federation import Clients, Network, local_updates
from leakage.specification import LeakageSpecification, LocalTraining
from tests.federation.secure.scene import session
from tests.fedpareto.experiments import scene as experiment_cases
from tests.paths import DOCS
from tests.research.noise_search import Search

RESULTS = DOCS / "results/leakage-digits"


one_thread = experiment_cases.one_thread  # a fixture


def measured(attack: str, view: str, **changes: object) -> Measures:
    specification = {"shadow_clients": 60, "restarts": 2, "iterations": 150, **changes}
    named = {"name": "x", "seed": 0, "attack": attack, "view": view, **specification}
    return laboratory.measure(LeakageSpecification.model_validate(named))[0]


@pytest.mark.full
def test_labels_are_read_from_an_update_its_bias_its_sketch_or_nine_probes_far_better_than_guessed() -> None:
    guessed = measured("labels", "nothing")["labels/distance"]
    for view, changes in (("update", {}), ("bias", {}), ("sketch", {}), ("gram", {"probes": 9})):
        found = measured("labels", view, **changes)
        assert found["labels/distance"] < guessed / 2, view
        assert found["labels/top"] > 80, view


@pytest.mark.full
def test_a_private_round_hides_labels_until_members_collude() -> None:
    guessed = measured("labels", "nothing")["labels/distance"]
    assert measured("labels", "private")["labels/distance"] > guessed - 0.1
    assert measured("labels", "private", colluders=3)["labels/distance"] < guessed - 0.1


@pytest.mark.full
def test_much_noise_hides_labels() -> None:
    guessed = measured("labels", "nothing")["labels/distance"]
    hidden = measured("labels", "update", epsilon=0.1)
    assert hidden["labels/distance"] > guessed - 0.08
    assert hidden["epsilon"] == pytest.approx(0.1, rel=1e-3)


@pytest.mark.full
def test_a_copy_of_a_run_shows_nothing_more_of_labels_and_models_with_a_changed_bit_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_models, "VICTIMS", 2)
    found = {name: scores[0] for name, scores in measured_models.measured(federation(10, 0), 0.1).items()}
    nothing, once, copy, pair, limited, five, chosen, many = found.values()
    assert abs(copy - once) < 0.15
    assert many < five < pair < nothing
    assert chosen < pair < limited


def test_a_huge_loss_tells_whether_a_record_is_there_unless_the_noise_is_large() -> None:
    assert measured_models.told(10, 0.1, pair=False) > 0.99
    assert 0.7 < measured_models.told(10, 0.3, pair=True) < 0.9


def test_a_difference_of_sums_points_towards_the_member_that_was_missing() -> None:
    found = measured("labels", "difference", equal_weights=True)
    assert 0.4 < found["cosine"] < 0.95
    assert measured("labels", "difference", colluders=3, equal_weights=True)["cosine"] > found["cosine"]


@pytest.mark.full
def test_images_are_found_in_a_gradient_and_not_under_noise() -> None:
    mean = measured("images", "nothing")
    found = measured("images", "update")
    assert found["images/found"] > 85 > mean["images/found"]
    assert found["images/psnr"] > mean["images/psnr"] + 10
    assert measured("images", "update", epsilon=1.0)["images/psnr"] < mean["images/psnr"]


def test_sketches_are_those_of_the_secure_round() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2, 300))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ours = views.sketches(views.sketch_matrix(b"session", 300, 64), vectors)
    for mine, vector in zip(ours, vectors, strict=True):
        theirs = np.ldexp(F_P.decode(sketch.first_sketch(b"session", blocks(vector), 64)).astype(float), -S_BITS)
        assert np.abs(mine - theirs).max() <= 2.0**-S_BITS


def test_the_matrix_and_the_sum_of_a_private_round_are_those_that_a_session_opens() -> None:
    played = session(10, Mode.PRIVATE, d=60)
    units = np.stack([played.updates[name] for name in played.ids])
    S = views.sketch_matrix(played.digest, 60, played.k)
    secrets = [played.secrets[name] for name in played.ids]
    seen = views.private_round(units, S, secrets, b"view", 7, None)
    X = views.sketches(S, units)
    theirs, ours = played.gram(played.ids) - X @ X.T, seen.gram - X @ X.T
    upper = np.triu_indices(10)
    assert ours[upper].std() == pytest.approx(theirs[upper].std(), rel=0.5)
    assert np.abs([ours, theirs]).max() < 10 / (4 * np.sqrt(played.k))
    a = dict(zip(played.ids, truncated(list(seen.a)), strict=True))
    words = played.sum({name: played.masked(name, a) for name in played.ids}, a)
    assert np.abs(masks.reals(words) - seen.total).max() < 10 * 2.0**-28
    assert seen.a.sum() == pytest.approx(1)
    assert seen.a.max() <= played.thresholds.cap + 1e-9


def test_colluders_get_two_numbers_each_of_every_other_member_and_know_their_own_updates() -> None:
    played = session(10, Mode.PRIVATE, d=60)
    units = np.stack([played.updates[name] for name in played.ids])
    S = views.sketch_matrix(played.digest, 60, played.k)
    probes = np.linalg.qr(np.random.default_rng(1).standard_normal((played.k, 6)))[0].T
    seen = views.private_round(units, S, [bytes(32)] * 10, b"view", 7, probes)
    assert seen.probed.shape == (7, 6)
    errors = seen.probed - views.sketches(S, units[:7]) @ probes.T
    assert 0 < np.abs(errors).max() < 0.1
    assert np.abs(seen.total - seen.a[:7] @ units[:7]).max() < 1e-7


@pytest.mark.parametrize(
    ("sigma", "samples", "batch", "expected"),
    [(1.0, 500, 32, 20), (2.0, 500, 32, 6.7), (1.0, 5000, 64, 7.8), (2.0, 5000, 64, 2.7)],
)
def test_epsilon_is_that_of_other_accountants_and_not_less(
    sigma: float, samples: int, batch: int, expected: float
) -> None:
    found = epsilon(sigma, batch / samples, 100 * -(-samples // batch), 1e-5)
    assert 0.99 * expected < found < 1.07 * expected


def test_the_noise_is_the_least_that_keeps_epsilon() -> None:
    sigma = noise_multiplier(3.0, 0.1, 9, 1e-5)
    assert epsilon(sigma, 0.1, 9, 1e-5) <= 3.0 < epsilon(sigma * 0.999, 0.1, 9, 1e-5)


def test_epsilon_of_the_published_results_is_that_of_their_noise() -> None:
    runs = Store(RESULTS).runs().values()
    noisy = [run for run in runs if run.spec["attack"] == "labels" and run.spec["epsilon"] is not None]
    members = {(run.spec["sessions"], run.final["noise"], run.final["epsilon"]) for run in noisy}
    assert len(members) == 8
    for sessions, sigma, spent in members:
        assert epsilon(sigma, 16 / 143, 9 * sessions, 1e-5) == pytest.approx(spent, rel=1e-4)


def test_images_are_drawn_below_the_true_ones_with_a_frame_for_those_that_were_recognised() -> None:
    from matplotlib.figure import Figure

    experiment, axes = load("leakage-digits"), Figure().add_subplot()
    plot = next(item for item in experiment.plots if item.kind == "images")
    runs = [run for run in Store(RESULTS).runs().values() if run.method in ("update", "Gram matrix", "private round")]
    assert plots._images(axes, experiment, plot, runs)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["true", "update", "private round"]
    assert len(axes.get_xticklabels()) == 3
    shown = [image for run in runs if run.seed == 0 for image in run.rounds]
    assert len(axes.patches) == len(shown) == 36
    colours: list[Any] = [frame.get_edgecolor() for frame in axes.patches]
    assert sum(green > red for red, green, *_ in colours) == sum(image["found"] for image in shown)
    canvas = axes.images[0].get_array()
    assert np.asarray(canvas)[:8, :8].ravel().tolist() == [runs_of(runs, "update")[0][f"true/{i}"] for i in range(64)]
    assert np.asarray(canvas)[20:28, 10:18].ravel().tolist() == [
        runs_of(runs, "private round")[1][f"pixel/{i}"] for i in range(64)
    ]
    assert not plots._images(Figure().add_subplot(), experiment, plot, [runs[0]])


def runs_of(runs: list[RunResult], method: str) -> list[Measures]:
    """The images of a method with one image in a batch and seed 0."""
    return next(run.rounds for run in runs if (run.method, run.condition) == (method, "images, batch of 1"))


def test_one_sample_moves_a_private_step_by_no_more_than_the_clipping_norm() -> None:
    network, generator = Network(0), torch.Generator()
    x, y = torch.rand(1, 5, 64, generator=generator.manual_seed(1)), torch.arange(5)[None]
    without = x.clone()
    without[0, 4] = 0
    train = LocalTraining(steps=1, batch=5, learning_rate=1.0, clip=0.2)
    moved = [
        local_updates(network, network.start, Clients(images, y), train, generator.manual_seed(2), sigma=1e-9)
        for images in (x, without)
    ]
    assert max([float(update.norm()) for update in moved]) <= 0.2 + 1e-6
    assert 1e-3 < float((moved[0] - moved[1]).norm()) <= 2 * 0.2 / 5 + 1e-6


def test_a_bias_that_is_an_exact_mixture_gives_the_histogram() -> None:
    rng = np.random.default_rng(0)
    by_label = rng.dirichlet(np.ones(10), size=10) - np.eye(10)
    histograms = rng.dirichlet(np.full(10, 0.3), size=4)
    assert labels.from_bias(histograms @ by_label, by_label) == pytest.approx(histograms, abs=1e-6)


def test_guesses_become_the_nearest_histograms() -> None:
    rows = np.array([[0.5, 0.5, 0.0], [2.0, 0.0, 0.0], [0.2, 0.2, 0.2], [-1.0, 0.4, 0.8]])
    expected = [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3] * 3, [0.0, 0.3, 0.7]]
    assert labels.on_simplex(rows) == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colluders": 4}, "colluders: at most 3, got 4"),
        ({"colluders_at_most": 4}, "fewer than a third"),
        ({"attack": "images", "view": "gram"}, "view: gram is for labels"),
        ({"view": "sketch", "epsilon": 1.0}, "epsilon: only with view update, got sketch"),
        ({"view": "difference", "sessions": 2}, "sessions: one, with attack labels and view difference"),
        ({"probe": 1}, "Extra inputs are not permitted"),
    ],
)
def test_a_specification_that_means_nothing_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LeakageSpecification.model_validate({"name": "x", "seed": 0, "attack": "labels", "view": "update", **changes})


@pytest.mark.full
def test_every_run_of_the_experiment_is_what_its_names_say() -> None:
    experiment = load("leakage-digits")
    for form in (experiment, experiment.in_quick_form()):
        for cell in form.cells():
            spec = cell.spec(0)
            assert isinstance(spec, LeakageSpecification)
            assert cell.condition.name.startswith(spec.attack)
            assert cell.condition.name.endswith(f"batch of {spec.batch}") or spec.attack == "labels"
            assert ("trained" in cell.condition.name.split() or spec.sessions == 4) == spec.trained
            assert cell.method.name.endswith("3 colluders") == (spec.colluders == 3)
            name = cell.method.name
            assert (f"DP epsilon {spec.epsilon:g}" in name) if spec.epsilon else "DP" not in name


@pytest.mark.full
def test_the_quick_form_makes_tables_and_the_figure_and_can_be_compared_again(tmp_path: Path) -> None:
    out = ["leakage-digits", "--quick", "--out", str(tmp_path)]
    made = CliRunner().invoke(app, ["experiment", "run", *out, "--methods", "nothing: the average,update"])
    assert made.exit_code == 0, made.output
    table = (tmp_path / "table.md").read_text()
    figures = [tmp_path / f"{name}.png" for name in ("heat-labels-distance", "heat-images-found", "images-found")]
    assert "| nothing: the average |" in table
    for figure in figures:
        assert figure.read_bytes().startswith(b"\x89PNG")
        figure.unlink()
    again = CliRunner().invoke(app, ["experiment", "compare", *out])
    assert again.exit_code == 0, again.output
    assert all(figure.exists() for figure in figures)
    assert (tmp_path / "table.md").read_text() == table


# --- noise of its choice


@pytest.mark.parametrize(
    ("clients", "rounds"), [(10, 1), pytest.param(100, 10, marks=pytest.mark.full)], ids=["1-round", "10-rounds"]
)
@pytest.mark.full
def test_noise_that_passes_the_check_gives_the_coordinator_the_model_that_it_wants(
    tmp_path: Path, clients: int, rounds: int
) -> None:
    wrong, backdoor = Search(clients, 1.0), Search(clients, 1.0)
    assert wrong.play(rounds, wrong.next_digit)[-1].next > 0.9
    reached = backdoor.play(rounds, backdoor.marked_as_zero)[-1]
    assert (reached.right > 0.8, reached.marked > 0.9) == (True, True)
    assert Search(clients, 1.0).play(rounds, None)[-1].marked < 0.3
    for search in (wrong, backdoor):
        path = tmp_path / "noise"
        path.write_bytes(to_bytes(update_layout([("noise", len(search.noise))]), search.noise.numpy()))
        assert noise_defect(update_rows(path).values()) == ""
