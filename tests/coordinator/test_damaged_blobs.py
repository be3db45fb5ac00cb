"""Models that are missing, damaged or removed: never served, named with a stable reason, and repaired or kept."""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from coordinator.lookup import _listed
from coordinator.rounds.runs.scores import best_round
from federation.digests import digest
from federation.trust.envelope import sign
from federation.v1 import admin_pb2 as admin
from federation.v1.common_pb2 import ModelManifest
from federation.v1.federation_pb2 import FetchBlobRequest, GetModelRequest
from storage import blob_directory
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt
from storage.retention import collect
from storage.states import RunState
from tests.coordinator.rounds.scene import cut, flip, lose
from tests.coordinator.scene import begun
from tests.few import few
from tests.running import SECONDS, refused
from tests.stage import MODEL, Stage, reply, stage
from tests.storage.scene import blob_file

Damage = Callable[[Path], Callable[[], None]]


@few(flip, lose)
@pytest.mark.parametrize("damage", [flip, cut, lose])
def test_a_damaged_model_is_not_served_and_the_run_pauses_until_it_is_restored(stage: Stage, damage: Damage) -> None:
    run, orders = begun(stage)
    name = digest(MODEL)
    repair = damage(blob_file(stage.blobs, name))
    for player in orders:
        with refused("DATA_LOSS", "blob-damaged") as messages:
            player.fetch(name)
        assert name in messages[0]
    assert stage.wait_state(run, RunState.PAUSED).reason.startswith("storage: ")
    assert name in stage.run(run).reason
    repair()
    stage.resume(run)
    for player, order in orders.items():
        assert player.fetch(name) == MODEL
        player.reply(order)
    stage.play(run, *orders)
    assert not [entry for entry in stage.served.refusals("FetchBlob") if entry.outcome == "internal"]


@pytest.mark.parametrize("damage", [flip, lose])
def test_a_damaged_model_is_not_exported(stage: Stage, damage: Damage) -> None:
    run, orders = begun(stage)
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
    _, orders = begun(stage)
    for player in orders:
        assert player.fetch(digest(MODEL)) == MODEL


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


ROUNDS = 6


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A coordinator that keeps the first, the best and the last round of each run."""
    directory = tmp_path_factory.mktemp("removed")
    with stage(directory, f"sqlite:///{directory / 'test.db'}", keep_rounds=1) as made:
        yield made


@pytest.fixture(scope="module")
def run(short: Stage) -> str:
    """A run whose old models have been collected."""
    run, players = short.begin("ann", "ben", rounds=ROUNDS, algorithm="fedavg", more="selection.minimum = 2")
    short.play(run, *players)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    collect(short.served.database, short.blobs, now=tomorrow, grace_seconds=60, keep_rounds=1)
    return run


def export(short: Stage, run: str, number: int | None = None) -> str:
    return next(short._admin.ExportModel(admin.ExportModelRequest(run=run, round=number), timeout=SECONDS)).digest


def exports(short: Stage) -> int:
    return len(short.served.entries(action="model.exported"))


@pytest.mark.full
def test_the_export_of_a_removed_model_is_refused_with_the_rounds_that_can_be_exported(short: Stage, run: str) -> None:
    there = [row.number for row in short.rounds(run) if short.blobs.exists(row.deployed_model or "")]
    (gone, *_) = set(range(ROUNDS)) - set(there)
    before = exports(short)
    with refused("NOT_FOUND", "blob-removed") as messages:
        export(short, run, gone)
    assert messages == [
        f"the model after round {gone} of run {run} was removed: of each run, only the first, the best and the last "
        "rounds keep their models and updates (keep_rounds = 1 in the coordinator's settings). Of this run there are "
        f"the models after {_listed(there)}; without --round and --best, the newest is given"
    ]
    assert exports(short) == before  # an export that was refused is none
    for number in there:
        assert export(short, run, number) == short.rounds(run)[number].deployed_model
    assert export(short, run) == short.run(run).model
    assert exports(short) == before + len(there) + 1


def test_a_client_that_asks_for_a_removed_model_is_told_that_it_was_removed(short: Stage, run: str) -> None:
    row = next(row for row in short.rounds(run) if not short.blobs.exists(row.base_model))
    with refused("NOT_FOUND", "blob-removed") as messages:
        short.players["ann"].fetch(row.base_model)
    assert messages[0].startswith(f"{row.base_model} of assignment ")
    asked = {n for n in range(ROUNDS) if f"was removed: round {n} of run {run} has ended" in messages[0]}
    assert asked < {row.number - 1, row.number}  # the one that evaluated the model, or the one that began with it
    assert "keep_rounds = 1" in messages[0]
    assert short.run(run).state is RunState.COMPLETED


def test_a_member_that_asks_for_a_removed_model_is_told_so_and_of_the_rounds_that_are_left(
    short: Stage, run: str
) -> None:
    ann, rounds, before = short.players["ann"], short.rounds(run), exports(short)
    gone = {row.number for row in rounds if not short.blobs.exists(row.deployed_model or "")}
    scored = [(metric, split) for metric in ("loss", "accuracy") for split in ("train", "test")]
    at = {
        (metric, split): short.look(
            partial(best_round, run=short.run(run), metric=metric, of="mean", split=split)
        ).number
        for metric, split in scored
    }
    metric, split = next(of for of, number in at.items() if number in gone)
    asked = GetModelRequest(run=run, nonce=bytes(16), best=metric, split=split)
    with refused("NOT_FOUND", "blob-removed") as messages:
        ann.member.stub.GetModel(asked, timeout=SECONDS)
    assert f"the model after round {at[metric, split]} of run {run} was removed" in messages[0]
    removed = rounds[at[metric, split]].deployed_model or ""
    manifest = ModelManifest(federation_id="test", client_id="ann", model=removed)
    manifest.created.FromDatetime(short.clock())
    grant = sign(manifest, short.served.home.signing_key)  # as it was given before the model was removed
    with refused("NOT_FOUND", "blob-removed"):
        list(ann.member.stub.FetchBlob(FetchBlobRequest(digest=removed, grant=grant), timeout=SECONDS))
    assert exports(short) == before


def test_a_model_that_is_to_be_kept_and_is_not_there_is_damage(short: Stage, run: str, tmp_path: Path) -> None:
    path = blob_file(short.blobs, short.run(run).model)
    os.rename(path, tmp_path / "away")
    for number in (None, ROUNDS - 1):
        with refused("DATA_LOSS", "blob-damaged"):
            export(short, run, number)
    with refused("DATA_LOSS", "blob-damaged"):
        short.players["ann"].member.stub.GetModel(GetModelRequest(run=run, nonce=bytes(16)), timeout=SECONDS)
    os.rename(tmp_path / "away", path)


def test_rounds_are_listed_in_spans() -> None:
    assert _listed([0, 3, 4, 5, 9]) == "rounds 0, 3 to 5, 9"
    assert (_listed([7]), _listed([])) == ("round 7", "no round")
