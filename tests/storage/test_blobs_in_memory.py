"""A whole federation on a blob store that has neither files nor a directory."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from coordinator.home import CoordinatorHome
from coordinator.rounds.housekeeping import COLLECTION_GRACE
from federation.digests import digest
from federation.v1 import admin_pb2 as admin
from federation.v1.federation_pb2 import FetchBlobRequest
from federation.vectors import read_vector
from storage.retention import collect
from storage.states import RunState
from tests.running import SECONDS, refused
from tests.stage import MODEL, Player, Stage, stage, vector
from tests.storage.memory_blobs import MemoryStore
from tests.storage.scene import date_back, stored


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    made = MemoryStore()
    monkeypatch.setattr(CoordinatorHome, "open_blobs", lambda home, database: made)
    return made


@pytest.fixture
def remote(tmp_path: Path, store: MemoryStore) -> Iterator[Stage]:
    with stage(tmp_path, f"sqlite:///{tmp_path / 'test.db'}") as made:
        yield made


def fetch(player: Player, name: str, offset: int = 0) -> bytes:
    chunks = player.member.stub.FetchBlob(FetchBlobRequest(digest=name, offset=offset), timeout=SECONDS)
    return b"".join(response.chunk for response in chunks)


def export(stage: Stage, run: str) -> bytes:
    return b"".join(part.chunk for part in stage._admin.ExportModel(admin.ExportModelRequest(run=run), timeout=SECONDS))


@pytest.mark.full
def test_a_federation_stores_serves_aggregates_and_collects_without_a_directory(
    remote: Stage, store: MemoryStore
) -> None:
    run, players = remote.begin("ann", "ben", algorithm="fedavg", more="selection.minimum = 2")
    ann, ben = players
    orders = {player: player.order() for player in players}
    name = digest(MODEL)
    assert fetch(ann, name) == MODEL
    assert fetch(ben, name, len(MODEL) - 7) == MODEL[-7:]
    with refused("OUT_OF_RANGE", "offset") as messages:
        fetch(ann, name, len(MODEL) + 1)
    assert messages == [f"blob {name} has {len(MODEL)} bytes; byte {len(MODEL) + 1} is not one of them"]

    ann.reply(orders[ann])
    (payload,) = (update.payload for update in remote.replies(run).values())
    good = store.contents[payload]
    store.contents[payload] = bytes(len(good))
    ben.reply(orders[ben])
    assert payload in remote.wait_state(run, RunState.PAUSED).reason
    store.contents[payload] = good
    remote.resume(run, *players)

    base, made = (read_vector(store.local(digest))[1] for digest in (name, remote.run(run).model))
    mean = (vector("ann", orders[ann]) + vector("ben", orders[ben])) / 2
    np.testing.assert_allclose(made, base - mean, rtol=1e-5, atol=1e-6)
    assert digest(export(remote, run)) == remote.run(run).model
    found = remote._admin.GetDisk(admin.GetDiskRequest(), timeout=SECONDS)
    assert found.models + found.replies + found.other == sum(map(len, store.contents.values()))
    assert found.free == store.free_bytes()

    store.put(b"nobody refers to this")
    kept = remote.rounds(run)[0].gram, name, remote.run(run).model
    updates = {update.payload for update in remote.replies(run).values()}
    for blob in stored(store):
        date_back(store, blob)
    now = remote.served.clock() + timedelta(days=1)
    collect(remote.served.database, store, now=now, grace_seconds=COLLECTION_GRACE.total_seconds())
    assert set(stored(store)) == {*kept, *updates}
    assert not list(remote.served.home.blobs_dir.rglob("blake3"))
