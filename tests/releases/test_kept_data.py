"""The data of 0.1.0 that are kept, taken along by this tree and by a made-up next version; no clock is needed."""

import hashlib
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedpareto.processes import forked
from storage.database import Database, DatabaseIncompatible
from tests.paths import PROGRAMS
from tests.releases.next_version import NEXT, REVISION, migrations_since
from tests.releases.scene import LEDGERS, rows
from tests.releases.versions import RELEASE, Version
from worker.home import MEMBER_FILE, WorkerHomeError
from worker.ledgers.privacy_ledger import Ledger

BUNDLES = ("open", "private")


class Taken:
    """Copies of the kept data, and what the commands of a version have said of them."""

    def __init__(self, data: Path, place: Path, version: Version) -> None:
        self.version, self.home, self.worker, self.restored = version, place / "home", place / "worker", place / "new"
        shutil.copytree(data / "coordinator", self.home)
        shutil.copytree(data / "ledgers", self.worker)
        (self.worker / MEMBER_FILE).touch()  # commands look for it, and do not read it
        shutil.copytree(data / "coordinator", self.restored)
        (self.restored / "coordinator.db").unlink()
        self.before = rows(self.home / "coordinator.db")
        self.spent = {name: rows(self.worker / name) for name in LEDGERS}
        home, worker, backup = ["--home", str(self.home)], ["--home", str(self.worker)], str(data / "backup")
        commands = {
            "older": ["coordinator", "check", *home, "--json"],
            "migrated": ["migrate", str(self.home)],
            "check": ["coordinator", "check", *home, "--json"],
            "opened": ["open", str(self.worker)],
            "privacy": ["worker", "privacy", *worker, "--json"],
            "runs": ["worker", "runs", *worker, "--json"],
            **{name: ["verify", str(data / f"{name}.fedpareto"), "--json"] for name in BUNDLES},
            "backup": ["coordinator", "restore", backup, "--check", "--json"],
            "restore": ["coordinator", "restore", backup, "--home", str(self.restored), "--json"],
        }
        words = json.dumps([*commands.values()])
        program = str(PROGRAMS / "commands.py")
        if version.name == NEXT:
            told = version.python(program, cwd=place, text=words)
        else:
            told = forked.completed([program], cwd=place, text=words).stdout
        self.told = dict(zip(commands, json.loads(told.splitlines()[-1]), strict=True))

    def document(self, name: str, code: int | None = 0) -> Any:
        """The JSON document of a command; its exit code must be `code`, unless that is None."""
        found, text, errors = self.told[name]
        assert code in (None, found), text + errors
        return json.loads(text)


@pytest.fixture(scope="module")
def taken(data: Path, later: Version, tmp_path_factory: pytest.TempPathFactory) -> Taken:
    return Taken(data, tmp_path_factory.mktemp("taken"), later)


def test_the_kept_files_of_the_release_are_as_they_were_published() -> None:
    listed = (RELEASE / "SHA256SUMS").read_text().splitlines()
    kept = [path for path in sorted(RELEASE.iterdir()) if path.name != "SHA256SUMS"]
    assert listed == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in kept]


def test_check_says_what_will_be_migrated(taken: Taken) -> None:
    found = [one["message"] for one in taken.document("older", None) if one["subject"] == "database"]
    pending = migrations_since(taken.version)
    assert len(found) == 1 + bool(pending)
    if pending:
        assert f"the next start migrates it ({', '.join(pending)})" in found[1]


def test_the_migrated_database_has_all_rows(taken: Taken) -> None:
    assert taken.told["migrated"][0] == 0, taken.told["migrated"]
    after = rows(taken.home / "coordinator.db")
    assert len(taken.before["rounds"]) > 4
    for name in taken.before.keys() - {"alembic_version"}:
        assert [row[: len(old)] for row, old in zip(after[name], taken.before[name], strict=True)] == [
            *taken.before[name]
        ], name
    checked = taken.document("check", None)
    assert [one["outcome"] for one in checked if one["subject"] in ("database", "audit log", "rights")] == ["ok"] * 3


def test_what_a_worker_has_spent_is_still_spent(taken: Taken) -> None:
    assert taken.told["opened"][0] == 0, taken.told["opened"]
    for name, before in taken.spent.items():
        after = rows(taken.worker / name)
        for table, old in before.items():  # a migration may add columns
            assert [row[: len(kept)] for row, kept in zip(after[table], old, strict=True)] == old, name
    assert taken.spent["privacy.db"]["spent"]
    assert taken.spent["private-rounds.db"]["sessions"]
    assert taken.spent["memory.db"]["answered"]
    assert {run["name"] for run in taken.document("runs")} == {"open", "private", "noisy"}
    (spent,) = taken.document("privacy")
    assert (spent["data_set"], spent["epsilon"] > 0.5) == ("digits", True)


@pytest.mark.parametrize("name", BUNDLES)
def test_the_record_of_a_run_is_verified(taken: Taken, name: str) -> None:
    found = taken.document(name)
    assert [(one["round"], one["missing"]) for one in found["rounds"]] == [(0, []), (1, [])]


def test_the_backup_is_restored(taken: Taken) -> None:
    assert taken.document("backup")["runs"] == 3
    assert taken.document("restore")["blobs"] == taken.document("backup")["blobs"] > 10
    runs = {name: len(table) for name, table in rows(taken.restored / "coordinator.db").items() if name != "audit_log"}
    assert runs["runs"] == 3
    assert runs["clients"] == 5


def test_this_version_refuses_what_a_later_one_has_migrated_and_leaves_it_as_it_is(taken: Taken) -> None:
    if taken.version.name != NEXT:
        pytest.skip("this version made it")
    with closing(Database.open(f"sqlite:///{taken.home / 'coordinator.db'}")) as database:
        for check in (database.check_known, database.migrate):
            with pytest.raises(DatabaseIncompatible, match=rf"revision {REVISION}, .*: a newer version made it"):
                check()
    content = (taken.worker / "privacy.db").read_bytes()
    with pytest.raises(WorkerHomeError, match=r"privacy\.db has tables that .* does not know: a newer version"):
        Ledger(taken.worker / "privacy.db")
    assert (taken.worker / "privacy.db").read_bytes() == content
