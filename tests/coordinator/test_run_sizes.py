"""What the record takes on the disk, what a run will take, and what a dry run says."""

import shutil

import pytest

from coordinator.run_sizes import run_bytes
from federation.spec.run_spec import RunSpec
from federation.v1 import admin_pb2 as admin
from fedpareto.cli.admin import upload
from fedpareto.cli.failure import CommandFailure
from storage.states import RunState
from tests.running import SECONDS, refused
from tests.stage import MODEL, Stage, spec
from tests.storage.scene import stored


def look(stage: Stage) -> admin.GetDiskResponse:
    return stage._admin.GetDisk(admin.GetDiskRequest(), timeout=SECONDS)


def test_the_disk_is_counted_by_models_updates_and_runs(stage: Stage) -> None:
    before = look(stage)
    run, players = stage.begin("a", "b", rounds=3, paused=True)
    update = len(stage.blobs.read(stage.run(run).model))  # an update has the size of a model, but for its header
    [planned] = [item for item in look(stage).runs if item.run_id == run]
    assert (planned.models, planned.replies) == (len(MODEL), 0)
    assert planned.needed == 3 * 2 * len(MODEL)  # a model and, as far as is known, one update for each round
    stage.resume(run, *players)
    after = look(stage)
    [found] = [item for item in after.runs if item.run_id == run]
    stage.wait_state(run, RunState.COMPLETED)
    payloads = {row.payload for number in range(3) for row in stage.replies(run, number).values()}
    assert found.needed == 0
    assert found.models == 4 * len(MODEL)
    assert found.replies == sum(stage.blobs.stat(payload).size for payload in payloads) > 5 * (update - 200)
    assert after.models - before.models in (3 * len(MODEL), 4 * len(MODEL))  # other runs may begin with the same one
    assert after.replies - before.replies == found.replies
    assert after.database > 0
    assert after.free == pytest.approx(shutil.disk_usage(stage.blobs.root).free, rel=0.5)


def test_the_estimate_of_a_run_counts_a_model_and_the_wanted_updates_of_each_round() -> None:
    def estimate(more: str, members: int, objectives: int = 1) -> int:
        text = f'name = "a"\ntask = "digits"\nrounds = 10\n[selection]\n{more}'
        return run_bytes(RunSpec.parse(text), model=1000, members=members, objectives=objectives)

    assert estimate("", 4) == 10 * 1000 * (1 + 4)
    assert estimate("minimum = 6", 4) == 10 * 1000 * (1 + 6)
    assert estimate('method = "fraction"\nfraction = 0.5', 4) == 10 * 1000 * (1 + 2)
    assert estimate("", 4, 3) == 10 * 1000 * (1 + 4 * 3)


def test_a_dry_run_says_whom_a_round_would_ask_and_stores_nothing(stage: Stage) -> None:
    task, _ = stage.crew("a", "b", "c")
    blobs = set(stored(stage.blobs))
    half = 'selection.method = "fraction"\nselection.fraction = 0.5\nselection.minimum = 2\nalgorithm.prior = "samples"'
    response = stage.dry_run(spec("dry", task, 5, more=half))
    assert list(response.members) == ["a", "b", "c"]
    assert (response.asked, response.minimum) == (2, 2)
    assert response.disk_needed == 5 * 3 * len(MODEL) < response.disk_free
    assert len(response.warnings) == 1
    assert "members claim their numbers of training samples" in response.warnings[0]
    assert not response.HasField("run")
    assert "dry" not in {run.name for run in look(stage).runs}
    assert set(stored(stage.blobs)) == blobs


def test_a_dry_run_refuses_what_a_submission_would_refuse(stage: Stage) -> None:
    task = stage.task()
    with refused("INVALID_ARGUMENT", "spec"):
        stage.dry_run(spec("dry", task, 0))
    with refused("RESOURCE_EXHAUSTED", "limit:model"):
        stage.dry_run(spec("dry", task), size=1 << 60)
    run = stage.submit(spec("there", task), paused=True)
    with refused("ALREADY_EXISTS", "run-exists"):
        stage.dry_run(spec("there", task))
    stage.stop_run(run)


def test_a_run_that_is_larger_than_the_disk_is_warned_of(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    task, _ = stage.crew("a")
    response = stage.dry_run(spec("large", task, 1_000_000), size=8 << 30)
    assert "the run will take about 17179869.2 GB on the coordinator's disk" in response.warnings[0]
    with pytest.raises(CommandFailure, match="too little space", check=lambda error: error.code == 1):
        upload.show_prospects(response, as_json=False)
    assert "1 (a); a round asks 1" in capsys.readouterr().out
    nobody = stage.dry_run(spec("lonely", stage.task()))
    with pytest.raises(CommandFailure, match="0 members could be asked, and a round needs 1"):
        upload.show_prospects(nobody, as_json=False)
