"""Ledgers in the site's database: the model finds no double spend, except after a restore that nobody names."""

from dataclasses import replace
from typing import Any

import pytest

from tests.simulated.standby import BUDGET, Model, Rules, problems

WEAKER: dict[str, dict[str, Any]] = {
    "the answers are on the machine that made them": {"journal": False},
    "an answer leaves before its transaction": {"spends_before": False},
    "a commit without an answer is taken for done": {"unknown_is_not_done": False},
    "a restored database is used as it is": {"identity": False},
    "an image of the database's disk is put back, and nobody says so": {"restores": "silent"},
}


@pytest.mark.parametrize(
    "seeds", [range(1000), pytest.param(range(1000, 200_000), marks=pytest.mark.full)], ids=["1000", "200000"]
)
def test_no_schedule_spends_twice_or_loses_a_spend(seeds: range) -> None:
    assert problems(seeds, Rules()) == {}


def test_schedules_reach_the_budget_and_both_workers() -> None:
    assert max(len(model.left) for model in played(range(50))) == BUDGET


@pytest.mark.parametrize("rule", WEAKER)
def test_the_model_finds_what_a_weaker_design_spends_twice_or_loses(rule: str) -> None:
    assert problems(range(400), replace(Rules(), **WEAKER[rule]))


def test_the_transaction_is_the_fence_and_the_number_of_the_lease_only_saves_work() -> None:
    assert problems(range(400), replace(Rules(), lease_in_transaction=False)) == {}


def played(seeds: range) -> list[Model]:
    models = [Model(seed, Rules()) for seed in seeds]
    for model in models:
        model.play()
    return models
