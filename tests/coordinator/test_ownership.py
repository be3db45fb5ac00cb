"""A home and its database belong together; one without the other is not served, and nothing is made anew."""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from coordinator.home import CoordinatorHome
from coordinator.ownership import CoordinatorHomeError
from coordinator.server import serving
from fedpareto.processes.forked import completed
from storage.database import Database, DatabaseBusy, DatabaseMissing
from tests.running import made_home

NOW = datetime.now(UTC)


def make(directory: Path, **settings: Any) -> CoordinatorHome:
    return made_home(directory, now=NOW, federation_id="fed", **settings)


async def start(home: CoordinatorHome) -> None:
    async with serving(home):
        pass


def database_of(home: CoordinatorHome) -> Path:
    return home.directory / "coordinator.db"


def remove(home: CoordinatorHome) -> None:
    database_of(home).unlink()


def empty(home: CoordinatorHome) -> None:
    database_of(home).write_bytes(b"")


def replace_with_another(home: CoordinatorHome) -> None:
    other = make(home.directory.parent / "other")
    shutil.copy(database_of(other), database_of(home))


def rename(home: CoordinatorHome) -> None:
    settings = home.directory / "coordinator.toml"
    settings.write_text(settings.read_text().replace('"fed"', '"renamed"'))


FAULTS: dict[Callable[[CoordinatorHome], None], str] = {
    remove: r"coordinator\.db is missing.*Restore the database from a backup.*coordinator init.*in another directory",
    empty: r"coordinator\.db is empty: it holds no federation.*Restore the database from a backup",
    replace_with_another: r"is of the federation fed, whose CA.*ca\.pem is another one.*Restore the database",
    rename: r"says federation_id = 'renamed'.*of the federation 'fed'.*set federation_id = 'fed' again",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_home_whose_database_is_not_its_own_is_not_served_and_nothing_changes(
    tmp_path: Path, fault: Callable[[CoordinatorHome], None]
) -> None:
    home = make(tmp_path / "home")
    fault(home)
    before = kept(home)
    with pytest.raises(CoordinatorHomeError, match=FAULTS[fault]):
        asyncio.run(start(CoordinatorHome.load(home.directory)))
    assert kept(home) == before


def kept(home: CoordinatorHome) -> dict[Path, bytes | None]:
    """Every file with its bytes; of the database, which SQLite may give a header, whether it is there."""
    return {
        path: None if path == database_of(home) else path.read_bytes()
        for path in home.directory.rglob("*")
        if path.is_file() and path.suffix not in (".db-wal", ".db-shm")
    }


def test_a_database_server_without_the_federation_is_not_served(tmp_path: Path, database_url: str) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has a file, not a server; another test removes the file")
    home = make(tmp_path / "home")
    settings = home.directory / "coordinator.toml"
    settings.write_text(settings.read_text().replace("sqlite:///coordinator.db", database_url))
    with pytest.raises(CoordinatorHomeError, match="is empty: it holds no federation"):
        asyncio.run(start(CoordinatorHome.load(home.directory)))
    database = Database.open(database_url)
    database.migrate()  # tables without a row are as empty
    database.close()
    with pytest.raises(CoordinatorHomeError, match="is empty: it holds no federation"):
        asyncio.run(start(CoordinatorHome.load(home.directory)))


def test_commands_that_start_a_coordinator_of_their_own_and_those_that_issue_say_so_too(tmp_path: Path) -> None:
    home = make(tmp_path / "home")
    remove(home)
    issue = ["coordinator", "admin", "eve", "--role", "viewer", "--out", str(tmp_path / "eve"), "--home"]
    for arguments in (["admin", "runs", "--home", str(home.admin_dir)], [*issue, str(home.directory)]):
        if arguments[0] == "coordinator":
            home.note_ports(1, 2)
        done = completed(["-m", "fedpareto", *arguments])
        words = " ".join(done.stderr.replace("│", " ").split())
        assert done.returncode == 1, done.stderr
        assert "is missing, but" in words
        assert "Restore the database from a backup" in words
        assert "Traceback" not in done.stderr
        assert not database_of(home).exists()


# --- one database by several names


def test_a_database_has_one_coordinator_by_whatever_path_it_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "real" / "test.db"
    path.parent.mkdir()
    first = Database.open(f"sqlite:///{path}")
    first.migrate()
    first.lock_exclusive()
    (tmp_path / "link.db").symlink_to(path)
    (tmp_path / "directory").symlink_to(path.parent)
    relative = os.path.relpath(path)
    linked = (tmp_path / "link.db", tmp_path / "directory" / "test.db")
    for other in (*linked, path.parent / ".." / "real" / "test.db", relative):
        with (
            closing(Database.open(f"sqlite:///{other}")) as second,
            pytest.raises(DatabaseBusy, match="in use by another coordinator"),
        ):
            second.lock_exclusive()
    first.close()


def test_a_database_file_with_two_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    Database.open(f"sqlite:///{path}").close()
    os.link(path, tmp_path / "second.db")
    for one in (path, tmp_path / "second.db"):
        with pytest.raises(ValueError, match=r"has 2 names \(hard links\): remove all of them but one"):
            Database.open(f"sqlite:///{one}")


def test_a_database_that_is_removed_while_it_is_open_is_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    database = Database.open(f"sqlite:///{path}")
    database.migrate()
    database.engine.dispose()
    path.unlink()
    with pytest.raises(OperationalError, match="unable to open database file"), database.begin() as session:
        session.execute(text("SELECT 1"))
    database.close()
    assert not path.exists()
    with pytest.raises(DatabaseMissing):
        Database.open(f"sqlite:///{path}", create=False)
