"""A coordinator whose backup was restored: what it asks for again is sent again, once its word on that is signed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from federation.refusals import Refusal
from federation.tasks import DataSource, Part, initial_model, task
from federation.training.trainer import Trainer
from federation.trust.envelope import seal
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import KeptRun, RestoreManifest, SignedEnvelope
from federation.vectors import Layout, to_bytes
from fedpareto.cli.main import app
from storage.states import RoundState, RunState
from tests.harness import wait_for
from tests.scripted import FEDERATION, ScriptedCoordinator, files_in, scripted
from tests.stage import Stage, spec, stage
from tests.worker.working import Running
from worker.home import WorkerHome
from worker.service import prepare_offers
from worker.site.policy import Policy


@pytest.fixture(scope="module")
def offers() -> dict[str, Trainer]:
    return prepare_offers(["digits"], DataSource(part=Part(0, 8)), device="cpu", threads=1)[0]


@pytest.fixture(scope="module")
def model() -> tuple[Layout, bytes]:
    layout, vector = initial_model(task("digits"), 3)
    return layout, to_bytes(layout, vector)


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path / "coordinator", "sqlite:///coordinator.db") as made:
        yield made


def back_up(made: Stage, copy: Path) -> None:
    made.stop()
    shutil.copytree(made.served.home.directory, copy)
    made.start()


def put_back(made: Stage, copy: Path) -> None:
    directory = made.served.home.directory
    for path in directory.glob("coordinator.db*"):
        path.unlink()
    for path in copy.glob("coordinator.db*"):
        shutil.copy(path, directory)
    shutil.copytree(copy / "blobs", directory / "blobs", dirs_exist_ok=True)


MORE = """
selection.pool = "enrolled"
selection.minimum = 2
train.batch_size = 10
train.steps = 1
"""


def test_after_a_restored_backup_what_is_asked_for_again_is_sent_again_and_the_run_completes(
    own_stage: Stage, offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> None:
    made = own_stage
    (other,) = made.cast("digits", "other")
    player = made.player("worker")
    player.attend(digits=10)
    run = made.submit(spec("again", "digits", 3, algorithm="fedavg", more=MORE), model=model[1])
    made.wait_round(run, 0, RoundState.OPEN)
    player.leave()
    back_up(made, tmp_path / "backup")
    running = Running(WorkerHome(tmp_path / "worker"), player.member.files, offers, uniform=lambda *_: 0.01)
    try:
        other.attend(digits=10)
        made.play(run, other, until=lambda: len(made.rounds(run)) > 2)
        command = ["coordinator", "restored", "--home", str(made.served.home.directory), "--json"]
        assert CliRunner().invoke(app, command).exit_code == 1, "a coordinator that serves is not being restored"
        made.stop()
        put_back(made, tmp_path / "backup")
        unstated = CliRunner().invoke(app, ["coordinator", "serve", "--home", str(made.served.home.directory)])
        assert "entries were removed. If a backup was restored, run `fedpareto coordinator r" in str(unstated.exception)
        assert json.loads(CliRunner().invoke(app, command).output)["runs"] == {run: 0}
        made.start()
        other._seen.clear()
        other.attend(digits=10)
        made.play(run, other)
        assert set(made.replies(run, 0)) == {"other", "worker"}
        assert made.wait_state(run, RunState.COMPLETED).reason == ""
        assert running.events("restored")[0]["runs"] == {run: 0}
        assert running.events("log-restored")
        # Work of a round that the restore took back may still have waited for its model.
        assert {event["reason"] for event in running.events("declined")} <= {"base-model"}
    finally:
        running.stop()


# --- a scripted coordinator


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    with scripted() as made:
        yield made


@pytest.fixture
def home(coordinator: ScriptedCoordinator, tmp_path: Path) -> WorkerHome:
    """With the membership of a worker."""
    made = WorkerHome(tmp_path / "home")
    made.directory.mkdir()
    coordinator.member().save(made.directory)
    return made


def started(home: WorkerHome, offers: dict[str, Trainer], restore: Literal["accept", "ask"] = "accept") -> Running:
    member = MemberFiles.load(home.directory)
    return Running(home, member, offers, policy=Policy(restore=restore), uniform=lambda *_: 0.01)


def restored(coordinator: ScriptedCoordinator, next_round: int) -> SignedEnvelope:
    manifest = RestoreManifest(federation_id=FEDERATION, runs=[KeptRun(run_id="run-1", next_round=next_round)])
    manifest.restored.FromDatetime(coordinator.now())
    return seal(manifest, coordinator.signing_key)


def test_an_assignment_that_comes_again_after_its_receipt_gets_the_same_signed_reply(
    coordinator: ScriptedCoordinator, home: WorkerHome, offers: dict[str, Trainer], model: tuple[Layout, bytes]
) -> None:
    running = started(home, offers)
    try:
        envelope = coordinator.assign(coordinator.assignment(*model, 1))
        running.wait_for("receipt")
        wait_for(lambda: not running.spooled(), "the spool to empty")
        coordinator.give(envelope)
        running.wait_for("receipt", 2)
        assert coordinator.submissions[0] == coordinator.submissions[1]
        assert len(running.events("training")) == 1
        for number in (2, 3):
            coordinator.assign(coordinator.assignment(*model, number))
            running.wait_for("receipt", 1 + number)
        wait_for(lambda: not running.spooled(), "the spool to empty")
        wait_for(lambda: len(files_in(home.handed_in)) == 2, "the payloads of the last two replies alone to stay")
    finally:
        running.stop()
    coordinator.submissions.clear()
    again = started(home, offers)
    try:
        coordinator.assign(coordinator.assignment(*model, 3))
        again.wait_for("receipt")
        assert len(again.events("training")) == 1, "after a restart it is done again"
        assert len(coordinator.submissions) == 1
    finally:
        again.stop()


def test_a_worker_whose_owner_wants_to_be_asked_holds_the_runs_that_go_back_until_the_owner_accepts(
    coordinator: ScriptedCoordinator, home: WorkerHome, offers: dict[str, Trainer], model: tuple[Layout, bytes]
) -> None:
    running = started(home, offers, "ask")
    try:
        coordinator.assign(coordinator.assignment(*model, 7))
        running.wait_for("receipt")
        coordinator.assign(coordinator.assignment(*model, 6))
        assert running.wait_for("declined")[0]["reason"] == "round"
        coordinator.open.clear()
        coordinator.restored = restored(coordinator, 3)
        coordinator.end_stream(Refusal("stopping", "restored"))
        running.wait_for("restore-pending")
        coordinator.assign(coordinator.assignment(*model, 3))
        coordinator.assign(coordinator.assignment(*model, 0, run_id="run-2"))
        running.wait_for("receipt", 2)
        assert [event["run_id"] for event in running.events("training")] == ["run-1", "run-2"]
        arguments = ["worker", "restored", "--home", str(home.directory)]
        shown = CliRunner().invoke(app, arguments)
        assert "run run-1 goes back from round 7 to round 3" in shown.output
        assert not running.events("restored")
        assert CliRunner().invoke(app, [*arguments, "--accept"]).exit_code == 0
        running.wait_for("receipt", 3)
        assert running.events("training")[-1]["round"] == 3
        assert "no restore waits" in CliRunner().invoke(app, arguments).output
    finally:
        running.stop()
