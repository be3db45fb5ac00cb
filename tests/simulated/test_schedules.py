"""Schedules of crashes, losses and delays do not change what a run computes, and planted bugs are found by them."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpareto.processes.forked import completed
from tests.few import few_of
from tests.simulated.plans import plans
from tests.simulated.planted import PLANTED
from tests.simulated.runner import Runner

SEEDS = 1000  # within which each planted bug must be found


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    logging.disable(logging.CRITICAL)  # each schedule has a hundred warnings
    yield Runner(tmp_path_factory.mktemp("simulated"))
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.full)], ids=["4", "100"])
def test_no_schedule_of_faults_changes_a_result_without_a_reason(runner: Runner, seeds: range) -> None:
    assert {seed: outcome.problems for seed in seeds if (outcome := runner.run(seed)).problems} == {}


@pytest.mark.parametrize("seed", few_of([1, 6, 9, 12], 12))
def test_the_same_seed_gives_the_same_trace(runner: Runner, seed: int) -> None:
    first, second = runner.run(seed), runner.run(seed)
    assert first.trace == second.trace
    assert first.counts["receipt"]


def test_the_program_goes_on_where_it_stopped_and_writes_its_record(tmp_path: Path) -> None:
    progress, page = tmp_path / "faults.jsonl", tmp_path / "faults.md"
    page.write_text("What is played.\n\n## The record\n\nAn older one.\n")
    command = ["-m", "tests.simulated", "--progress", str(progress), "--record", str(page)]
    for seeds in ("1", "2"):
        done = completed([*command, "--seeds", seeds])
        assert done.returncode == 0, done.stderr
    assert [json.loads(line)["seed"] for line in progress.read_text().splitlines()] == [0, 1]
    written = page.read_text()
    assert written.startswith("What is played.\n\n## The record\n\n- Command: `make faults SEEDS=2`")
    assert "Failed: 0." in written
    assert "An older one." not in written


def test_a_round_that_is_skipped_after_a_restart_leaves_no_assignment_open(runner: Runner) -> None:
    """A member whose gradients the next phase had used was revoked; that phase was open, and stayed open."""
    assert runner.run(257).problems == []


@pytest.mark.parametrize("seed", few_of([2087, 3486, 5402, 8367], 2087))
def test_a_schedule_ends_when_members_that_a_run_waits_for_were_revoked(runner: Runner, seed: int) -> None:
    """A worker ends once its certificate is revoked, and the operator stops a run that has too few members left."""
    assert runner.run(seed).problems == []


@pytest.mark.parametrize("seed", few_of([3925, 6551], 3925))
def test_a_revocation_after_an_evaluation_in_the_open_does_not_end_a_private_run(runner: Runner, seed: int) -> None:
    """The evaluation of a round whose training was private; the revoked member's measurements are left out."""
    assert runner.run(seed).problems == []


def test_a_private_evaluation_goes_on_when_the_coordinator_restarts_with_another_pool(runner: Runner) -> None:
    """Its terms were made of the pool of that moment: five healthy members declined the session, each as over."""
    outcome = runner.run(10, plans()["measured"])
    assert outcome.counts["member away after a kill"]
    assert outcome.problems == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(runner: Runner, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    plant, names = PLANTED[bug]
    for name in names:
        runner.stage(plans()[name])  # the result without faults is that without the bug
    plant(monkeypatch)
    for seed in range(SEEDS):
        if runner.run(seed, plans()[names[seed % len(names)]]).problems:
            return
    raise AssertionError(f"not found in {SEEDS} schedules")
