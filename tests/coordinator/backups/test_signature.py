"""A backup that somebody has edited, with all digests computed anew, is refused: what it lacks is the signature."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import text

from coordinator.backups.inventory import CONTENT_FILE, Content
from coordinator.home import CoordinatorHome
from federation.digests import file_digest
from federation.trust.certificates import fingerprint, pem
from federation.trust.envelope import key_id
from tests.coordinator.backups.scene import answer, check_unchanged, fails, lose_disk, restore_fails, run
from tests.few import few_of
from tests.running import made_home

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)
NOBODY = "is not a signature of the coordinator"
CHANGED = "backup.json was changed"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a home, and two backups of it."""
    directory = tmp_path_factory.mktemp("made")
    home = made_home(directory / "home", now=NOW)
    for name in ("older", "backup"):
        answer("backup", directory / name, "--home", home.directory)
    return directory


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def rewrite(backup: Path, /, **changed: Any) -> None:
    """Changes fields of the inventory; None removes one."""
    content = json.loads((backup / CONTENT_FILE).read_text()) | changed
    kept = {name: value for name, value in content.items() if value is not None}
    (backup / CONTENT_FILE).write_text(json.dumps(kept))


def insert_officer(backup: Path) -> None:
    """Adds a security officer to the rows, and computes the digest anew."""
    path, key = backup / Content.load(backup).database, Ed25519PrivateKey.generate().public_key()
    row = (key_id(key).hex(), "mallory", key.public_bytes_raw(), '["security-officer", "viewer"]', str(NOW)[:19])
    inserts = "insert into administrators (key_id, name, signing_key, roles, issued) values (?, ?, ?, ?, ?)"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(inserts, row)
    rewrite(backup, digest=file_digest(path))


def sign_by_own_federation(backup: Path) -> None:
    """The intruder's own CA vouches for the intruder's key."""
    own = made_home(backup.parent / "own", now=NOW)
    rewrite(backup, ca=pem(own.ca).decode(), server=pem(own.server).decode())
    Content.load(backup).save(backup, own.signing_key)


def duplicate_key(backup: Path) -> None:
    """The same name twice in the inventory: the last one counts for a parser."""
    raw = (backup / CONTENT_FILE).read_text()
    (backup / CONTENT_FILE).write_text(raw.replace('"runs": 0', '"runs": 9, "runs": 0'))


def older_signature(backup: Path) -> None:
    older = Content.load(backup.parent / "older")
    shutil.copy(backup.parent / "older" / older.signature, backup / Content.load(backup).signature)


def other_key(backup: Path) -> None:
    insert_officer(backup)
    Content.load(backup).save(backup, Ed25519PrivateKey.generate())


def damaged_signature(backup: Path) -> None:
    path = backup / Content.load(backup).signature
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def renamed(backup: Path) -> None:
    """Database and signature with other names, as the inventory says."""
    content = Content.load(backup)
    other = "database-20300101T000000Z.db"
    (backup / content.database).rename(backup / other)
    (backup / content.signature).rename(backup / "database-20300101T000000Z.envelope")
    rewrite(backup, database=other)


FIELDS: dict[str, Any] = {
    "format": 2,
    "federation_id": "other",
    "made": "2030-01-01T00:00:00Z",
    "database": "database-20300101T000000Z.db",
    "digest": "blake3:" + "0" * 64,
    "log_entries": 7,
    "runs": 7,
    "blobs": 7,
    "bytes": 7,
    "keep_rounds": 7,
    "missing": ["blake3:" + "0" * 64],
    "restored": "AAAA",
    "ca": "",
    "server": "",
    "further": 1,
}
EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an officer": (insert_officer, CHANGED),
    "an officer, signed by another key": (other_key, NOBODY),
    "signed by another federation": (sign_by_own_federation, "whose CA has the fingerprint"),
    "a name twice": (duplicate_key, CHANGED),
    "the signature of an older backup": (older_signature, CHANGED),
    "no signature": (lambda backup: (backup / Content.load(backup).signature).unlink(), "is not signed: database-"),
    "a damaged signature": (damaged_signature, NOBODY),
    "other names": (renamed, CHANGED),
    **{f"{field} changed": (partial(rewrite, **{field: value}), "backup.json") for field, value in FIELDS.items()},
    **{
        f"{field} removed": (partial(rewrite, **{field: None}), "backup.json") for field in FIELDS if field != "further"
    },
}
EDITS["database changed"] = (EDITS["database changed"][0], "is not signed: database-2030")


@pytest.mark.parametrize("name", few_of(list(EDITS), "an officer", "no signature", "digest changed"))
def test_an_edited_backup_is_refused_and_changes_nothing(place: Path, name: str) -> None:
    edit, words = EDITS[name]
    home, backup = place / "home", place / "backup"
    edit(backup)
    check_unchanged(words, backup, home)
    run("restore", backup, "--check", "--ca", fingerprint(CoordinatorHome.load(home).ca), code=1)


def test_the_fields_of_the_inventory_are_all_edited() -> None:
    assert set(FIELDS) == {*Content.model_fields, "further"}


def test_the_ca_that_the_backup_names_is_shown_and_is_compared_with_the_one_that_is_given(place: Path) -> None:
    backup, own = place / "backup", fingerprint(CoordinatorHome.load(place / "home").ca)
    assert f"CA {own}, which the backup itself names; compare it" in run("restore", backup, "--check")
    assert "as you named it" in run("restore", backup, "--check", "--ca", own.upper())
    sign_by_own_federation(backup)
    run("restore", backup, "--check")  # the intruder's own backup is whole
    fails("somebody else has made it", "restore", backup, "--check", "--ca", own)


def test_a_backup_from_before_a_rotation_restores_and_an_older_key_signs_no_later_one(place: Path) -> None:
    home, keys = place / "home", place / "keys"
    keys.mkdir()
    for name in ("signing.key", "server.pem"):
        shutil.copy(home / name, keys)
    former = CoordinatorHome.load(home).signing_key
    answer("rotate-key", "--home", home)
    answer("backup", place / "newer", "--home", home)
    lose_disk(CoordinatorHome.load(home))
    answer("restore", place / "backup", "--home", home)
    answer("restore", place / "newer", "--home", home, "--replace")

    Content.load(place / "newer").save(place / "newer", former)  # a stolen key that was replaced
    restore_fails("was replaced at", place / "newer", home)

    answer("backup", place / "newest", "--home", home)
    (home / "signing.rotations").unlink()  # an older copy of the keys
    for name in ("signing.key", "server.pem"):
        shutil.copy(keys / name, home)
    restore_fails("If the signing key was replaced after the copy of the keys", place / "newest", home)


def test_rows_that_were_edited_before_the_backup_was_made_are_refused(place: Path) -> None:
    home = CoordinatorHome.load(place / "home")
    with closing(home.open_database()) as database, database.begin() as session:
        roles = '["operator", "security-officer", "viewer"]'
        session.execute(text("update administrators set name = 'eve', roles = :roles"), {"roles": roles})
    answer("backup", place / "later", "--home", home.directory)
    words = "administrator eve: no entry of the log tells of its signing key"
    said = restore_fails(words, place / "later", home.directory)
    assert "was changed before the backup was made" in said
    answer("restore", place / "backup", "--home", home.directory, "--replace")


def test_a_file_that_nothing_names_is_not_restored(place: Path) -> None:
    home, backup = CoordinatorHome.load(place / "home"), place / "backup"
    (backup / "database-20300101T000000Z.db").write_bytes(b"x")
    blob = backup / "blobs" / "blake3" / "00" / ("0" * 64)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"x")
    answer("restore", backup, "--home", home.directory, "--replace")
    assert not [path for path in home.blobs_dir.rglob("*") if path.is_file() and path.name == blob.name]
