"""Models that are missing or damaged on the disk: never served, named with a stable reason, and repaired."""

from collections.abc import Callable
from pathlib import Path

import pytest

from federation.digests import digest
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import AssignmentManifest
from federation.v1.federation_pb2 import FetchBlobRequest
from storage import blob_directory
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt
from storage.states import RunState
from tests.coordinator.rounds.scene import cut, flip, lose
from tests.running import refused
from tests.stage import MODEL, Player, Stage, reply
from tests.storage.scene import blob_file

Damage = Callable[[Path], Callable[[], None]]


def begin(stage: Stage) -> tuple[str, dict[Player, AssignmentManifest]]:
    run, players = stage.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    return run, {player: player.order() for player in players}


def fetch(player: Player, name: str) -> bytes:
    chunks = player.member.stub.FetchBlob(FetchBlobRequest(digest=name), timeout=60)
    return b"".join(response.chunk for response in chunks)


@pytest.mark.parametrize("damage", [flip, cut, lose])
def test_a_damaged_model_is_not_served_and_the_run_pauses_until_it_is_restored(stage: Stage, damage: Damage) -> None:
    run, orders = begin(stage)
    name = digest(MODEL)
    repair = damage(blob_file(stage.blobs, name))
    for player in orders:
        with refused("DATA_LOSS", "blob-damaged") as messages:
            fetch(player, name)
        assert name in messages[0]
    assert stage.wait_state(run, RunState.PAUSED).reason.startswith("storage: ")
    assert name in stage.run(run).reason
    repair()
    stage.resume(run)
    for player, order in orders.items():
        assert fetch(player, name) == MODEL
        player.reply(order)
    stage.play(run, *orders)
    assert not [entry for entry in stage.served.refusals("FetchBlob") if entry.outcome == "internal"]


@pytest.mark.parametrize("damage", [flip, lose])
def test_a_damaged_model_is_not_exported(stage: Stage, damage: Damage) -> None:
    run, orders = begin(stage)
    reply(orders)
    stage.play(run, *orders)
    name = stage.run(run).model
    repair = damage(blob_file(stage.blobs, name))
    with refused("DATA_LOSS", "blob-damaged") as messages:
        list(stage._admin.ExportModel(admin.ExportModelRequest(run=run), timeout=60))
    assert name in messages[0]
    repair()
    exported = list(stage._admin.ExportModel(admin.ExportModelRequest(run=run), timeout=60))
    assert digest(b"".join(response.chunk for response in exported)) == name


def test_a_damaged_model_that_is_submitted_again_is_whole(stage: Stage) -> None:
    flip(blob_file(stage.blobs, digest(MODEL)))
    _, orders = begin(stage)
    for player in orders:
        assert fetch(player, digest(MODEL)) == MODEL


def test_a_blob_of_another_process_is_checked_when_it_is_opened_first_and_each_blob_when_its_file_has_changed(
    blobs: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    check = blob_directory._check

    def count(name: str, file: object) -> None:
        checked.append(name)
        check(name, file)  # type: ignore[arg-type]

    monkeypatch.setattr(blob_directory, "_check", count)
    name = DirectoryStore(blobs.root).put(b"model")
    for _ in range(3):
        with blobs.open_range(name) as file:
            assert file.read() == b"model"
    assert checked == [name]
    repair = flip(blob_file(blobs, name))
    with pytest.raises(BlobCorrupt):
        blobs.open_range(name)
    with pytest.raises(BlobCorrupt):
        blobs.local(name)
    repair()
    blobs.local(name)
    assert checked == [name] * 4
