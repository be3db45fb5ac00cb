"""What a reader that decodes signs gets of one member from blurred sums, and what it gets from sums without blur.

An update with few values is the worst case: its coordinates are plus or minus one number.
"""

from dataclasses import replace
from itertools import product
from math import erf, sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from cover_search.laboratory import measure
from cover_search.members import SearchMembers
from cover_search.optimizer import PlanSearch
from cover_search.plan import crafted
from cover_search.reading import SumReader, blurred_vector, signs
from cover_search.specification import SearchSpecification
from cover_search.target import CosineTarget, SignsTarget
from cover_search.updates import Updates
from federation.aggregation.secure import session
from federation.aggregation.secure.covered import Covered
from federation.secure.blur import deviation
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.cover import cover
from federation.secure.masks import masked, reals
from federation.secure.thresholds import Mode, Thresholds, truncated
from federation.work.secure.journal import Journal
from leakage.federation import unit_rows
from tests.federation.work.scene import cast, play, setting
from tests.few import few, few_of

SIZES = few_of([5, 10, 20, 50], 5, 20)
EQUAL = Bounds(kind=BoundKind.FIXED)
FREE = Bounds(kind=BoundKind.NONE, signed=True)
UNSIGNED = Bounds(kind=BoundKind.NONE)
Reals = NDArray[np.float64]


def alike(m: int, sums: int = 1) -> Reals:
    """Inner products of uncorrelated updates, which are the same in every sum."""
    return np.asarray(np.kron(np.ones((sums, sums)), np.eye(m)), np.float64)


def linear(m: int, rule: Bounds, draws: tuple[int, ...], c: float = 1.0, **changed: object) -> float:
    """The largest cosine of a linear combination of sums that are asked so often."""
    members = SearchMembers(rule, Thresholds(m, Mode.PRIVATE))
    target = CosineTarget(members, alike(m, len(draws)), deviation(c, members.cohort), draws, **changed)  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    return target.cosine(PlanSearch(target, len(draws), 60, random, crafted(members, len(draws), random)).best())


def measured(**keys: object) -> dict[str, float]:
    """The measures of a search with the reader of signs."""
    given = {"name": "reader", "seed": 0, "trials": 100, "reader": "signs", **keys}
    return dict(measure(SearchSpecification.model_validate(given)))


# --- the formulas


@pytest.mark.parametrize("m", SIZES)
def test_of_sums_in_which_all_others_cancel_the_blur_leaves_what_the_formula_says(m: int) -> None:
    for k in (1, 2, 4, 16):
        assert linear(m, EQUAL, (k,), others_known=True) == pytest.approx(1 / sqrt(1 + 1 / k), abs=1e-6)
    least = SearchMembers(UNSIGNED, Thresholds(m, Mode.PRIVATE))
    n = least.cohort.n_min - least.cohort.t
    expected = 1 / sqrt(1 + float(least.least) / n)  # the least cover has less noise
    assert linear(m, UNSIGNED, (1,), others_known=True) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("m", SIZES)
def test_of_pairs_that_differ_by_the_member_the_blur_leaves_what_the_formula_says(m: int) -> None:
    for p in (1, 4, 16):
        assert linear(m, EQUAL, (p, p)) == pytest.approx(1 / sqrt(1 + 2 / p), abs=0.03)
    assert linear(m, EQUAL, (1, 2)) == pytest.approx(1 / sqrt(2.5), abs=0.035)  # three sums
    assert linear(m, EQUAL, (1, 1), c=0.0) == pytest.approx(1)


@pytest.mark.parametrize("m", SIZES)
def test_of_pairs_with_the_negative_coefficient_the_blur_leaves_what_the_cover_says(m: int) -> None:
    members = SearchMembers(FREE, Thresholds(m, Mode.PRIVATE))
    n = members.cohort.n_min - members.cohort.t
    for p in (1, 4, 16):
        expected = 1 / sqrt(1 + float(members.least) / (2 * p * n))
        assert linear(m, FREE, (p, p)) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("m", [5, 10, 20])
def test_the_noise_is_that_of_the_cover_in_coordinates_that_all_use_and_the_members_own_elsewhere(m: int) -> None:
    cohort, random, c = Thresholds(m, Mode.PRIVATE), np.random.default_rng(m), 1.0
    honest, size = cohort.n_min - cohort.t, deviation(c, cohort)
    a = random.uniform(0.5, 1.0, honest)
    updates = unit_rows(random.choice([-1.0, 1.0], (honest, 20_000)))
    noise = sum(x * (blurred_vector(u, size, random) * sqrt(1 + size**2) - u) for x, u in zip(a, updates, strict=True))
    own = {str(i): int(x * 2**32) for i, x in enumerate(a)}
    expected = c * sqrt(cover(own, "0", 0) / honest)
    assert np.linalg.norm(noise) / a[0] == pytest.approx(expected, rel=0.03)
    alone = blurred_vector(updates[0], size, random)
    flipped = (1 - erf(sqrt(honest / 2) / c)) / 2  # the sign of a coordinate that the member uses alone
    assert np.mean(alone * updates[0] < 0) == pytest.approx(flipped, abs=0.01)


@pytest.mark.parametrize("m", few_of([5, 10, 20, 50], 5))
def test_the_noise_of_a_sum_of_all_with_equal_weights_is_as_long_as_the_formula_says(m: int) -> None:
    found = measured(members=m, updates="digits", reader="linear", trials=1, blur=1.0, algorithm="evaluation")
    n = Thresholds(m, Mode.PRIVATE).n_min - Thresholds(m, Mode.PRIVATE).t
    assert found["noise"] == pytest.approx(1 / sqrt(m * n), rel=0.1)
    assert found["kept"] == pytest.approx({5: 0.91, 10: 0.95, 20: 0.98, 50: 0.99}[m], abs=0.01)


# --- readers of signs


def test_the_reader_weighs_all_signs_of_the_others() -> None:
    random = np.random.default_rng(0)
    rows, sizes = np.array([[1.0, 0.7, 0.7, 2.0], [1.0, 0.5, -0.5, 0.0]]), np.ones((4, 5))
    sizes[1, 0] = 0.0  # a coordinate that a member leaves as it is
    seen, variances = random.normal(0, 2, (2, 5)), random.uniform(0.2, 1, (2, 5))
    for value in range(5):
        weights = dict.fromkeys((-1.0, 1.0), 0.0)
        for own, *others in product((-1.0, 1.0), repeat=4):
            expected = rows @ (np.array([own, *others]) * sizes[:, value])
            weights[own] += np.exp(-(np.square(seen[:, value] - expected) / variances[:, value]).sum() / 2)
        mean = (weights[1.0] - weights[-1.0]) / (weights[1.0] + weights[-1.0])
        assert signs(seen, rows, sizes, variances)[value] == pytest.approx(mean, abs=0.03)


def test_a_reader_of_many_members_with_different_coefficients_takes_the_small_ones_for_noise() -> None:
    random = np.random.default_rng(0)
    rows, true = np.array([[8.0, 4.0, *random.uniform(0.01, 0.02, 40)]]), random.choice([-1.0, 1.0], (42, 50))
    means = signs(rows @ true, rows, np.ones((42, 50)), np.full((1, 50), 1e-12))  # of 2^41 combinations
    assert means == pytest.approx(true[0])


@pytest.mark.parametrize("m", few_of([5, 10, 20], 10))
@pytest.mark.full
def test_tags_are_decoded_without_blur_and_say_hardly_more_than_the_bound_with_it(m: int) -> None:
    bare, blurred = measured(members=m, blur=0.0), measured(members=m, blur=1.0)
    assert bare["decoded"] > 0.99
    assert blurred["decoded"] < blurred["bound"] + 0.02
    assert blurred["cosine"] == pytest.approx(
        blurred["bound"] / sqrt(1 + deviation(1.0, Thresholds(m, Mode.PRIVATE)) ** 2), abs=1e-3
    )


@pytest.mark.full
def test_less_blur_does_not_hide_few_values() -> None:
    quarter, half = (measured(members=10, blur=c)["decoded"] for c in (0.25, 0.5))
    assert quarter > 0.95
    assert half == pytest.approx(0.75, abs=0.03)


@few("coefficients")
@pytest.mark.parametrize("keys", [{}, {"algorithm": "fedavg-n", "mode": "sum"}], ids=["coefficients", "lengths"])
@pytest.mark.full
def test_signs_of_members_that_train_are_decoded_without_blur_alone(keys: dict[str, str]) -> None:
    same = {"members": 5, "updates": "adam", "knows": "nothing", **keys}
    bare, blurred = measured(blur=0.0, **same), measured(blur=1.0, **same)
    assert bare["decoded"] > 0.999
    assert blurred["decoded"] < blurred["bound"] + 0.02


@pytest.mark.full
def test_what_a_model_repeats_in_many_coordinates_is_not_hidden() -> None:
    ideal = measured(members=10, copies=65, blur=1.0)
    trained = measured(members=10, updates="constant", knows="nothing", blur=1.0)
    assert min(ideal["decoded"], trained["decoded"]) > 0.95


def test_where_most_others_are_zero_a_members_signs_show() -> None:
    assert measured(members=10, zeros=0.8, blur=1.0)["decoded"] > 0.8


def test_of_few_values_several_sums_show_more_than_their_best_linear_combination() -> None:
    same = {"members": 10, "algorithm": "fedavg-n", "mode": "sum", "blur": 1.0}
    found = measured(sums=2, repeats=(4, 4), **same)
    assert found["cosine"] == pytest.approx(1 / sqrt(1.5), abs=0.03)
    assert found["decoded"] > found["cosine"] + 0.05
    assert measured(members=10, repeats=(16,), blur=1.0)["decoded"] > 0.95  # tags again, without a difference


def test_a_reading_of_blurred_sums_agrees_with_the_formula_of_the_search() -> None:
    m, random = 10, np.random.default_rng(0)
    members = SearchMembers(FREE, Thresholds(m, Mode.PRIVATE))
    target = SignsTarget(members, alike(m), deviation(1.0, members.cohort), (1,))
    updates = Updates((unit_rows(random.choice([-1.0, 1.0], (m, 8000))),))
    plan = PlanSearch(target, 1, 60, random, crafted(members, 1, random)).best()
    reading = SumReader(target, updates, (1,), random).read(plan)
    assert reading.decoded == pytest.approx(target.cosine(plan), abs=0.02)
    assert reading.linear == pytest.approx(CosineTarget(members, alike(m), target.deviation).cosine(plan), abs=0.02)


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_real_members_send_what_the_reader_decodes(monkeypatch: pytest.MonkeyPatch, c: float) -> None:
    m, d, random = 5, 1500, np.random.default_rng(1)
    members, weights = SearchMembers(FREE, Thresholds(m, Mode.SUM)), np.array([1.0, 0.75, 0.71, 0.72, 0.0])
    assert members.accept(weights, np.ones(m, bool))
    a = members.normed(weights)
    monkeypatch.setattr(session, "covered", lambda *_: Covered(tuple(truncated(a.tolist())), 1.0))
    scene, updates = cast(m), random.choice([-1.0, 1.0], (m, d))
    for update, (name, member) in zip(updates, scene.members.items(), strict=True):
        scene.members[name] = replace(member, vector=update.astype(np.float32))
    total = play(scene, Mode.SUM, setting_=setting(scene, Mode.SUM, blur=c))
    assert not scene.declined
    colluder, coefficient = total.record.members[1], truncated(a.tolist())[1]
    own = next(masked(Journal(scene.members[colluder].memory, total.record.session).vector(), coefficient, ()))
    size, honest = deviation(c, members.cohort), np.delete(a, 1)
    seen = reals(total.words - own) * sqrt(1 + size**2)
    variance = size**2 * np.square(honest).sum() / d + 2.0**-56
    means = signs(seen[None], honest[None], np.full((4, d), d**-0.5), np.full((1, d), variance))
    cosine = means @ updates[0] / (np.linalg.norm(means) * sqrt(d))
    assert cosine > 0.999 if c == 0 else cosine < members.bound + 0.02


# --- failures


@pytest.mark.parametrize("m", [5, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_sum_tells_a_random_direction_by_coordinates_that_nobody_uses_and_zero_by_its_length(m: int) -> None:
    same = {"members": m, "updates": "digits", "reader": "linear", "trials": 1, "sums": 2, "blur": 1.0}
    same |= {"algorithm": "fedavg-n", "mode": "sum"}
    direction, zero = measured(fails="random", **same), measured(fails="zero", **same)
    assert direction["told/zeros"] == 1.0
    assert zero["told/zeros"] == pytest.approx(0.5, abs=0.2)
    assert zero["told/length"] > 0.7
    assert min(direction["told/gram"], zero["told/gram"]) > 0.85


@pytest.mark.parametrize("m", SIZES)
def test_a_failure_in_one_of_two_sums_shows_about_as_much_of_a_member_as_its_absence(m: int) -> None:
    assert linear(m, EQUAL, (1, 1), fails="random") <= linear(m, EQUAL, (1, 1)) + 1e-9
    n = Thresholds(m, Mode.PRIVATE).n_min - Thresholds(m, Mode.PRIVATE).t
    assert linear(m, EQUAL, (1, 1), fails="zero") == pytest.approx(1 / sqrt(1 + (2 * n - 1) / n), abs=0.03)
