"""What an owner sees of the computations that failed in private rounds, and how a data set takes part again."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from federation.findings import CheckOutcome
from federation.work.site import FAILURES, FailedSession
from tests.scripted import scripted
from tests.worker.scene import command
from worker.doctor import check_failures
from worker.home import WorkerHome
from worker.ledgers.round_ledger import RoundLedger

TASKS = ("mortality", "length", "mortality", "other")


@pytest.fixture
def home(tmp_path: Path) -> WorkerHome:
    with scripted() as coordinator:
        coordinator.member().save(tmp_path / "home")
    home = WorkerHome(tmp_path / "home")
    home.policy.write_text('[secure.data_sets]\npatients = ["length", "mortality"]\n')
    return home


def fail(home: WorkerHome, *tasks: str) -> None:
    with closing(RoundLedger(home.rounds)) as ledger:
        for number, task in enumerate(tasks):
            ledger.fail(FailedSession(f"{number}", "run", number, task, "train", f"error {number}"))


def shown(home: WorkerHome, *arguments: str) -> Any:
    return json.loads(command("failures", "--home", str(home.directory), "--json", *arguments))


def test_failures_are_shown_by_data_set_and_a_reset_is_for_a_data_set(home: WorkerHome) -> None:
    at = ("--home", str(home.directory))
    assert command("failures", *at) == "no computation of a private round has failed since the last that did not\n"
    fail(home, *TASKS)
    patients, other = shown(home)
    assert (patients["tasks"], patients["failing"], patients["reset"]) == (["length", "mortality"], True, False)
    assert [failed["error"] for failed in patients["failures"]] == ["error 0", "error 1", "error 2"]
    assert (other["tasks"], other["failing"], other["reset"]) == (["other"], False, False)
    lines = command("failures", *at).splitlines()
    assert lines[:2] == [
        "length, mortality: 3 computations of private rounds failed in a row",
        "  run run round 0, mortality: error 0",
    ]
    assert "give --reset length" in lines[4]
    patients, other = shown(home, "--reset", "mortality")
    assert (patients["failing"], patients["reset"], other["reset"]) == (False, True, False)
    (left,) = shown(home)
    assert left["tasks"] == ["other"]


def test_the_doctor_names_a_data_set_that_takes_part_no_more(home: WorkerHome) -> None:
    assert not list(check_failures(home)), "there is no ledger, and none is made"
    assert not home.rounds.exists()
    fail(home)
    assert [finding.outcome for finding in check_failures(home)] == [CheckOutcome.OK]
    fail(home, *TASKS)
    failing, other = check_failures(home)
    assert (failing.outcome, other.outcome) == (CheckOutcome.FAILED, CheckOutcome.WARNING)
    assert "length, mortality: 3 computations of private rounds failed in a row, so it takes part" in failing.message
    assert FAILURES == 3
    home.policy.write_text("damaged")
    (broken,) = check_failures(home)
    assert broken.outcome is CheckOutcome.FAILED
