"""The content of a directory with a backup.

backup.json          its inventory, a `Content`; replaced last, so that an older backup is valid until then
database-TIME.db     the rows, as a SQLite database, whichever kind the coordinator's is
blobs/               the blobs that the rows refer to, as `storage.blob_directory` keeps them
restored.envelope    the newest statement that a backup was restored, if there is one
lock                 held while a backup is made or restored
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

CONTENT_FILE = "backup.json"
LOCK_FILE = "lock"
BLOBS = "blobs"


class BackupError(Exception):
    """A backup cannot be made or restored; the message says why and what to do."""


class Content(BaseModel):
    """The inventory of a backup."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    federation_id: str
    ca_fingerprint: str  # SHA-256 of the CA certificate, hexadecimal
    made: datetime
    database: str = Field(pattern=r"^database-[0-9TZ]+\.db$")  # the name of the file
    digest: str  # of that file
    log_entries: int  # entries of the audit log that have a place in it
    runs: int
    blobs: int
    bytes: int  # of the blobs
    keep_rounds: int  # the coordinator's setting: of the other rounds, blobs may be missing
    missing: tuple[str, ...]  # digests of blobs that were removed meanwhile, or that the coordinator could not read

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads the content of a backup.

        Raises:
            BackupError: the directory holds no backup, or its inventory is damaged.
        """
        path = directory / CONTENT_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise BackupError(f"{directory} holds no backup: there is no {CONTENT_FILE}") from None
        except ValidationError as error:
            problem = error.errors()[0]
            raise BackupError(f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a backup: no other process makes, prunes or restores it meanwhile.

    Raises:
        BackupError: another process does so now.
    """
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BackupError(f"another process uses the backup in {directory}: wait until it has ended") from None
    finally:
        os.close(descriptor)
