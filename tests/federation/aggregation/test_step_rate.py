"""The server's rate "auto": the bound on a step, what a member can do with it, and where it is refused."""

import math
from itertools import product

import numpy as np
import pytest

from coordinator.rounds.runs.specification import parse_run
from federation.aggregation.interface import Combination, Coordinates
from federation.aggregation.metrics.step_rate import (
    bound,
    direction_length,
    member_lengths,
    scheduled_rate,
    shown_lengths,
    step_rate,
)
from federation.aggregation.phases import Past, PhaseReply, Replies, Step
from federation.spec.run_spec import RunSpec, SpecError
from tests.few import few

HEAD = 'name = "bounded"\ntask = "digits"\nrounds = 4\n'
AUTO = 'server.learning_rate = "auto"\n'


@pytest.mark.parametrize(
    ("lengths", "direction", "factor"),
    [
        ([0.5], 1.0, 0.5),  # one member
        ([0.5], 0.25, 1.0),
        ([0.5, 3.0], 1.0, 0.5),  # the smaller one of two
        ([3.0, 0.1, 0.5], 1.0, 0.5),
        ([0.1, 0.5, 0.7, 3.0], 1.0, 0.5),  # the second of four
        ([0.5, 0.5, 0.5], 0.5, 1.0),  # equal lengths
        ([0.0, 0.0, 5.0, 5.0], 1.0, 0.0),  # half of the members sent next to nothing
        ([0.0, 5.0, 5.0], 1.0, 1.0),
        ([0.0], 0.0, 1.0),  # no direction
        ([0.5], math.inf, 0.0),
    ],
)
def test_a_step_is_at_most_as_long_as_the_lower_median_of_the_updates_and_its_rate_at_most_1(
    lengths: list[float], direction: float, factor: float
) -> None:
    assert bound(lengths, direction) == factor


def test_without_updates_there_is_no_bound() -> None:
    with pytest.raises(ValueError, match="no updates"):
        bound([], 1.0)


def test_a_member_counts_once_however_many_rows_it_sends() -> None:
    K = np.diag([1.0, 4.0, 9.0, 16.0, 25.0, 1e6])  # lengths 1 to 5, and that of an update of an earlier round
    assert member_lengths(K, [1, 3, 1]) == [1.0, 3.0, 5.0]
    assert member_lengths(K, [1, 4, 0]) == [1.0, 3.0]  # of four rows, the second
    with pytest.raises(ValueError, match="sent 7 rows; K has 6"):
        member_lengths(K, [7])


def test_a_length_that_a_member_did_not_show_counts_as_0() -> None:
    replies = [PhaseReply(client_id=name, samples=1, losses={}, metrics={"norm": 2.0}) for name in ("a", "b")]
    assert shown_lengths(["a", "c"], replies) == [2.0, 0.0]


@pytest.mark.parametrize("seed", range(10))
def test_the_length_of_a_direction_has_the_same_bits_in_any_order_of_the_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    U = rng.standard_normal((40, 60)) * 10.0 ** rng.uniform(-6, 6, (40, 1))
    K, c = U @ U.T, rng.standard_normal(40)
    length = direction_length(K, c)
    assert length == pytest.approx(float(np.linalg.norm(c @ U)), rel=1e-9)
    orders = [rng.permutation(40) for _ in range(10)]
    assert {direction_length(K[np.ix_(order, order)], c[order]) for order in orders} == {length}


@pytest.mark.parametrize("coefficients", [[1e200, 1e200], [1e200, -1e200], [math.nan, 1.0], [math.inf, -math.inf]])
def test_a_direction_that_float64_cannot_hold_is_infinitely_long(coefficients: list[float]) -> None:
    assert direction_length(np.array([[1.0, 2.0], [2.0, 9.0]]), np.array(coefficients)) == math.inf


def lengths_of(honest: list[float], others: tuple[float, ...]) -> float:
    """The lower median of all lengths."""
    return bound([*honest, *others], 1e300) * 1e300


EXTREMES = (0.0, 1e-300, 0.9, 1.7, 1e250, math.inf)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, pytest.param(9, marks=pytest.mark.full)])
def test_a_search_over_lengths_finds_no_minority_that_moves_the_bound_out_of_the_honest_lengths(count: int) -> None:
    rng = np.random.default_rng(count)
    attackers = (count - 1) // 2
    for _ in range(20):
        honest = (10.0 ** rng.uniform(-2, 2, count - attackers)).tolist()
        low, high = min(honest), max(honest)
        around = [value * factor for value in honest for factor in (0.99, 1.0, 1.01)]
        choices = sorted({*EXTREMES, *rng.choice(around, 2).tolist()})
        found = [lengths_of(honest, others) for others in product(choices, repeat=attackers)]
        assert low * (1 - 1e-12) <= min(found)
        assert max(found) <= high * (1 + 1e-12)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_half_of_the_members_can_make_the_step_as_short_as_they_like_and_no_longer(count: int) -> None:
    honest = [1.0 + place for place in range(count // 2)]
    assert lengths_of(honest, (0.0,) * len(honest)) == 0.0
    assert lengths_of(honest, (math.inf,) * len(honest)) == pytest.approx(max(honest))


def test_auto_begins_at_1_and_decays_as_a_number_does() -> None:
    spec = RunSpec.parse(HEAD + 'server = { learning_rate = "auto", decay = 0.01, decay_every = 2 }\n')
    assert [scheduled_rate(spec, number) for number in range(4)] == pytest.approx([1.0, 1.0, 0.1, 0.1])


def test_lengths_are_of_this_rounds_updates_before_they_are_normalised_and_coefficients_as_signed() -> None:
    rows = [np.array(row, np.float32) for row in ([0.1, 0.0], [0.0, 0.3], [0.2, 0.0])]
    replies = Replies(
        [
            PhaseReply(client_id=name, samples=1, losses={}, metrics={}, rows=(row,))
            for name, row in zip("abc", rows, strict=True)
        ]
    )
    past = Past(client_id="d", round=0, envelope="", payload="digest", row=np.array([9.0, 9.0], np.float32))
    made = Step(replies, Combination(np.zeros(4), np.full(3, 1 / 3), {}, {}), history=(past,))
    coefficients = np.array([1 / 0.3, 1 / 0.9, 1 / 0.6, 0.0])  # the mean of the rows at length 1
    rate = step_rate(RunSpec.parse(HEAD + AUTO), 0, made, made.gram, coefficients)
    length = float(np.linalg.norm(coefficients[:3] @ np.array(rows, np.float64)))
    assert rate == pytest.approx(0.2 / length)
    assert rate < 1
    assert step_rate(RunSpec.parse(HEAD), 0, made, made.gram, coefficients) == 1.0


def test_a_plug_in_that_works_coordinate_by_coordinate_gives_no_rate() -> None:
    answer = Combination(np.zeros(0), np.ones(1), {}, {}, Coordinates(np.eye(1), 0))
    replies = Replies([PhaseReply(client_id="a", samples=1, losses={}, metrics={}, rows=(np.ones(2, np.float32),))])
    made = Step(replies, answer)
    with pytest.raises(ValueError, match=r"coordinate by coordinate.*give a number, such as 1"):
        step_rate(RunSpec.parse(HEAD + AUTO), 0, made, made.gram, answer.coefficients)


BOUNDED = 'server.learning_rate = "auto": '
REFUSED = {
    'server.learning_rate = "fast"': "server.learning_rate: a number above 0 is needed, or \"auto\"; got 'fast'",
    "server.learning_rate = true": 'server.learning_rate: a number above 0 is needed, or "auto"; got True',
    "server.learning_rate = nan": 'server.learning_rate: a number above 0 is needed, or "auto"; got nan',
    "server.learning_rate = inf": 'server.learning_rate: a number above 0 is needed, or "auto"; got inf',
    "server.learning_rate = -0.5": 'server.learning_rate: a number above 0 is needed, or "auto"; got -0.5',
    "server.learning_rate = 0": 'server.learning_rate: a number above 0 is needed, or "auto"; got 0',
    "server.learning_rate = [1.0]": 'server.learning_rate: a number above 0 is needed, or "auto"; got [1.0]',
    'server = { learning_rate = "auto", optimizer = "adam" }': f"{BOUNDED}it bounds a step along the direction, and "
    'server.optimizer = "adam" makes another step from what it remembers; use "sgd", or give a number, such as 0.1',
    f'{AUTO}algorithm.name = "fedfa"': f"{BOUNDED}it bounds a step along the direction, and fedfa adds momentum to "
    "that; give a number, such as 1",
    f'{AUTO}algorithm.name = "afl"': f"{BOUNDED}for afl, the rate is γ_w/η_l of its paper, which goes with "
    "gamma_lambda; give a number, such as 1",
    f'{AUTO}algorithm.name = "fsmgda"': f"{BOUNDED}for fsmgda, the rate is η_t of its paper, a factor of the "
    "objectives' mean gradients or updates; give a number, such as 1",
    f'{AUTO}algorithm.name = "fedmdfg"': f"{BOUNDED}for fedmdfg, the members choose the step's length, by their losses "
    "at multiples of the rate; give a number, such as 1",
    f'{AUTO}algorithm.name = "median"': f"{BOUNDED}for median, the direction is made coordinate by coordinate, so the "
    "Gram matrix does not tell its length; give a number, such as 1",
    f'{AUTO}algorithm.name = "trimmed-mean"': f"{BOUNDED}for trimmed-mean, the direction is made coordinate by "
    "coordinate, so the Gram matrix does not tell its length; give a number, such as 1",
    f"{AUTO}privacy.client_noise = 1.0": f"{BOUNDED}it takes the lengths of the updates as they are, and "
    "privacy.client_noise protects no number that depends on them; give a number, such as 1",
    f'{AUTO}privacy.secure = "private"': f"{BOUNDED}it needs the lengths of the updates, which a private round hides; "
    'give a number, such as 1, or add "norm" to privacy.disclose, which the members\' owners must allow',
    f'{AUTO}algorithm.name = "fedavg"\nprivacy = {{ secure = "sum", clip = 1.0, disclose = ["norm"] }}': f"{BOUNDED}no "
    "step is longer than privacy.clip in any case; leave it out",
}


@few(*[*REFUSED][:3], *[*REFUSED][7:])
@pytest.mark.parametrize("keys", REFUSED)
def test_a_rate_that_cannot_be_is_refused_with_the_cause_and_the_remedy(keys: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_run(HEAD + keys)
    assert str(refused.value) == REFUSED[keys]


@pytest.mark.parametrize(
    "keys",
    [
        "",
        'algorithm = { name = "dual-cone", tau = 2, pre = ["clip"] }',
        'algorithm.name = "fedavg"\ntrain.step_schedule = "cosine"\ntrain.step_warm_up = 2',
        'privacy = { secure = "private", disclose = ["norm"] }',
        "privacy.sample_noise = 1.0",
    ],
)
def test_rules_whose_direction_is_a_combination_of_updates_take_auto(keys: str) -> None:
    assert parse_run(HEAD + AUTO + keys)[0].server.learning_rate == "auto"
