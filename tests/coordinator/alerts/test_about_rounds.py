"""The alerts that follow from the rounds of a run: when each begins and ends, and that they are a function of these."""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from coordinator.alerts.about_rounds import RoundFacts, WeightBounds
from coordinator.alerts.facts import AlertFact
from coordinator.rounds.runs.participation import EndedRound, MemberRound, RoundOutcome, StepLength
from federation.aggregation.registry import algorithm
from fedpareto import simulate
from storage.states import AlertKind

REPLIED, DECLINED, REFUSED, MISSING, NOT_NEEDED = RoundOutcome
START = datetime(2026, 11, 24, 12, tzinfo=UTC)
NONE = WeightBounds()


def at(number: int) -> datetime:
    """When a round ended."""
    return START + timedelta(minutes=number + 1)


def ended(number: int, *members: MemberRound, **more: Any) -> EndedRound:
    """A round of a minute."""
    return EndedRound(number, members, started=at(number - 1), ended=at(number), **more)


def asked(number: int, *outcomes: RoundOutcome) -> EndedRound:
    """A round that asked the members a, b, c, ... to train."""
    told, why = zip("abcdef", outcomes, strict=False), f"why-{number}"
    return ended(number, *(MemberRound(name, training=one, reason=why if one.failed else "") for name, one in told))


def facts_of(rounds: Sequence[EndedRound], bounds: WeightBounds = NONE) -> tuple[list[AlertFact], list[AlertFact]]:
    """The facts that last after some rounds, and the last form of all that there were."""
    made = RoundFacts("run", bounds)
    for round_ in rounds:
        made.add(round_)
    return made.open, made.take_changed()


def begun(rounds: Sequence[EndedRound], bounds: WeightBounds = NONE) -> list[tuple[AlertKind, str, datetime]]:
    """The alerts that there were, with their beginnings."""
    return [(fact.kind, fact.client_id, fact.began) for fact in facts_of(rounds, bounds)[1]]


def test_a_member_that_fails_in_three_rounds_in_a_row_is_one_alert_until_it_replies() -> None:
    rounds = [asked(n, REPLIED, (DECLINED, REFUSED, MISSING)[n % 3]) for n in range(5)]
    (fact,), _ = facts_of(rounds)
    assert (fact.kind, fact.client_id, fact.began, fact.ended) == (AlertKind.MEMBER_FAILS, "b", at(2), None)
    assert (fact.first_round, fact.last_round) == (0, 4)
    assert "b failed in 5 rounds in a row, last in round 4: why-4" in fact.message
    lasting, (over,) = facts_of([*rounds, asked(5, REPLIED, REPLIED)])
    assert (lasting, over.began, over.ended) == ([], at(2), at(5))


@pytest.mark.parametrize(("cosine", "opposes"), [(-0.97, True), (-0.51, True), (-0.5, False), (0.9, False)])
def test_a_member_whose_cosine_stays_below_minus_a_half_opposes(cosine: float, opposes: bool) -> None:
    rounds = [ended(n, MemberRound("a", training=REPLIED, cosine=cosine)) for n in range(4)]
    assert begun(rounds) == ([(AlertKind.MEMBER_OPPOSES, "a", at(2))] if opposes else [])
    assert [f"{cosine:.2f}" in fact.message for fact in facts_of(rounds)[0]] == [True] * opposes


def test_one_step_with_a_member_ends_the_count_of_those_against_it() -> None:
    cosines = [-0.9, -0.9, 0.1, -0.9, -0.9]
    assert begun([ended(n, MemberRound("a", training=REPLIED, cosine=value)) for n, value in enumerate(cosines)]) == []


def test_nobody_improving_in_three_evaluated_rounds_is_an_alert_however_far_apart_they_are() -> None:
    shares = [0.0, math.nan, 0.0, math.nan, 0.0, 0.0]
    rounds = [ended(n, improved=share) for n, share in enumerate(shares)]
    (fact,), _ = facts_of(rounds)
    assert (fact.kind, fact.began, fact.first_round, fact.last_round) == (AlertKind.NOBODY_IMPROVES, at(4), 0, 5)
    assert begun([ended(n, improved=share) for n, share in enumerate([0.0, 0.0, 0.25, 0.0])]) == []


def zigzag(losses: list[float], length: float) -> list[AlertFact]:
    """The facts after rounds with these losses, whose steps are this long and whose updates 0.5, at the rate 2."""
    step = StepLength(length, 0.5, 2.0)
    return facts_of([ended(n, loss=loss, step=step) for n, loss in enumerate(losses)])[0]


def test_a_loss_that_rises_again_and_again_with_steps_longer_than_the_updates_names_the_rate_that_would_do() -> None:
    (fact,) = zigzag([1.0, 2.0, 0.5, 0.7], 1.2)
    assert (fact.kind, fact.began) == (AlertKind.STEP_TOO_LONG, at(3))
    assert "rose in 2 of the last 3 evaluated rounds, last in round 3" in fact.message
    assert "2.4 times as long as the median of the updates (0.5)" in fact.message
    assert "set server.learning_rate to about 0.83 (it is 2)" in fact.remedy
    assert zigzag([1.0, 2.0, 0.5, 0.4], 1.2) == []  # it rose once
    assert zigzag([1.0, 2.0, 0.5, 0.7], 0.7) == []  # the steps are not much longer than the updates
    assert zigzag([1.0, 2.0, 0.5, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 1.2) == []  # it has settled


@pytest.mark.full
def test_a_run_that_zigzags_is_warned_of_and_both_rates_that_the_warning_names_end_it() -> None:
    spec = """
        name = "zigzag"
        task = "digits"
        rounds = 6
        [algorithm]
        name = "fedmgda+"
        [train]
        learning_rate = 0.1
        [server]
        learning_rate = {rate}
        [simulation]
        clients = 2
    """
    (warning,) = [words for words in simulate(spec.format(rate=2.5)).warnings if "server.learning_rate" in words]
    named = re.search(r"about ([0-9.]+) \(it is 2\.5\)", warning)
    assert named is not None, warning
    assert ' or to "auto", or let it decay' in warning
    for rate in (named[1], '"auto"'):
        assert [words for words in simulate(spec.format(rate=rate)).warnings if "server.learning_rate" in words] == []


def measured(number: int, norms: Sequence[float], losses: Sequence[float] = ()) -> EndedRound:
    """A round in which the members a, b, c, ... sent updates of these norms and stated these losses."""
    told = zip("abcdef", norms, losses or [1.0] * len(norms), strict=False)
    return ended(number, *(MemberRound(name, training=REPLIED, norm=norm, loss=loss) for name, norm, loss in told))


def test_a_member_whose_update_is_ten_times_as_long_as_the_median_is_named_with_the_largest_ratio() -> None:
    rounds = [measured(0, [1.0, 1.0, 9.9]), measured(1, [1.0, 2.0, 242.0]), measured(2, [1.0, 1.0, 30.0])]
    (fact,), _ = facts_of(rounds)
    assert (fact.kind, fact.client_id, fact.began) == (AlertKind.NORM_OUTLIER, "c", at(1))
    assert (fact.first_round, fact.last_round) == (1, 2)
    assert "up to 121 times as long as the median of the members', in 2 rounds, last in round 2" in fact.message
    assert fact.remedy.startswith("it has few samples or wrong data, trains at another rate, has minibatches that")


def test_an_outlier_ends_after_ten_replies_of_the_member_without_another_one() -> None:
    rounds = [measured(0, [1.0, 1.0, 30.0]), *(measured(n, [1.0, 1.0, 1.0]) for n in range(1, 10))]
    assert [fact.ended for fact in facts_of(rounds)[1]] == [None]
    assert [fact.ended for fact in facts_of([*rounds, measured(10, [1.0, 1.0, 1.0])])[1]] == [at(10)]
    again = [*rounds, measured(10, [1.0, 1.0, 1.0]), measured(11, [1.0, 1.0, 50.0])]
    assert [(fact.began, fact.ended) for fact in facts_of(again)[1]] == [(at(0), at(10)), (at(11), None)]
    assert "50 times" in facts_of(again)[0][0].message


@pytest.mark.parametrize("loss", [1002.0, math.inf])
def test_a_member_that_reports_ten_times_the_median_loss_is_named(loss: float) -> None:
    (fact,), _ = facts_of([measured(0, [1.0] * 3, [2.0, 2.5, loss])])
    assert (fact.kind, fact.client_id) == (AlertKind.LOSS_OUTLIER, "c")
    assert facts_of([measured(0, [1.0] * 3, [2.0, 2.5, math.nan])])[0] == []


def test_two_members_have_no_median_from_which_one_is_far() -> None:
    assert facts_of([measured(0, [1.0, 100.0])])[0] == []


@pytest.mark.parametrize(("epsilon", "largest"), [(0.1, 0.35), (1, None), ("auto", 0.5)])
def test_a_weight_at_its_cap_in_ten_steps_in_a_row_is_a_notice(epsilon: object, largest: float | None) -> None:
    bounds = WeightBounds(algorithm("fedmgda+", {"epsilon": epsilon}))
    weights = [largest or 0.9, *[(1 - (largest or 0.9)) / 3] * 3]

    def round_(number: int, first: float) -> EndedRound:
        told = zip("abcd", [first, *weights[1:]], strict=True)
        return ended(number, *(MemberRound(name, training=REPLIED, weight=weight) for name, weight in told))

    rounds = [round_(n, weights[0]) for n in range(11)]
    assert begun(rounds, bounds) == ([] if largest is None else [(AlertKind.WEIGHT_AT_CAP, "a", at(9))])
    assert begun(rounds[:9], bounds) == []
    assert facts_of([*rounds, round_(11, 0.2)], bounds)[0] == []


def test_the_end_of_a_run_ends_its_facts_and_the_same_rounds_give_the_same_facts() -> None:
    rounds = [measured(0, [1.0, 1.0, 30.0]), *(asked(n, REPLIED, DECLINED) for n in range(1, 6))]
    made, later = RoundFacts("run", NONE), RoundFacts("run", NONE)
    pieces = []
    for round_ in rounds:
        made.add(round_)
        later.add(round_)
        pieces += made.take_changed()
    made.end(at(9))
    later.end(at(9))
    pieces += made.take_changed()
    whole = later.take_changed()
    assert {fact.ended for fact in whole} == {at(9)}
    assert {(fact.key, fact.began): fact for fact in pieces} == {(fact.key, fact.began): fact for fact in whole}
