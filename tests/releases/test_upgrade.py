"""A federation that 0.1.0 has left in the middle of everything, taken along by this tree and by a made-up next version.

The processes of 0.1.0 are those of its wheel.
"""

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Postgres, postgresql_database
from tests.releases.next_version import NEXT, migrations_since
from tests.releases.scene import LEDGERS, NOISY, PRIVATE, UnderWay, rows
from tests.releases.versions import Version

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

# Runs the command, and kills it when all statements of the migration are done and not committed.
_DYING = """
import os, signal, sys
from storage import migrations
from fedpareto.cli.main import main

upgrade = migrations.upgrade

def upgrade_and_die(*words):
    upgrade(*words)
    os.kill(os.getpid(), signal.SIGKILL)

migrations.upgrade = upgrade_and_die
sys.argv = ["fedpareto", *sys.argv[1:]]
main()
"""


@dataclass(frozen=True)
class Left:
    """What 0.1.0 has left: a copy of all directories, and the digest that it gives from another copy."""

    scene: UnderWay
    aside: Path
    model: str
    version: Version

    def again(self, version: Version, database: str = "") -> UnderWay:
        """All directories as they were left, with processes of a version; with another database, from the backup."""
        scene = self.scene
        scene.close()
        scene.processes.clear()
        shutil.rmtree(scene.directory)
        shutil.copytree(self.aside, scene.directory)
        if database:
            scene.version = self.version
            scene.name_database(database)
            scene.fedpareto("coordinator", "restore", str(scene.directory / "backup"), "--home", str(scene.home))
        scene.version = version
        return scene


@pytest.fixture(scope="module")
def left(old: Version, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    place = tmp_path_factory.mktemp("left")
    (place / "federation").mkdir()
    with UnderWay(place / "federation", old, data / "crashing.py") as scene:
        scene.leave()
        shutil.copytree(scene.directory, place / "aside")
        scene.begin()
        model = scene.resumed()
        scene.end()
        yield Left(scene, place / "aside", model, old)


@dataclass(frozen=True)
class Upgraded:
    """What a later version has made of it, step by step."""

    scene: UnderWay
    left: Left
    checked: list[dict[str, Any]]
    spent: dict[str, Any]
    model: str
    another: str  # the URL of an empty database; empty with SQLite


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def upgraded(left: Left, later: Version, request: pytest.FixtureRequest) -> Iterator[Upgraded]:
    """The paused run has ended with the later version."""
    if request.param == "sqlite":
        yield taken_along(left, later)
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    with postgresql_database(postgres) as url, postgresql_database(postgres) as another:
        yield taken_along(left, later, url, another)
        left.scene.close()


def taken_along(left: Left, later: Version, database: str = "", another: str = "") -> Upgraded:
    scene = left.again(later, database)
    spent = {name: rows(scene.directory / "ann" / name) for name in LEDGERS}
    checked = findings(scene)
    dying = scene.spawn("dying", ["-c", _DYING, "coordinator", "serve", "--home", str(scene.home)])
    if migrations_since(later):
        scene.wait(lambda: dying.popen.poll() is not None, "the death in the migration")
        assert dying.popen.poll() == -signal.SIGKILL, dying.text
        assert findings(scene) == checked
    scene.kill(dying)
    scene.begin()
    return Upgraded(scene, left, checked, spent, scene.resumed(), another)


def findings(scene: UnderWay) -> list[dict[str, Any]]:
    """What `coordinator check` says of the database."""
    told = scene.fedpareto("coordinator", "check", "--home", str(scene.home), "--json", code=None)
    return [one for one in json.loads(told) if one["subject"] == "database"]


def test_check_says_what_will_be_migrated(upgraded: Upgraded) -> None:
    said = " ".join(one["message"] for one in upgraded.checked)
    pending = migrations_since(upgraded.scene.version)
    assert (f"the next start migrates it ({', '.join(pending)})" in said) is bool(pending)


def test_a_run_that_was_paused_within_a_round_ends_with_the_model_of_the_release(upgraded: Upgraded) -> None:
    assert upgraded.model == upgraded.left.model
    record = upgraded.scene.admin("round", upgraded.scene.run_id, "0")
    assert [(one["asked"], one["replied"]) for one in record["phases"]] == [(5, 5)] * len(record["phases"])


def test_a_pending_member_is_approved_by_the_second_officer(upgraded: Upgraded) -> None:
    scene = upgraded.scene
    bea = ["--home", str(scene.directory / "bea")]
    scene.fedpareto("admin", "login", *bea)
    scene.fedpareto("admin", "consent", "--all", "--yes", *bea)
    states = {one["client_id"]: one["state"] for one in scene.admin("clients")["clients"]}
    assert states["fay"] == "ACTIVE"


def test_an_unused_join_string_admits_its_member(upgraded: Upgraded) -> None:
    scene = upgraded.scene
    scene.fedpareto("worker", "join", *scene.at("gil"), standard_input=scene.gils)
    states = {one["client_id"]: one["state"] for one in scene.admin("clients")["clients"]}
    assert states["gil"] == "PENDING"


def test_what_was_spent_is_spent_and_the_ledgers_go_on(upgraded: Upgraded) -> None:
    scene = upgraded.scene
    for name, more in {"private-after": PRIVATE, "noisy-after": NOISY}.items():
        scene.ended(scene.send(name, more))
    for name in LEDGERS:
        after = rows(scene.directory / "ann" / name)
        for table, before in upgraded.spent[name].items():
            if table not in ("kept", "ends"):  # values of rounds that are over are erased
                width = len(before[0]) if before else 0  # a later version adds columns behind those of the release
                after[table] = [row[:width] for row in after[table]]
                assert after[table][: len(before)] == before or {*before} <= {*after[table]}, (name, table)
    for name, table in (("private-rounds.db", "sessions"), ("privacy.db", "spent")):
        assert len(rows(scene.directory / "ann" / name)[table]) > len(upgraded.spent[name][table]) > 0


@pytest.mark.parametrize("run", ["open", "private", "noisy", "paused"])
def test_the_record_of_a_run_of_the_release_is_verified_by_anybody_and_by_a_member(
    upgraded: Upgraded, run: str
) -> None:
    scene = upgraded.scene
    bundle = str(scene.bundle(run))
    scene.fedpareto("verify", bundle)
    scene.fedpareto("worker", "verify", bundle, *scene.at("ann"))


def test_the_audit_log_is_verified(upgraded: Upgraded) -> None:
    upgraded.scene.admin("audit", "verify")


def test_the_release_refuses_what_was_migrated_and_its_backup_brings_it_back(upgraded: Upgraded) -> None:
    scene, left = upgraded.scene, upgraded.left
    scene.end()
    migrated, later = migrations_since(scene.version), scene.version.name
    scene.version = left.version
    if migrated:
        said = " ".join(one["message"] for one in findings(scene))
        unknown = f"revision {migrated[-1]}, which fedpareto {left.version.name} does not know"
        assert f"{unknown}: a newer version made it" in said
    if later == NEXT:
        scene.fedpareto("worker", "privacy", *scene.at("ann"), code=None)
        assert "privacy.db has tables that" in scene.errors
        assert "a newer version of fedpareto made it" in scene.errors
    back = ["coordinator", "restore", str(scene.directory / "backup"), "--home", str(scene.home), "--replace"]
    if migrated and upgraded.another:
        scene.fedpareto(*back, code=None)
        assert "a newer version made it" in scene.errors
        scene.name_database(upgraded.another)
    scene.fedpareto(*back)
    scene.begin()
    assert scene.state(scene.run_id) == "PAUSED"
    scene.end()
