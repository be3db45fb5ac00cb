"""`fedpareto privacy plan`: the noise for an epsilon, and the epsilon of a noise."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from federation.spec.accounting import Mechanism, epsilon, gaussian_epsilon
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.main import app
from tests.paths import DOCS


def plan(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["privacy", "plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def planned(*arguments: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(plan(*arguments, "--json"))
    return document


@pytest.mark.full
def test_the_planned_noise_is_the_least_that_keeps_within_epsilon_by_the_ledgers_accountant() -> None:
    found = planned("--samples", 500, "--batch-size", 50, "--rounds", 3, "--epochs", 2, "--epsilon", 1, "--delta", 1e-6)
    assert (found["rate"], found["steps"]) == (0.1, 60)
    assert found["epsilon"] == epsilon([Mechanism(found["noise"], 0.1, 60)], 1e-6).value <= 1
    assert epsilon([Mechanism(found["noise"] - 0.001, 0.1, 60)], 1e-6).value > 1
    training = ("--samples", 500, "--batch-size", 50, "--rounds", 3, "--steps", 20, "--delta", 1e-6)
    assert planned(*training, "--noise", found["noise"]) == found


def test_the_planned_noise_for_clients_is_the_least_that_keeps_within_epsilon() -> None:
    found = planned("--members", 20, "--rounds", 50, "--epsilon", 8)
    assert found["epsilon"] == gaussian_epsilon(found["noise"], 50, 1e-5) <= 8
    assert gaussian_epsilon(found["noise"] - 0.001, 50, 1e-5) > 8
    assert found["deviation"] == pytest.approx(found["noise"] * 0.1)


@pytest.mark.full
def test_the_documented_plan_is_the_one_that_is_printed() -> None:
    page = (DOCS / "member/differential-privacy.md").read_text()
    command, _, answer = page.split("$ fedpareto privacy plan ")[1].split("```")[0].partition("\n")
    assert plan(*command.split()) == answer
    warned = plan("--samples", 2000, "--rounds", 1, "--noise", 5, "--delta", 1e-3)
    assert "delta = 0.001 allows one of 2000 samples" in warned


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epsilon 1", "give --samples"),
        ("--samples 9 --members 9 --epsilon 1", "give --samples"),
        ("--samples 9", "give --epsilon, to get the noise"),
        ("--samples 9 --epsilon 1 --noise 1", "give --epsilon, to get the noise"),
        ("--samples 9 --epsilon nan", "--epsilon is above 0; got nan"),
        ("--samples 9 --noise 0.2", "--noise is at least 0.3; got 0.2"),
        ("--samples 9 --noise 1 --delta 1", "--delta is between 0 and 1; got 1"),
        ("--samples 9 --noise 1 --epochs 1 --steps 1", "give either epochs or steps"),
        ("--members 9 --noise 1 --steps 1", "belong to --samples"),
    ],
)
def test_a_plan_without_meaning_is_refused(arguments: str, words: str) -> None:
    with pytest.raises(CommandFailure, match=words, check=lambda failure: failure.code == USAGE):
        plan("--rounds", 5, *arguments.split())


def test_an_epsilon_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(CommandFailure, match=r"no noise up to 10000 spends at most epsilon = 1e-06"):
        plan("--members", 3, "--rounds", 1_000_000, "--epsilon", 1e-6)
