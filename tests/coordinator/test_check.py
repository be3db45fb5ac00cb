"""`fedpareto coordinator check`: every part of a coordinator is looked at, and what is wrong is named."""

import json
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from coordinator.audit.sequencer import Sequencer
from coordinator.check import check_home
from coordinator.fault_state import FaultState
from coordinator.home import CoordinatorHome
from federation.findings import CheckOutcome
from fedpareto.cli.failure import CommandFailure
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.models import Run, note_model
from storage.states import RunState
from tests.command_lines import failure
from tests.running import command, made_home, running
from tests.storage.scene import blob_file, stored

SUBJECTS = ["settings", "keys", "certificates", "ports", "database", "clock", "audit log", "rights"]
SUBJECTS += ["officers", "blobs", "disk"]
MODEL = b"not a model, but a blob"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coordinator's directory with one run on record."""
    now, directory = datetime.now(UTC), tmp_path_factory.mktemp("made") / "home"
    home = made_home(directory, now=now)
    digest, database = DirectoryStore(home.blobs_dir).put(MODEL), home.open_database()
    spec = b'name = "a"\ntask = "digits"\nrounds = 3\n'
    with database.begin() as session:
        note_model(session, digest, size=len(MODEL), parameters=1, created=now)
        session.add(
            Run(
                **{"run_id": "r", "name": "a", "state": RunState.PAUSED, "spec": spec, "spec_digest": digest},
                **{"initial_model": digest, "model": digest, "state_data": {}, "submitted_by": "test", "created": now},
            )
        )
    with database.begin() as session:
        for _ in range(5):
            audit.record(session, at=now, actor="test", action="test")
    Sequencer(database, home.log_key, directory, faults=FaultState(), clock=lambda: now).sequence(show=True)
    database.close()
    return directory


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "home")


def failures(home: Path, *, later: timedelta = timedelta()) -> dict[str, str]:
    """What failed, by subject."""
    found = check_home(CoordinatorHome.load(home), now=datetime.now(UTC) + later)
    return {finding.subject: finding.message for finding in found if finding.outcome is CheckOutcome.FAILED}


def test_everything_is_checked_and_nothing_is_wrong(home: Path) -> None:
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    found = json.loads(command("coordinator", "check", "--home", home, "--json").stdout)
    assert list(dict.fromkeys(item["subject"] for item in found)) == SUBJECTS
    assert {item["outcome"] for item in found} == {"ok"}
    assert all(path.read_bytes() == data for path, data in before.items())


def _take_port(home: Path) -> socket.socket:
    taken = socket.create_server(("127.0.0.1", 0))
    settings = home / "coordinator.toml"
    port = taken.getsockname()[1]
    settings.write_text(settings.read_text().replace("enrollment_port = 0", f"enrollment_port = {port}"))
    return taken


def _blob(home: Path) -> Path:
    blobs = DirectoryStore(home / "blobs")
    return blob_file(blobs, stored(blobs)[0])


def _damage(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(b"something else")


def _schema(revision: str) -> Callable[[Path], None]:
    return lambda home: _edit(home, f"update alembic_version set version_num = '{revision}'")


def _edit(home: Path, *statements: str) -> None:
    with closing(CoordinatorHome.load(home).open_database()) as database, database.begin() as session:
        for statement in statements:
            session.execute(text(statement))


CUT = "delete from audit_log where number > 3", "delete from audit_checkpoints"


@pytest.mark.parametrize(
    ("damage", "subject", "message"),
    [
        (lambda home: _edit(home, "delete from audit_log where number = 3"), "audit log", "entry 3 was removed"),
        (lambda home: _edit(home, "update audit_log set times = 9"), "audit log", "the first: entry 0 was changed"),
        (lambda home: _edit(home, *CUT), "audit log", "were removed: the newest checkpoint covers"),
        (lambda home: (home / "log-checkpoint.envelope").write_bytes(b"x"), "audit log", "no signed envelope"),
        (lambda home: (home / "ca.key").chmod(0o644), "keys", "others can read ca.key: chmod 600"),
        (lambda home: (home / "coordinator.db").unlink(), "database", "is missing"),
        (_schema("9999"), "database", "revision 9999, which fedpareto"),
        (_schema("0001"), "database", "revision 0001, which an unreleased version of fedpareto made"),
        (lambda home: _damage(_blob(home)), "blobs", "1 of 1 blobs are missing or damaged"),
        (lambda home: _blob(home).unlink(), "blobs", "1 of 1 blobs are missing or damaged"),
        (lambda home: shutil.rmtree(home / "blobs"), "blobs", "is missing: restore it from a backup"),
        (_take_port, "ports", "cannot be used: Address already in use"),
    ],
    ids=[
        *("removed", "changed", "cut", "no checkpoint", "open key", "no database", "newer schema", "unreleased schema"),
        *("damaged blob", "missing blob", "no blobs", "port"),
    ],
)
def test_what_is_wrong_is_named(home: Path, damage: Callable[[Path], object], subject: str, message: str) -> None:
    held = damage(home)
    found = failures(home)
    assert list(found) == [subject]
    assert message in found[subject]
    del held


@pytest.mark.parametrize("name", ["serve", "backup", "restored", "rotate-key"])
def test_a_database_of_an_unreleased_version_is_refused_by_each_command_whatever_its_tables_are(
    home: Path, tmp_path: Path, name: str
) -> None:
    _edit(home, "update alembic_version set version_num = '0001'", "alter table federations rename ca_fingerprint to x")
    arguments = [str(tmp_path / "backup")] if name == "backup" else []
    said = str(failure("coordinator", name, *arguments, "--home", str(home)))
    assert "is at schema revision 0001, which an unreleased version of fedpareto made" in said
    assert "or make a new federation" in said


def test_a_clock_behind_the_record_or_outside_the_certificates_is_named(home: Path) -> None:
    ahead = datetime.now(UTC) + timedelta(hours=2)
    with closing(CoordinatorHome.load(home).open_database()) as database, database.begin() as session:
        audit.record(session, at=ahead, actor="test", action="test")
    assert f"the record's newest entry is of {ahead:%Y-%m-%d %H:%M} UTC: set the clock" in failures(home)["clock"]
    assert "UTC: set the clock" in failures(home, later=-timedelta(days=1))["certificates"]
    assert "make a new federation" in failures(home, later=timedelta(days=3700))["certificates"]
    assert "clock" not in failures(home, later=timedelta(hours=3))


def test_the_command_fails_with_the_settings_that_are_wrong(home: Path) -> None:
    (home / "coordinator.toml").write_text('federation_id = "test"\nkeep_rounds = "3"\n')
    result = command("coordinator", "check", "--home", home, code=1)
    assert isinstance(result.exception, CommandFailure)
    assert "failed   directory" in result.stdout
    assert "keep_rounds: Input should be a valid integer; got '3'" in result.stdout


def test_a_coordinator_that_serves_is_checked_beside_it(tmp_path: Path) -> None:
    with running(tmp_path / "home") as served:
        found = {item.subject: item for item in check_home(served.home, now=datetime.now(UTC))}
    assert {item.outcome for item in found.values()} == {CheckOutcome.OK}
    assert "serves this directory: members at port" in found["ports"].message
