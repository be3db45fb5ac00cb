"""Private statistics with real workers: owners approve, kills change nothing, the record verifies."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.record.bundle import BundleReader
from federation.tasks.digits import bundled
from federation.work.site import DescribedEntry
from fedpareto.starter import starter_files
from tests.harness import federation, wait_for
from tests.paths import OWNERS_CODE
from tests.verification.scene import Edited, refusal
from tests.worker.work.scene import STAGES, Members
from verification.run import verify
from worker.ledgers.round_ledger import RoundLedger

pytestmark = pytest.mark.full
CLIENTS = tuple(f"client-{number}" for number in range(5))
SPEC = """\
task = "digits"
kind = "statistics"
selection = { minimum = 5, pool = "enrolled" }
privacy.secure = "sum"
[statistics]
bins = 8
deadline_seconds = 120.0
splits = ["train", "validation", "test"]
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Five members whose owners approve each run."""
    with federation(tmp_path_factory.mktemp("described")) as fed:
        fed.serve()
        made = Members(fed, CLIENTS, task="digits")
        made.enrol('approve = "each-run"\n')
        for client in CLIENTS:
            made.work(client)
        fed.attending(*CLIENTS)
        yield made


def entries(scene: Members, client: str) -> list[DescribedEntry]:
    ledger = RoundLedger(scene.fed.directory / client / "private-rounds.db")
    try:
        return [*ledger.described(["digits"])]
    finally:
        ledger.close()


def check_described(scene: Members, run: str, path: Path) -> dict[str, Any]:
    """All members are in one sum of six phases, of which the record verifies. Returns the document."""
    fed = scene.fed
    phases = fed.admin("round", run, "0")["phases"]
    assert [(phase["kind"], phase["replied"]) for phase in phases] == [(name, 5) for name in STAGES]
    for client in CLIENTS:
        (entry,) = [entry for entry in entries(scene, client) if entry.run_id == run]
        assert entry.masked == entry.confirmed == CLIENTS
    fed.admin("bundle", run, "--payloads", "--yes", "--out", str(path), "--force")
    with BundleReader(path) as reader:
        (found,) = verify(reader)
    assert (*found.missing, *found.absent) == ()
    assert re.fullmatch(r"5 members described their data; verified: \d+ signatures, 65 columns", found.words)
    assert fed.admin("audit", "verify")["problems"] == []
    fed.fedpareto("worker", "verify", str(path), "--home", str(fed.directory / CLIENTS[0]))
    told: dict[str, Any] = fed.admin("statistics", run)
    return told


def test_members_are_in_one_sum_whose_totals_are_those_of_the_pooled_data(scene: Members, tmp_path: Path) -> None:
    fed = scene.fed
    run = fed.submit("held", SPEC)
    assert "waiting for members: 0 of 5" in fed.admin("run", run)["run"]["reason"]
    wait_for(lambda: run in fed.fedpareto("worker", "runs", "--home", str(fed.directory / CLIENTS[0])), "the request")
    own = fed.fedpareto("worker", "runs", run, "--home", str(fed.directory / CLIENTS[0]))
    assert "only their sum over the members leaves" in " ".join(own.split())
    scene.approve(run)
    fed.wait_completed(run)
    path = tmp_path / "run.fedpareto"
    told = check_described(scene, run, path)
    x, y = bundled()
    classes = next(column for column in told["columns"] if column["name"] == "y")
    assert told["samples"] == len(y) == 1797
    pooled = np.bincount(y, minlength=10).tolist()
    assert all(shown in (count, "not shown") for shown, count in zip(classes["counts"], pooled, strict=True))
    assert classes["counts"].count("not shown") <= 2
    middle = next(column for column in told["columns"] if column["name"] == "x28")
    assert (middle["values"], middle["missing"]) == (1797, "fewer than 10")
    assert sum(count for count in middle["counts"] if isinstance(count, int)) <= len(x)
    edited = Edited.of(path)

    for change, words in (
        (lambda record: setattr(record, "document", record.document.replace(b"1797", b"1798")), "not the one that was"),
        (lambda record: record.phases[3].exchanges.pop(), "members|phase|does not follow|nothing follows"),
        (lambda record: record.ClearField("result"), "a document, and no signed result"),
    ):
        assert re.search(words, said := refusal(edited.with_round(0, change), tmp_path)), said


def test_a_data_set_that_was_in_a_sum_answers_no_other_question(scene: Members) -> None:
    fed = scene.fed
    first = fed.submit("first", SPEC)
    scene.approve(first)
    fed.wait_completed(first)
    other = fed.submit("other", SPEC.replace("bins = 8", "bins = 9"))
    scene.approve(other)
    assert fed.wait_ended(other) == "FAILED"
    (row,) = fed.admin("rounds", other)["rounds"]
    assert "0 are ready" in row["reason"]
    assert {entry.run_id for client in CLIENTS for entry in entries(scene, client)} & {other} == set()


def test_a_worker_that_dies_at_each_reply_is_in_one_sum(scene: Members, tmp_path: Path) -> None:
    fed, victim = scene.fed, CLIENTS[0]
    for number in range(1, len(STAGES) + 1):
        fed.workers[victim].stop()
        dying = scene.work(victim, crash=f"reply-{number}")
        run = fed.submit(f"worker-dies-{number}", SPEC)
        scene.approve(run)
        dying.wait_killed()
        scene.work(victim)
        fed.wait_completed(run)
        check_described(scene, run, tmp_path / f"{number}.fedpareto")


def test_a_coordinator_that_dies_before_each_phase_asks_nobody_twice(scene: Members, tmp_path: Path) -> None:
    fed = scene.fed
    run = fed.submit("dies", SPEC)
    fed.serving.stop()
    for phase in range(2, len(STAGES) + 1):
        dying = fed.serve(crash=f"phase-{phase}")
        if phase == 2:
            scene.approve(run)
        dying.wait_killed()
    fed.serve()
    fed.wait_completed(run)
    check_described(scene, run, tmp_path / "run.fedpareto")


@pytest.mark.parametrize("task", ["visits:Visits", "normed_task:Normed"])
def test_a_model_with_tensors_that_need_a_treatment_does_not_matter_to_a_private_sum(task: str, tmp_path: Path) -> None:
    """The layer Standardise of the tabular task, and BatchNorm: such a run has no [parameters] to name them."""
    starter_files.write("tabular", tmp_path / "mine", "")
    code = ("--code", str(tmp_path / "mine"), "--code", str(OWNERS_CODE))
    data = ("--data", str(tmp_path / "mine/data/site-a"), "--set", "part=1/1") if task == "visits:Visits" else ()
    (tmp_path / "members").mkdir()
    with federation(tmp_path / "members") as fed:
        fed.serve()
        made = Members(fed, CLIENTS, task=task)
        made.enrol('approve = "each-run"\n')
        for client in CLIENTS:
            made.work(client, *code, *data)
        fed.attending(*CLIENTS)
        run = fed.submit("held", SPEC.replace('"digits"', f'"{task}"').replace("bins = 8", "bins = 2"), *code)
        made.approve(run)
        fed.wait_completed(run)
        assert [(phase["kind"], phase["replied"]) for phase in made.round(run)["phases"]] == [
            (name, 5) for name in STAGES
        ]
