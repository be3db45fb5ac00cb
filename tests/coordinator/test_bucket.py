"""A coordinator whose blobs are in a bucket: the same models as with a directory, and the bucket's faults."""

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from urllib.request import urlopen

import pytest
from sqlalchemy import select

from coordinator.home import CoordinatorHome, open_blobs
from coordinator.ownership import CoordinatorHomeError
from coordinator.settings import Settings
from federation.digests import digest
from federation.trust.certificates import make_ca
from federation.trust.keys import new_tls_key
from federation.v1 import admin_pb2 as admin
from federation.v1.federation_pb2 import FetchBlobRequest, GetModelRequest, LocateBlobRequest
from storage.models import BlobClaim
from storage.objects.store import ObjectStore
from storage.states import RunState
from tests.conftest import Postgres, postgresql_database
from tests.coordinator.backups.scene import fails
from tests.coordinator.backups.scene import run as command
from tests.coordinator.scene import begun
from tests.running import SECONDS, refused, wait_for
from tests.stage import Player, Stage, reply, spec, stage
from tests.storage import buckets
from tests.storage.buckets import BRIEF, BUCKET, Proxy, Storage, environment, proxy
from tests.storage.scene import overwrite, stored

SQLITE = "sqlite:///coordinator.db"


storage, line = buckets.storage, buckets.line  # fixtures


@pytest.fixture(scope="module")
def _line(storage: Storage) -> Iterator[Proxy]:
    with proxy(storage) as made, environment(made.environment), pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.objects.bucket.Patience", lambda: BRIEF)
        yield made


def settings(line: Proxy, prefix: str) -> dict[str, object]:
    return {"blobs": f"s3://{BUCKET}/{prefix}", "blobs_endpoint": line.endpoint, "blob_urls_seconds": 600}


@pytest.fixture(scope="module")
def _remote(tmp_path_factory: pytest.TempPathFactory, _line: Proxy) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("remote") / "home", SQLITE, **settings(_line, "shared")) as made:
        yield made


@pytest.fixture
def remote(_remote: Stage, line: Proxy) -> Iterator[Stage]:
    yield _remote
    line.calm()
    wait_for(lambda: not _remote.served.coordinator.record.faults.present, "the faults to be over")
    _remote.clear()


def store(made: Stage) -> ObjectStore:
    opened = made.served.home.open_blobs(None)
    assert isinstance(opened, ObjectStore)
    return opened


def begin(made: Stage, rounds: int = 1, *, seed: int = 3) -> tuple[str, list[Player]]:
    """A run; another seed gives other updates, and so other blobs."""
    return made.begin("ann", "ben", rounds=rounds, seed=seed, algorithm="fedavg", more="selection.minimum = 2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The model of a run with a directory, by its seed."""
    models = {}
    with stage(tmp_path_factory.mktemp("directory") / "home", SQLITE) as made:
        for seed in (3, 4):
            run, players = begin(made, seed=seed)
            made.play(run, *players)
            models[seed] = made.run(run).model
    return models


@pytest.mark.full
def test_a_federation_makes_the_same_model_with_a_bucket_as_with_a_directory(
    remote: Stage, expected: dict[int, str]
) -> None:
    run, players = begin(remote)
    remote.play(run, *players)
    assert remote.run(run).model == expected[3]
    found = remote._admin.GetDisk(admin.GetDiskRequest(), timeout=SECONDS)
    assert not found.HasField("free")
    blobs = store(remote)
    assert found.models + found.replies + found.other == sum(blob.size for blob in blobs.scan())
    for name in stored(blobs):
        blobs.verify(name)


@pytest.mark.parametrize(
    "kind", ["503", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("away", "silent", "403", "500"))]
)
def test_a_bucket_that_fails_pauses_the_run_with_the_reason_and_it_goes_on_when_the_bucket_works(
    remote: Stage, line: Proxy, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run, orders = begun(remote)
        ann, _ = orders
        line.disturb(kind)
        with refused("UNAVAILABLE", "blob-store"):
            ann.reply(orders[ann])
        paused = remote.wait_state(run, RunState.PAUSED)
        assert re.match(
            r"blob-store: s3://blobs/shared cannot (look up|store) .*; see to the bucket: then it goes", paused.reason
        )
        with refused("UNAVAILABLE", "blob-store"):
            remote.submit(spec("another", "task"))
        line.calm()
        remote.wait_state(run, RunState.RUNNING)
        reply(orders)
        remote.play(run, *orders)
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in told if record.exc_info] == []
    assert len([record for record in told if "the bucket of the blobs fails" in record.message]) == 1
    assert "the fault is over: blob-store" in caplog.text


@pytest.mark.full
def test_a_step_that_the_bucket_does_not_take_is_made_again_and_is_the_same(
    remote: Stage, line: Proxy, expected: dict[int, str]
) -> None:
    run, orders = begun(remote, seed=4)
    ann, ben = orders
    ann.reply(orders[ann])
    sent = count()
    line.disturb("503", lambda method, path: method == "PUT" and next(sent) > 0)  # all but the reply
    ben.reply(orders[ben])
    assert remote.wait_state(run, RunState.PAUSED).reason.startswith("blob-store: ")
    line.calm()
    remote.play(run, ann, ben)
    assert remote.run(run).model == expected[4]


@pytest.mark.parametrize("damage", ["changed", pytest.param("removed", marks=pytest.mark.full)])
def test_an_object_that_was_changed_or_removed_pauses_the_run_until_it_is_restored(remote: Stage, damage: str) -> None:
    run, orders = begun(remote, seed=len(damage))
    ann, ben = orders
    ann.reply(orders[ann])
    (payload,) = (reply.payload for reply in remote.replies(run).values())
    blobs = store(remote)
    good = blobs.read(payload)
    if damage == "changed":
        overwrite(blobs, payload, bytes(len(good)))
    else:
        blobs.delete(payload)
    ben.reply(orders[ben])
    reason = remote.wait_state(run, RunState.PAUSED).reason
    assert reason.startswith("storage: the bytes of blob" if damage == "changed" else "storage: there is no blob")
    assert payload in reason
    assert remote.served.coordinator.record.faults.present == {}
    blobs.put(good)
    remote.resume(run, ann, ben)


@pytest.mark.full
def test_a_coordinator_starts_only_with_a_bucket_that_works_and_the_check_names_what_fails(
    line: Proxy, tmp_path: Path
) -> None:
    with stage(tmp_path / "home", SQLITE, **settings(line, "start")) as made:
        home = made.served.home.directory
        run, _ = begin(made)
        command("check", "--home", home)
        made.stop()
        line.disturb("403", lambda method, path: method == "DELETE")
        words = command("serve", "--home", home, code=1)
        assert re.search(r"s3://blobs/start cannot remove probe/\S+: 403 AccessDenied: ", words), words
        line.disturb("403")
        words = command("check", "--home", home, code=1)
        assert "s3://blobs/start cannot list its objects: 403 AccessDenied" in " ".join(words.split())
        line.calm()
        made.start()
        blobs = store(made)
        overwrite(blobs, made.run(run).model, b"other")
        fails("missing or damaged", "check", "--home", home)


@pytest.mark.full
def test_a_bucket_is_backed_up_and_a_backup_is_restored_into_another_bucket_or_a_directory(
    line: Proxy, tmp_path: Path
) -> None:
    backup = tmp_path / "backup"
    with stage(tmp_path / "home", SQLITE, **settings(line, "backup")) as made:
        home = made.served.home
        run, players = begin(made)
        command("backup", backup, "--home", home.directory)
        names = stored(store(made))
        made.stop()
        shutil.rmtree(home.blobs_dir)
        text = (home.directory / "coordinator.toml").read_text()
        for blobs in (f"s3://{BUCKET}/restored", "blobs"):
            changed = text.replace(f's3://{BUCKET}/backup"', f'{blobs}"')
            if blobs == "blobs":
                changed = changed.replace(line.endpoint, "").replace("blob_urls_seconds = 600", "")
            (home.directory / "coordinator.toml").write_text(changed)
            command("restore", backup, "--home", home.directory, "--replace")
            opened = CoordinatorHome.load(home.directory).open_blobs(None)
            assert set(stored(opened)) <= set(names)
            for name in stored(opened):
                opened.verify(name)
        (home.directory / "coordinator.toml").write_text(text.replace(f"{BUCKET}/backup", f"{BUCKET}/restored"))
        made.served.home = CoordinatorHome.load(home.directory)
        made.start()
        made.come_back()
        made.play(run, *players)


def located(player: Player, name: str) -> str:
    return str(player.member.stub.LocateBlob(LocateBlobRequest(digest=name), timeout=SECONDS).url)


def test_a_member_gets_urls_of_the_blobs_that_are_offered_to_it_and_of_no_others(remote: Stage) -> None:
    run, orders = begun(remote)
    ann, ben = orders
    model = orders[ann].base_model
    with urlopen(located(ann, model)) as response:
        assert digest(response.read()) == model
    ann.reply(orders[ann])
    (payload,) = (reply.payload for reply in remote.replies(run).values())
    stranger = remote.player("cleo")
    for player, name in ((ben, payload), (ann, payload), (stranger, model), (ann, digest(b"no blob")), (ann, "x")):
        with refused("PERMISSION_DENIED", "blob-not-offered"):
            located(player, name)
    ben.reply(orders[ben])
    remote.play(run, ann, ben)
    answer = ann.member.stub.GetModel(GetModelRequest(run=run, nonce=bytes(16)), timeout=SECONDS)
    newest = FetchBlobRequest(digest=remote.run(run).model, grant=answer.model)
    pieces = ann.member.stub.FetchBlob(newest, timeout=SECONDS)
    assert digest(b"".join(piece.chunk for piece in pieces)) == newest.digest
    granted = LocateBlobRequest(digest=newest.digest, grant=answer.model)
    with urlopen(ann.member.stub.LocateBlob(granted, timeout=SECONDS).url) as response:
        assert digest(response.read()) == newest.digest
    with refused("PERMISSION_DENIED", "blob-not-offered"):
        ben.member.stub.LocateBlob(granted, timeout=SECONDS)


def test_without_the_option_a_bucket_gives_no_url(line: Proxy, tmp_path: Path) -> None:
    with stage(tmp_path / "home", SQLITE, **(settings(line, "off") | {"blob_urls_seconds": 0})) as made:
        _, (ann, _) = begin(made)
        assert located(ann, ann.order().base_model) == ""


def test_urls_are_of_a_bucket_that_members_reach_by_https() -> None:
    for chosen, problem in (
        ({}, "blobs is 'blobs', a directory"),
        ({"blobs": "s3://blobs", "blobs_endpoint": "http://minio:9000"}, "members download by https"),
    ):
        with pytest.raises(CoordinatorHomeError, match=problem):
            Settings.check({"federation_id": "test", "blob_urls_seconds": 60, **chosen}, "test")
    for chosen in ({"blobs": "az://blobs"}, {"blobs": "s3://blobs", "blobs_endpoint": "https://minio:9000"}):
        assert Settings.check({"federation_id": "test", "blob_urls_seconds": 60, **chosen}, "test").in_bucket


@pytest.mark.full
def test_a_coordinator_on_postgresql_claims_its_blobs_in_the_database(
    postgres: Postgres, line: Proxy, expected: dict[int, str], tmp_path: Path
) -> None:
    with (
        postgresql_database(postgres) as url,
        stage(tmp_path / "home", url, **settings(line, "several")) as made,
        closing(made.served.home.open_database()) as database,
    ):
        run, players = begin(made)
        made.play(run, *players)
        assert made.run(run).model == expected[3]
        blobs = made.served.home.open_blobs(database)
        with database.read() as session:
            assert sorted(session.scalars(select(BlobClaim.digest))) == stored(blobs)
        command("backup", tmp_path / "backup", "--home", made.served.home.directory)
    assert not (made.served.home.blobs_dir / "ages").exists()


def test_a_bucket_is_named_by_a_url_of_a_known_kind_and_without_secrets() -> None:
    for blobs in ("http://minio/blobs", "s3://KEY:SECRET@blobs/x", "s3://", "s3://blobs/x?y=z", "s3://blobs/../x y"):
        with pytest.raises(CoordinatorHomeError, match="expected a directory, or s3://BUCKET/PREFIX"):
            Settings.check({"federation_id": "test", "blobs": blobs}, "test")
    with pytest.raises(CoordinatorHomeError, match="blobs_endpoint is of an S3 service"):
        Settings.check({"federation_id": "test", "blobs": "gs://blobs", "blobs_endpoint": "https://minio"}, "test")
    with pytest.raises(CoordinatorHomeError, match="expected https://HOST"):
        Settings.check({"federation_id": "test", "blobs": "s3://blobs", "blobs_endpoint": "https://me:x@minio"}, "test")
    for blobs in ("s3://blobs", "s3://blobs/a/b-c_d.e/", "gs://blobs/x", "az://blobs/x"):
        assert Settings.check({"federation_id": "test", "blobs": blobs}, "test").in_bucket
    assert not Settings.check({"federation_id": "test", "blobs": "/srv/blobs"}, "test").in_bucket


def test_without_the_package_for_buckets_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Settings.check({"federation_id": "test", "blobs": "s3://blobs/x"}, "test")
    for name in ("obstore", "storage.objects.bucket", "storage.objects.store"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CoordinatorHomeError, match=r"pip install 'fedpareto\[objects\]'"):
        open_blobs(tmp_path, made, make_ca(new_tls_key(), "test", datetime.now(UTC)), None)
