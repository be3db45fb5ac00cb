"""The SQLite files of a worker's home: durable when a statement returns, and named when they cannot be used."""

import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.monitoring.events import Events
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope
from federation.work.site import SessionEntry
from tests.command_lines import failure
from tests.paths import ROOT
from tests.worker.scene import files_of_at_most, run_request
from worker import rotation
from worker.home import MEMBER_FILE, DiskFull, FileLocked, WorkerHome, WorkerHomeError, with_remedy
from worker.ledgers import ledger_file
from worker.ledgers.ledger_file import LedgerFile, Migrations
from worker.ledgers.left_ledger import LeftLedger
from worker.ledgers.privacy_ledger import Ledger, PrivacyEntry
from worker.ledgers.round_ledger import RoundLedger
from worker.site.assignment_checks import Declined
from worker.site.consents import Consents
from worker.site.policy_file import Policy
from worker.site.run_requests import RunsFile
from worker.work.memory import WorkerMemory

NOW = datetime(2026, 5, 4, 12, tzinfo=UTC)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
SPENT = PrivacyEntry("2026", "digits", "digits", "run-1", 0, "a", 1.0, 1.0, 0.1, 5)


def remember(file: WorkerMemory) -> None:
    file.end_after(AssignmentManifest(run_id="run-1"), "secret", timedelta(days=1))


# Each file of a home: what opens it, a change of it, and what the owner is told of a damaged one.
FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Any], None], str]] = {
    "memory.db": (lambda path: WorkerMemory(path, KEY), remember, "only between rounds"),
    "left.db": (LeftLedger, lambda file: file.keep(SignedEnvelope(), SignedEnvelope(), NOW), "move it away; what left"),
    "runs.db": (RunsFile, lambda file: file.add(run_request()), "runs then ask again"),
    "privacy.db": (Ledger, lambda file: file.add(SPENT), "put back a copy of the file"),
    "private-rounds.db": (
        RoundLedger,
        lambda file: file.add(SessionEntry("s", "run-1", "digits", "base", "train")),
        "put back a copy of it",
    ),
}
EACH = pytest.mark.parametrize("name", FILES)
Open = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_SECONDS", 0.0)


@contextmanager
def patch_connect(change: Callable[[sqlite3.Connection], None]) -> Iterator[None]:
    """Changes each connection that is made inside."""
    connect = sqlite3.connect

    def changed(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        change(connection)
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", changed)
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process has locked the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as another:
        another.execute("BEGIN EXCLUSIVE")
        yield


def rows(path: Path) -> int:
    """The number of rows in all tables of a file, as another process reads them."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return sum(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    files = []

    def open_file(name: str) -> Any:
        files.append(FILES[name][0](tmp_path / name))
        return files[-1]

    yield open_file
    for file in files:
        file.close()


def test_these_are_the_sqlite_files_of_a_home(tmp_path: Path) -> None:
    home = WorkerHome(tmp_path)
    assert {home.memory.name, home.left.name, home.runs.name, home.privacy.name, home.rounds.name} == set(FILES)


def test_nothing_else_in_the_worker_opens_sqlite() -> None:
    users = {path.name for path in (ROOT / "worker").rglob("*.py") if re.search(r"\bsqlite3?\b", path.read_text())}
    assert users == {"ledger_file.py"}


@EACH
def test_what_was_written_is_there_after_a_kill_right_after_the_answer(tmp_path: Path, name: str) -> None:
    def write_and_die() -> None:
        FILES[name][1](FILES[name][0](tmp_path / name))
        os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=write_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert rows(tmp_path / name) == 1


@EACH
def test_a_change_is_synced_before_its_statement_returns_and_so_is_the_directory_of_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Open, name: str
) -> None:
    synced = list[Path]()
    monkeypatch.setattr(ledger_file, "sync_directory", synced.append)
    with opened(name)._file.using() as connection:
        settings = [
            connection.execute(f"PRAGMA {setting}").fetchone()[0]
            for setting in ("synchronous", "journal_mode", "secure_delete")
        ]
    assert settings == [3, "truncate", 1], "3 is EXTRA"
    assert synced == [tmp_path]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@EACH
def test_a_locked_file_is_reported_as_locked_and_not_as_damaged_when_it_is_opened_and_later(
    tmp_path: Path, opened: Open, name: str
) -> None:
    file, (_, write, _) = opened(name), FILES[name]
    words = rf"{re.escape(str(tmp_path / name))} is locked by another process, probably .* wait until .* `fuser "
    with locked(tmp_path / name):
        for attempt in (lambda: opened(name), lambda: write(file)):
            with pytest.raises(FileLocked, match=words) as error:
                attempt()
            assert "damaged" not in str(error.value)
            assert "make room" not in with_remedy(error.value)
    write(file)
    assert rows(tmp_path / name) == 1


@EACH
def test_a_file_that_the_disk_does_not_take_is_reported_with_its_name(tmp_path: Path, opened: Open, name: str) -> None:
    file, (_, write, _) = opened(name), FILES[name]
    with files_of_at_most(100), pytest.raises(DiskFull, match=rf"{name} cannot be written: disk I/O error") as error:
        write(file)
    assert "make room on this worker's disk" in with_remedy(error.value)
    write(file)
    assert rows(tmp_path / name) == 1


@EACH
def test_a_damaged_file_is_named_with_what_to_do_and_left_alone(tmp_path: Path, opened: Open, name: str) -> None:
    content = b"no database" * 1000
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkerHomeError, match=rf"{name} is damaged .*{FILES[name][2]}"):
        opened(name)
    assert (tmp_path / name).read_bytes() == content


@EACH
@pytest.mark.parametrize(
    ("change", "maker"),
    [
        ("ALTER TABLE {table} RENAME COLUMN run TO runs", "an unreleased version"),
        ("PRAGMA user_version = 0", "an unreleased version"),
        ("PRAGMA user_version = -1", "an unreleased version"),
        ("PRAGMA user_version = 99", "a newer version"),
    ],
)
def test_a_file_of_a_newer_or_an_unreleased_version_is_refused_with_the_remedy_and_left_alone(
    tmp_path: Path, opened: Open, name: str, change: str, maker: str
) -> None:
    FILES[name][1](opened(name))
    with closing(sqlite3.connect(tmp_path / name)) as connection:
        tables = [table for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        connection.execute(change.format(table=tables[0]))
    content = (tmp_path / name).read_bytes()
    refused = rf"{name} has tables that fedpareto-worker/\d.* does not know: {maker} .* Use that .*{FILES[name][2]}"
    with pytest.raises(WorkerHomeError, match=refused):
        opened(name)
    assert (tmp_path / name).read_bytes() == content


OLD: Migrations = (("CREATE TABLE spent (x INTEGER)",),)
NEW: Migrations = (*OLD, ("ALTER TABLE spent ADD COLUMN y INTEGER NOT NULL DEFAULT 7", "CREATE TABLE more (z TEXT)"))


def ledger(path: Path, migrations: Migrations) -> LedgerFile:
    return LedgerFile(path, migrations, "put it back")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of the older version, with one row."""
    path = tmp_path / "some.db"
    with closing(ledger(path, OLD)) as file, file.using() as connection:
        connection.execute("INSERT INTO spent VALUES (1)")
    return path


def test_a_file_of_an_older_version_is_migrated_with_its_rows_and_the_older_version_then_refuses_it(old: Path) -> None:
    for _ in range(2):
        with closing(ledger(old, NEW)) as file, file.using() as connection:
            assert connection.execute("SELECT x, y FROM spent").fetchall() == [(1, 7)]
            assert connection.execute("SELECT * FROM more").fetchall() == []
    with pytest.raises(WorkerHomeError, match=r"some\.db has tables that .* does not know: a newer version"):
        ledger(old, OLD)


@pytest.mark.parametrize("failing", ["ALTER TABLE missing ADD COLUMN x", "a process that dies"])
def test_a_migration_that_does_not_end_has_changed_nothing(old: Path, failing: str) -> None:
    def migrate_and_die() -> None:
        migrations = (*NEW[:-1], (*NEW[-1], "SELECT die()"))
        with patch_connect(
            lambda connection: connection.create_function("die", 0, lambda: os.kill(os.getpid(), signal.SIGKILL))
        ):
            ledger(old, migrations)

    if failing.startswith("ALTER"):
        with pytest.raises(WorkerHomeError, match="no such table: missing"):
            ledger(old, (*NEW[:-1], (*NEW[-1], failing)))
    else:
        process = get_context("fork").Process(target=migrate_and_die)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    with closing(ledger(old, OLD)) as file, file.using() as connection:
        assert connection.execute("SELECT * FROM spent").fetchall() == [(1,)]


def test_a_file_is_not_migrated_under_a_worker_that_runs_with_the_older_version(tmp_path: Path, old: Path) -> None:
    ready, end = get_context("fork").Event(), get_context("fork").Event()

    def run() -> None:
        with WorkerHome(tmp_path).lock():
            ready.set()
            end.wait()

    worker = get_context("fork").Process(target=run)
    worker.start()
    ready.wait()
    content = old.read_bytes()
    with pytest.raises(FileLocked, match=r"in use by a worker of an older version .* stop that worker"):
        ledger(old, NEW)
    assert old.read_bytes() == content
    end.set()
    worker.join()
    with WorkerHome(tmp_path).lock():
        ledger(old, NEW).close()


FOR_OWNERS = [("privacy", "privacy.db"), ("left", "left.db"), ("runs", "runs.db"), ("failures", "private-rounds.db")]


@pytest.mark.parametrize(("command", "name"), FOR_OWNERS)
def test_a_command_of_the_owner_says_that_a_file_is_locked(
    tmp_path: Path, opened: Open, command: str, name: str
) -> None:
    (tmp_path / MEMBER_FILE).touch()
    opened(name)
    with locked(tmp_path / name):
        result = failure("worker", command, "--home", str(tmp_path))
    assert str(result).startswith(f"{tmp_path / name} is locked by another process, probably")


def test_an_assignment_is_declined_while_the_runs_that_asked_are_locked(tmp_path: Path) -> None:
    nobody: Any = None
    with closing(Consents(tmp_path / "runs.db", Policy(), {}, nobody, Events(), nobody)) as consents:
        with locked(tmp_path / "runs.db"), pytest.raises(Declined, match=r"runs\.db is locked by another") as caught:
            consents.accepted(AssignmentManifest(run_id="run-1", spec="s"))
        assert caught.value.reason == "disk"
        assert consents.accepted(AssignmentManifest(run_id="run-1", spec="s")) == []


def test_the_signing_key_is_not_replaced_while_the_memory_is_locked(tmp_path: Path, opened: Open) -> None:
    opened("memory.db")
    path, refused = tmp_path / "memory.db", pytest.raises(FileLocked, match="is locked")
    with locked(path), refused, rotation._writing(WorkerHome(tmp_path)):
        WorkerMemory.erase_kept(path)


def test_a_file_that_was_closed_is_a_mistake_of_the_program(tmp_path: Path) -> None:
    file = ledger(tmp_path / "some.db", OLD)
    file.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"), file.using() as connection:
        connection.execute("SELECT 1")
