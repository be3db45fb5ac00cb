"""A coordinator whose backup was restored: what it asks for again is sent again, once its word on that is signed."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federation.refusals import Refusal
from federation.training.trainer import Trainer
from federation.trust.envelope import sign
from federation.v1.common_pb2 import KeptRun, RestoreManifest, SignedEnvelope
from federation.vectors import Layout
from fedpareto.cli.main import app
from storage.states import RoundState, RunState
from tests.harness import wait_for
from tests.scripted import FEDERATION, ScriptedCoordinator, files_in
from tests.stage import spec, stage
from tests.worker.scene import Running, Scene, command, soon
from worker.home import WorkerHome
from worker.site.policy_file import Policy


def copy_data(source: Path, target: Path) -> None:
    """The database and the blobs of a coordinator that is stopped come to another place."""
    for path in target.glob("coordinator.db*"):
        path.unlink()
    shutil.copytree(source / "blobs", target / "blobs", dirs_exist_ok=True)
    for path in source.glob("coordinator.db*"):
        shutil.copy(path, target)


MORE = """
selection.pool = "enrolled"
selection.minimum = 2
train.batch_size = 10
train.steps = 1
"""


@pytest.mark.full
def test_after_a_restored_backup_what_is_asked_for_again_is_sent_again_and_the_run_completes(
    offers: dict[str, Trainer], model: tuple[Layout, bytes], tmp_path: Path
) -> None:
    with stage(tmp_path / "coordinator", "sqlite:///coordinator.db") as made:
        home, backup = made.served.home.directory, tmp_path / "backup"
        (other,) = made.cast("digits", "other")
        player = made.player("worker")
        player.attend(digits=10)
        run = made.submit(spec("again", "digits", 3, algorithm="fedavg", more=MORE), model=model[1])
        made.wait_round(run, 0, RoundState.OPEN)
        player.leave()
        made.stop()
        copy_data(home, backup)
        made.start()
        running = Running(WorkerHome(tmp_path / "worker"), player.member.files, offers, uniform=soon)
        try:
            other.attend(digits=10)
            made.play(run, other, until=lambda: len(made.rounds(run)) > 2)
            restored = ["coordinator", "restored", "--home", str(home), "--json"]
            assert CliRunner().invoke(app, restored).exit_code == 1, "a coordinator that serves is not being restored"
            made.stop()
            copy_data(backup, home)
            unstated = str(CliRunner().invoke(app, ["coordinator", "serve", "--home", str(home)]).exception)
            assert "entries were removed. If a backup was restored, run `fedpareto coordinator r" in unstated
            assert json.loads(CliRunner().invoke(app, restored).output)["runs"] == {run: 0}
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


def restored(coordinator: ScriptedCoordinator, next_round: int) -> SignedEnvelope:
    manifest = RestoreManifest(federation_id=FEDERATION, runs=[KeptRun(run_id="run-1", next_round=next_round)])
    manifest.restored.FromDatetime(coordinator.now())
    return sign(manifest, coordinator.signing_key)


def test_an_assignment_that_comes_again_is_not_done_again_and_gets_the_same_signed_reply(scene: Scene) -> None:
    running = scene.attending()
    envelope = scene.assign(1)
    scene.coordinator.give(envelope)
    running.wait_for("receipt")
    running.wait_spooled()
    scene.coordinator.give(envelope)
    running.wait_for("receipt", 2)
    for number in (2, 3):
        scene.receipts(1 + number, number)
    running.wait_spooled()
    assert [one.manifest.round for one in scene.coordinator.submissions] == [1, 1, 2, 3]
    assert scene.coordinator.submissions[0] == scene.coordinator.submissions[1]
    assert len(running.events("training")) == 3
    wait_for(lambda: len(files_in(scene.home.handed_in)) == 2, "the payloads of the last two replies alone to stay")
    running.stop()
    scene.coordinator.submissions.clear()
    again = scene.start()
    scene.receipts(1, 3)
    assert len(again.events("training")) == 1, "after a restart it is done again"
    assert len(scene.coordinator.submissions) == 1


def test_a_worker_whose_owner_wants_to_be_asked_holds_the_runs_that_go_back_until_the_owner_accepts(
    scene: Scene,
) -> None:
    running = scene.start(policy=Policy(restore="ask"))
    scene.receipts(1, 7)
    scene.assign(6)
    assert running.wait_for("declined")[0]["reason"] == "round"
    scene.coordinator.open.clear()
    scene.coordinator.restored = restored(scene.coordinator, 3)
    scene.coordinator.end_stream(Refusal("stopping", "restored"))
    running.wait_for("restore-pending")
    running.stop()
    running = scene.attending(policy=Policy(restore="ask"))
    scene.coordinator.end_stream(Refusal("stopping", "started again"))
    running.wait_for("attending", 2)
    assert len(running.events("restore-pending")) == 1, "once after each start"
    scene.assign(3)
    scene.receipts(1, 0, run_id="run-2")
    assert [event["run_id"] for event in running.events("training")] == ["run-2"]
    place = ("--home", scene.joined())
    assert "run run-1 goes back from round 7 to round 3" in command("restored", *place)
    assert not running.events("restored")
    command("restored", *place, "--accept")
    running.wait_for("receipt", 2)
    assert running.events("training")[-1]["round"] == 3
    assert "no restore waits" in command("restored", *place)
