"""What the tests of backups share: the commands, a disk that is lost, and a home on another database."""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coordinator.home import CoordinatorHome
from storage.blob_directory import DirectoryStore
from tests.running import command, made_home


def run(*arguments: object, code: int = 0) -> str:
    """What a command of `fedpareto coordinator` says, which must end with this code."""
    done = command("coordinator", *arguments, code=code, columns=200)
    return done.stdout + str(done.exception or "")


def fails(words: str, *arguments: object) -> str:
    """A command fails with these words."""
    said = run(*arguments, code=1)
    assert words in said, said
    return said


def restore_fails(words: str, backup: Path, home: Path) -> str:
    return fails(words, "restore", backup, "--home", home, "--replace")


def check_unchanged(words: str, backup: Path, home: Path) -> None:
    """A backup is refused with these words, and the home stays as it was."""
    before = (home / "coordinator.db").read_bytes()
    said = run("restore", backup, "--home", home, "--replace", code=1)
    assert re.search(words, said), said
    assert (home / "coordinator.db").read_bytes() == before
    assert not list(home.glob("restor*"))


def answer(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


def lose_disk(home: CoordinatorHome) -> None:
    """What is left of the directory is what the operator keeps elsewhere: keys and settings."""
    for path in home.directory.glob("coordinator.db*"):
        path.unlink()
    shutil.rmtree(home.blobs_dir)
    for name in ("log-checkpoint.envelope", "ports.json", "restored.envelope"):
        (home.directory / name).unlink(missing_ok=True)


def kept_blobs(directory: Path) -> set[str]:
    return {blob.digest for blob in DirectoryStore(directory).scan()}


NOWHERE = "postgresql://nobody@localhost:1/none"  # copy-keys does not ask the database


def source(directory: Path, **settings: object) -> Path:
    """The directory of a coordinator, as far as copy-keys reads it; `settings` replace those of `coordinator init`."""
    made_home(directory, now=datetime.now(UTC), federation_id="fed", federation_port=7443, enrollment_port=7444)
    change(directory, **settings)
    return directory


def change(directory: Path, **settings: object) -> None:
    path = directory / "coordinator.toml"
    values = CoordinatorHome.load(directory).settings.model_copy(update=settings)
    path.write_text(values.render())
