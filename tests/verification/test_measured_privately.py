"""Private runs that measure models, with real workers: owners approve, kills change nothing, the record verifies."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from federation.digests import file_digest
from federation.record.bundle import BundleReader
from federation.tasks import initial_model, task
from federation.vectors import to_bytes
from tests.harness import federation, here
from tests.verification import independent_metrics
from tests.verification.independent_verifier import Wrong
from tests.verification.independent_verifier import verify as verify_independently
from tests.verification.scene import Edited, refusal
from tests.worker.work.scene import STAGES, Members
from verification.run import verify
from worker.ledgers.round_ledger import RoundLedger

pytestmark = pytest.mark.full
CLIENTS = tuple(f"client-{number}" for number in range(5))
SPEC = """\
task = "digits"
kind = "evaluate"
selection = { minimum = 5, pool = "enrolled" }
evaluate = { splits = ["train"], deadline_seconds = 120.0 }
privacy.secure = "sum"
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Five members whose owners approve each run."""
    with federation(tmp_path_factory.mktemp("measured")) as fed:
        fed.serve()
        made = Members(fed, CLIENTS, task="digits")
        made.enrol('approve = "each-run"\n')
        for client in CLIENTS:
            made.work(client)
        fed.attending(*CLIENTS)
        yield made


def models(directory: Path, *seeds: int) -> list[str]:
    """Files of models, as options of `submit`."""
    options = []
    for seed in seeds:
        path = directory / f"model-{seed}.safetensors"
        path.write_bytes(to_bytes(*initial_model(task("digits"), seed)))
        options += ["--model", str(path)]
    return options


def entries(scene: Members, client: str) -> Sequence[tuple[str, str]]:
    ledger = RoundLedger(scene.fed.directory / client / "private-rounds.db")
    try:
        return [(entry.base_model, entry.work) for entry in ledger.entries(["digits"])]
    finally:
        ledger.close()


def check_measured(scene: Members, run: str, files: Sequence[str], path: Path) -> Edited:
    """Each model was measured once by all members, in one session of six phases; the record verifies."""
    fed = scene.fed
    for number, file in enumerate(files):
        phases = fed.admin("round", run, str(number))["phases"]
        assert [(phase["kind"], phase["replied"]) for phase in phases] == [(name, 5) for name in STAGES]
        for client in CLIENTS:
            assert entries(scene, client).count((file_digest(Path(file)), "evaluate")) == 1
    fed.admin("bundle", run, "--payloads", "--yes", "--out", str(path), "--force")
    with BundleReader(path) as reader:
        found = list(verify(reader))
    assert [(*one.missing, *one.absent) for one in found] == [()] * len(files)
    assert {re.sub(" blake3.*", "", one.words) for one in found} == {"5 members measured"}
    independent_metrics.check(path)
    assert verify_independently(path).models == [file_digest(Path(files[0]))] * (len(files) + 1)
    for client in CLIENTS[:2]:
        fed.fedpareto("worker", "verify", str(path), "--home", str(fed.directory / client))
    assert fed.admin("audit", "verify")["problems"] == []
    return Edited.of(path)


def test_members_measure_the_models_that_their_owners_approve_once_and_the_record_verifies(
    scene: Members, tmp_path: Path
) -> None:
    fed, options = scene.fed, models(tmp_path, 1, 2)
    run = fed.submit("measures", SPEC, *options)
    assert "waiting for members: 0 of 5" in fed.admin("run", run)["run"]["reason"]
    scene.approve(run)
    fed.wait_completed(run)
    edited = check_measured(scene, run, options[1::2], tmp_path / "run.fedpareto")
    for change, words in (
        (lambda record: record.metrics.update({"loss/train": 0.5}), "loss/train"),
        (lambda record: record.phases[3].exchanges.pop(), "members"),
        (lambda record: record.ClearField("phases"), "0 phases"),
    ):
        other = edited.with_round(1, change)
        assert re.search(words, said := refusal(other, tmp_path)), said
        if words != "loss/train":  # the sums are computed by `independent_metrics`
            with pytest.raises(Wrong):
                verify_independently(other.write(tmp_path / "other"))
    columns = fed.admin("compare", run)["runs"]
    assert [column["model"] for column in columns] == [file_digest(Path(file)) for file in options[1::2]]
    assert all({"accuracy/mean", "evaluation/noise"} <= column["metrics"].keys() for column in columns)
    fed.admin("export", run, "--round", "1", "--out", str(tmp_path / "m"), "--card", str(tmp_path / "card.md"))
    assert "means over the members, with noise, and no member's own measurements" in (tmp_path / "card.md").read_text()
    again = fed.directory / "again.toml"
    again.write_text('name = "again"\n' + SPEC)
    admin = ("--home", str(fed.home / "admin"))
    told = here("admin", "submit", str(again), *options[:2], *admin, cwd=fed.directory).stderr
    assert "model-evaluated" in told
    assert "round 0 of the run measures; its numbers stand: accuracy/mean 0." in told


def test_a_coordinator_that_dies_before_each_phase_asks_nobody_twice(scene: Members, tmp_path: Path) -> None:
    fed, options = scene.fed, models(tmp_path, 3)
    run = fed.submit("dies", SPEC, *options)
    fed.serving.stop()
    for phase in range(2, len(STAGES) + 1):
        dying = fed.serve(crash=f"phase-{phase}")
        if phase == 2:
            scene.approve(run)
        dying.wait_killed()
    fed.serve()
    fed.wait_completed(run)
    check_measured(scene, run, options[1::2], tmp_path / "run.fedpareto")


def test_a_worker_that_dies_at_each_reply_has_measured_the_model_once(scene: Members, tmp_path: Path) -> None:
    fed, victim = scene.fed, CLIENTS[0]
    for number in range(1, len(STAGES) + 1):
        options = models(tmp_path, 10 + number)
        fed.workers[victim].stop()
        dying = scene.work(victim, crash=f"reply-{number}")
        run = fed.submit(f"worker-dies-{number}", SPEC, *options)
        scene.approve(run)
        dying.wait_killed()
        scene.work(victim)
        fed.wait_completed(run)
        check_measured(scene, run, options[1::2], tmp_path / f"{number}.fedpareto")


def test_of_two_runs_that_measure_one_model_at_a_time_one_does(scene: Members, tmp_path: Path) -> None:
    fed, options = scene.fed, models(tmp_path, 30)
    runs = [fed.submit(f"twin-{name}", SPEC, *options) for name in "ab"]
    for run in runs:
        scene.approve(run)
    assert sorted(fed.wait_ended(run) for run in runs) == ["COMPLETED", "FAILED"]
    for client in CLIENTS:
        assert entries(scene, client).count((file_digest(Path(options[1])), "evaluate")) == 1
    assert "model-evaluated" in "".join(fed.run_state(run)["reason"] for run in runs)


def test_a_run_that_is_approved_after_another_has_measured_its_model_shows_the_numbers_and_asks_nobody(
    scene: Members, tmp_path: Path
) -> None:
    fed, options = scene.fed, models(tmp_path, 31)
    first, second = (fed.submit(f"turn-{name}", SPEC, *options) for name in "ab")
    scene.approve(first)
    fed.wait_completed(first)
    scene.approve(second)
    assert fed.wait_ended(second) == "FAILED"
    (row,) = fed.admin("rounds", second)["rounds"]
    numbers = (
        "model-evaluated: members have measured it in round 0 of the run turn-a; its numbers stand: accuracy/mean 0."
    )
    assert row["reason"].startswith(numbers)
    assert fed.admin("round", second, "0")["phases"] == []
