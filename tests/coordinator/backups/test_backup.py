"""Backups: made while a coordinator serves, and restored after the disk was lost, on both kinds of database."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import func, select, text, update

from coordinator.backups.inventory import CONTENT_FILE, LOCK_FILE, Content, locked
from coordinator.backups.making import back_up
from coordinator.backups.statement import newest_restore
from coordinator.home import CoordinatorHome
from federation.v1.common_pb2 import RestoreManifest
from fedpareto.processes.forked import completed
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.database import Database
from storage.models import Alert, AuditEntry, BlobClaim, Client
from storage.states import AlertKind, AlertSeverity, RoundState
from tests.conftest import Postgres, postgresql_database
from tests.coordinator.backups.scene import (
    answer,
    check_unchanged,
    fails,
    kept_blobs,
    lose_disk,
    restore_fails,
    run,
)
from tests.few import few, few_of
from tests.running import command, made_home
from tests.stage import Stage, spec, stage
from tests.storage.scene import blob_file

SQLITE = "sqlite:///coordinator.db"
LATER = datetime(2030, 1, 1, tzinfo=UTC)


def move(home: CoordinatorHome, database: str) -> CoordinatorHome:
    """The home with another database in its settings."""
    path = home.directory / "coordinator.toml"
    path.write_text(path.read_text().replace(f'"{home.settings.database}"', f'"{database}"'))
    return CoordinatorHome.load(home.directory)


@pytest.fixture
def postgresql(postgres: Postgres) -> Iterator[str]:
    with postgresql_database(postgres) as url:
        yield url


@few("sqlite to postgresql")
@pytest.mark.parametrize("way", ["sqlite to sqlite", "sqlite to postgresql", "postgresql to postgresql"])
def test_a_lost_disk_is_restored_from_a_backup_that_was_made_while_a_round_was_open(
    way: str, postgresql: str, backup: Path, tmp_path: Path
) -> None:
    urls = {"sqlite": SQLITE, "postgresql": postgresql}
    before, _, after = way.partition(" to ")
    with stage(tmp_path / "home", urls[before]) as made:
        home = made.served.home
        ann, ben = made.cast("task", "ann", "ben")
        name = made.submit(spec("kept", "task", 4))
        made.play(name, ann, ben, until=lambda: len(made.rounds(name)) == 2)
        steps, over = [made.rounds(name)[0].step], note_alert(made)
        told = answer("backup", backup, "--home", home.directory)
        assert (told["federation_id"], told["runs"], told["lost"], told["missing"]) == ("test", 1, [], [])
        run("restore", backup, "--check")
        made.play(name, ann, ben, until=lambda: len(made.rounds(name)) == 4)
        restore_fails("is in use by another", backup, home.directory)
        made.stop()
        lose_disk(home)
        if before != after:
            home = made.served.home = move(home, urls[after])
        if after == before == "postgresql":  # the server is another machine, which still has the rows
            fails("would be lost. Give --replace", "restore", backup, "--home", home.directory)
        restored = answer("restore", backup, "--home", home.directory, *(["--replace"] if before == after else []))
        assert (restored["runs"], restored["aside"]) == ({name: 1}, None)
        made.start()
        for player in (ann, ben):
            player._seen.clear()
        made.come_back()
        made.play(name, ann, ben)
        rounds = made.rounds(name)
        assert [row.state for row in rounds] == [RoundState.COMPLETED] * 4
        assert rounds[0].step == steps[0]
        assert over in alerts_of(made)
        made.served.coordinator.record.sequencer.sequence(show=True)
        command("admin", "--home", home.admin_dir, "audit", "verify")


@pytest.mark.full
def test_a_database_on_a_server_that_a_newer_version_has_migrated_is_not_replaced_and_the_remedy_is_named(
    home: CoordinatorHome, backup: Path, postgresql: str
) -> None:
    answer("backup", backup, "--home", home.directory)
    home = move(home, postgresql)
    answer("restore", backup, "--home", home.directory)
    with closing(Database.open(postgresql)) as database, database.begin() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    fails(
        "make an empty database, name it in `database` of coordinator.toml, and restore into that one",
        *("restore", backup, "--home", home.directory, "--replace"),
    )


COLUMNS = ("kind", "severity", "message", "remedy", "began", "ended")


def alerts_of(made: Stage) -> set[tuple[object, ...]]:
    rows = made.look(lambda session: session.scalars(select(Alert)).all())
    return {tuple(getattr(row, name) for name in COLUMNS) for row in rows}


def note_alert(made: Stage) -> tuple[object, ...]:
    """Records an alert that is over, so that the coordinator leaves it as it is."""
    began, ended = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    row = (AlertKind.BACKUP_OLD, AlertSeverity.WARNING, "no backup for a week", "make one", began, ended)
    with made.served.database.begin() as session:
        session.add(Alert(**dict(zip(COLUMNS, row, strict=True))))
    return row


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stopped coordinator with a run of three rounds."""
    with stage(tmp_path_factory.mktemp("kept") / "home", SQLITE) as made:
        ann, ben = made.cast("task", "ann", "ben")
        made.play(made.submit(spec("kept", "task", 3)), ann, ben)
        made.stop()
        yield made
        made.start()


@pytest.fixture
def home(kept: Stage, tmp_path: Path) -> CoordinatorHome:
    """A copy of its directory."""
    shutil.copytree(kept.served.home.directory, tmp_path / "home")
    return CoordinatorHome.load(tmp_path / "home")


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def test_the_next_backup_copies_what_is_new_and_removes_what_is_not_needed(home: CoordinatorHome, backup: Path) -> None:
    first = answer("backup", backup, "--home", home.directory)
    ages = {blob.digest: blob.modified for blob in DirectoryStore(backup / "blobs").scan()}
    assert len(ages) == first["blobs"] > 3
    path = home.directory / "coordinator.toml"
    path.write_text(re.sub(r"(?m)^#? ?keep_rounds = .*$", "keep_rounds = 1", path.read_text()))
    assert CoordinatorHome.load(home.directory).settings.keep_rounds == 1
    second = answer("backup", backup, "--home", home.directory)
    assert 0 < second["blobs"] < first["blobs"]
    assert {blob.digest: blob.modified for blob in DirectoryStore(backup / "blobs").scan()}.items() < ages.items()
    assert [path.name for path in backup.glob("database-*.db")] == [second["database"]]
    with closing(home.open_database()) as database, database.read() as session:
        made = session.scalars(select(AuditEntry.digest).where(AuditEntry.action == "backup.made")).all()
    assert made == [first["digest"], second["digest"]]
    lose_disk(home)
    assert answer("restore", backup, "--home", home.directory)["blobs"] == second["blobs"]
    assert kept_blobs(home.blobs_dir) == kept_blobs(backup / "blobs")


def test_the_database_that_is_replaced_keeps_another_name(home: CoordinatorHome, backup: Path) -> None:
    answer("backup", backup, "--home", home.directory)
    fails("Give --replace", "restore", backup, "--home", home.directory)
    aside = Path(answer("restore", backup, "--home", home.directory, "--replace")["aside"])
    with closing(Database.open(f"sqlite:///{aside}")) as database, database.read() as session:
        assert session.scalar(select(func.count()).where(AuditEntry.action == "backup.made")) == 1
    with closing(home.open_database()) as database, database.read() as session:
        assert session.scalar(select(func.count()).where(AuditEntry.action == "backup.made")) == 0
        tags = session.scalars(select(AuditEntry.tag).where(AuditEntry.action == "coordinator.restored")).all()
        assert tags != [None]  # the sequencer gives it a place
        assert len(tags) == 1


@pytest.mark.parametrize("revision", ["0001", "9999"])
def test_a_backup_replaces_the_database_of_a_version_that_this_one_does_not_know(
    home: CoordinatorHome, backup: Path, revision: str
) -> None:
    answer("backup", backup, "--home", home.directory)
    with closing(home.open_database()) as database, database.begin() as session:
        session.execute(text("update alembic_version set version_num = :name"), {"name": revision})
    fails(f"is at schema revision {revision}", "serve", "--home", home.directory)
    answer("restore", backup, "--home", home.directory, "--replace")
    with closing(home.open_database()) as database:
        database.check_current()


def test_a_damaged_database_file_is_put_aside_without_being_asked_for(home: CoordinatorHome, backup: Path) -> None:
    answer("backup", backup, "--home", home.directory)
    path = home.directory / "coordinator.db"
    path.write_bytes(b"not a database" * 1000)
    aside = Path(answer("restore", backup, "--home", home.directory)["aside"])
    assert aside.read_bytes().startswith(b"not a database")
    home.open_database().close()


def test_each_restore_is_in_the_statement_of_the_next_one_also_on_a_new_disk(
    home: CoordinatorHome, backup: Path
) -> None:
    answer("backup", backup, "--home", home.directory)
    answer("restore", backup, "--home", home.directory, "--replace")
    answer("backup", backup, "--home", home.directory)
    lose_disk(home)
    answer("restore", backup, "--home", home.directory)
    envelope = newest_restore(home.directory)
    assert envelope is not None
    assert len(RestoreManifest.FromString(envelope.manifest).logs) == 2


def test_ids_go_on_after_those_that_were_copied_to_postgresql_and_claims_and_starts_of_the_time_of_the_backup_end(
    home: CoordinatorHome, postgresql: str, backup: Path
) -> None:
    with closing(home.open_database()) as database, database.begin() as session:
        session.add(BlobClaim(digest="of the time of the backup", claimed=LATER))
        session.execute(update(Client).values(start="ab" * 16))
    answer("backup", backup, "--home", home.directory)
    answer("restore", backup, "--home", move(home, postgresql).directory)
    with closing(Database.open(postgresql)) as database, database.begin() as session:
        assert session.scalar(select(func.count()).select_from(BlobClaim)) == 0
        assert set(session.scalars(select(Client.start))) == {""}
        largest = session.scalar(select(func.max(AuditEntry.entry_id))) or 0
        audit.record(session, at=LATER, actor="test", action="test")
        assert session.scalar(select(func.max(AuditEntry.entry_id))) == largest + 1


def a_blob(backup: Path) -> Path:
    return blob_file(DirectoryStore(backup / "blobs"), min(kept_blobs(backup / "blobs")))


def of_another(backup: Path) -> None:
    shutil.rmtree(backup)
    other = made_home(backup.parent / "other", now=LATER, federation_id="other")
    answer("backup", backup, "--home", other.directory)


def spoil_database(backup: Path) -> None:
    with (backup / Content.load(backup).database).open("r+b") as file:
        file.seek(5000)
        file.write(b"x")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "blob": (lambda b: a_blob(b).write_bytes(b"other"), "the backup in .* is damaged: the bytes of blob"),
    "no blob": (lambda b: a_blob(b).unlink(), "the backup in .* is damaged: there is no blob"),
    "database": (spoil_database, "database-.* damaged: its digest is not the one in backup.json"),
    "no database": (lambda b: (b / Content.load(b).database).unlink(), "damaged|missing"),
    "content": (lambda b: (b / CONTENT_FILE).write_text('{"format": 1}'), "backup.json: federation_id: Field required"),
    "no content": (lambda b: (b / CONTENT_FILE).unlink(), "holds no backup"),
    "another federation": (of_another, "holds a backup of the federation other, whose CA has the fingerprint"),
}


@pytest.mark.parametrize("damage", few_of(DAMAGES, "blob", "database", "another federation"))
def test_a_backup_that_cannot_be_restored_is_named_and_changes_nothing(
    home: CoordinatorHome, backup: Path, damage: str
) -> None:
    answer("backup", backup, "--home", home.directory)
    act, words = DAMAGES[damage]
    blob_file(DirectoryStore(home.blobs_dir), min(kept_blobs(backup / "blobs"))).unlink()
    act(backup)
    check_unchanged(words, backup, home.directory)
    if damage != "another federation":
        said = run("restore", "--check", backup, code=1)
        assert re.search(words, said), said


def test_a_blob_that_the_coordinator_has_lost_is_named_and_the_rest_is_there(
    home: CoordinatorHome, backup: Path
) -> None:
    lost, damaged = sorted(kept_blobs(home.blobs_dir))[:2]
    blob_file(DirectoryStore(home.blobs_dir), lost).unlink()
    blob_file(DirectoryStore(home.blobs_dir), damaged).write_bytes(b"other")
    words = f"lacks 2 blobs that the coordinator cannot read, the first one {lost}"
    fails(words, "backup", backup, "--home", home.directory)
    assert Content.load(backup).missing == (lost, damaged)
    answer("restore", backup, "--home", home.directory, "--replace")


def test_a_directory_with_something_else_takes_no_backup(home: CoordinatorHome, backup: Path, tmp_path: Path) -> None:
    fails("is not empty and holds no backup", "backup", tmp_path, "--home", home.directory)
    other = made_home(tmp_path / "other", now=LATER, federation_id="other")
    answer("backup", backup, "--home", home.directory)
    fails("holds a backup of the federation test", "backup", backup, "--home", other.directory)
    with locked(tmp_path / "backup"):
        fails("another process uses the backup", "backup", backup, "--home", home.directory)


KILLED = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from coordinator.backups.making import back_up
from coordinator.home import CoordinatorHome as Home
count = 0
def progress(done, total):
    global count
    count += 1
    if count == 3:
        os._exit(9)
back_up(Home.load(Path(sys.argv[1])), Path(sys.argv[2]), now=datetime.now(UTC), progress=progress)
"""


@pytest.mark.full
def test_a_backup_that_is_killed_leaves_the_one_before_and_the_next_one_completes(
    home: CoordinatorHome, backup: Path
) -> None:
    killed = ["-c", KILLED, str(home.directory), str(backup)]
    assert completed(killed).returncode == 9
    assert (backup / LOCK_FILE).exists()
    run("restore", backup, "--check", code=1)  # there is none yet
    first = answer("backup", backup, "--home", home.directory)
    for path in list((backup / "blobs").glob("*/*/*"))[:4]:  # so that the next one has something to copy
        path.unlink()
    assert completed(killed).returncode == 9
    assert Content.load(backup).digest == first["digest"]
    assert (backup / first["database"]).exists()
    content, lost = back_up(home, backup, now=LATER, progress=lambda done, total: None)
    assert lost == []
    assert [path.name for path in backup.glob("database-*.db")] == [content.database]
    run("restore", backup, "--check")


def test_a_database_of_an_older_version_is_refused(home: CoordinatorHome, backup: Path) -> None:
    with closing(home.open_database()) as database, database.engine.begin() as connection:
        connection.execute(text("DELETE FROM alembic_version"))  # as before its first version
    fails("an older version of fedpareto made the database", "backup", backup, "--home", home.directory)
