"""Restores a backup into the directory of a coordinator that does not serve, or only verifies it."""

import base64
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path

from google.protobuf.message import DecodeError
from sqlalchemy import inspect, select
from sqlalchemy.exc import DatabaseError

from coordinator.audit.log_verifier import log_problems
from coordinator.backups.inventory import BLOBS, BackupError, Content, locked
from coordinator.backups.making import Progress
from coordinator.backups.statement import kept_statement, state_restore
from coordinator.home import CoordinatorHome
from coordinator.members.logged_rights import LoggedRights
from coordinator.ownership import check_owner
from federation.digests import file_digest
from federation.durable_files import rename_durably
from federation.refusals import Refusal
from federation.trust.certificates import fingerprint
from federation.v1.common_pb2 import RestoreManifest, SignedEnvelope
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt, BlobMissing
from storage.copying import copy_blob, copy_rows
from storage.database import Database, DatabaseIncompatible
from storage.models import Federation
from storage.retention import referenced

_COPY = "restoring.db"  # in the home, the database of the backup until it is in place
_SQLITE_FILES = ("-wal", "-shm", "")  # the suffixes that SQLite adds to the name of a database


@dataclass(frozen=True)
class Restored:
    """The result of a restore: its content, the statement for the members, and the path of the former database."""

    content: Content
    statement: RestoreManifest
    aside: Path | None  # None if there was none, or with PostgreSQL


def verify_backup(directory: Path, *, ca: str, progress: Progress) -> Content:
    """Reads a whole backup, and changes nothing.

    `ca` is the fingerprint of the federation's CA, hexadecimal; if it is empty, the CA in the backup is trusted.

    Raises:
        BackupError: the directory holds no backup of the federation, its coordinator has not signed the backup, or
            something in it is missing or damaged.
        DatabaseIncompatible: a newer or an unreleased version made the backup.
    """
    Content.load(directory)
    with locked(directory):
        content = Content.open(directory)
        if ca and content.ca_fingerprint != ca.replace(":", "").lower():
            raise BackupError(
                f"the CA in {directory} has the fingerprint {content.ca_fingerprint}, not {ca}: it is the backup of "
                f"another federation, or somebody else has made it"
            )
        path = directory / content.database
        if not path.is_file() or file_digest(path) != content.digest:
            raise BackupError(f"{path} is missing or damaged: its digest is not the one in backup.json")
        store, done = DirectoryStore(directory / BLOBS), 0
        with closing(Database.open(f"sqlite:///{path.absolute()}", create=False)) as database:
            database.check_known()
            digests = _digests(database, content)
        for digest in sorted(digests):
            try:
                store.verify(digest)
            except (BlobMissing, BlobCorrupt) as error:
                raise BackupError(f"the backup in {directory} is damaged: {error}") from None
            done += store.stat(digest).size
            progress(done, content.bytes)
    return content


def restore(home: CoordinatorHome, directory: Path, *, replace: bool, now: datetime, progress: Progress) -> Restored:
    """Puts database and blobs back, and signs the statement for the members that a backup was restored.

    The database that the settings name now takes the rows, whichever kind the backup was made from. Everything is read
    and compared with its digest before the database is touched. If this breaks off, run it again.

    Args:
        home: the coordinator's directory, with its keys and settings.
        directory: holds the backup.
        replace: True to allow the replacement of a database that holds the federation's record. A SQLite file is
            renamed, and kept; the rows of a PostgreSQL database are removed.
        now: the present time.
        progress: called with the bytes copied, and the bytes to copy.

    Raises:
        BackupError: there is no backup of this federation, it is damaged, none of the coordinator's signing keys has
            signed it, its rows differ from its audit log, or the database holds a record, or has tables of another
            version.
        BlobStoreUnavailable: the bucket of the blobs does not work, or is another federation's.
        DatabaseBusy: a coordinator serves.
        HomeError: the database is of another federation.
    """
    content = Content.load(directory)  # to name another federation before it is compared with the keys
    if content.ca_fingerprint != fingerprint(home.ca):
        raise BackupError(
            f"{directory} holds a backup of the federation {content.federation_id}, whose CA has the fingerprint "
            f"{content.ca_fingerprint}; that of {home.directory} has {fingerprint(home.ca)}"
        )
    with locked(directory), closing(Database.open(home.database_url)) as target:
        content = _signed(home, directory)
        target.lock_exclusive()
        present = _present(target, home)
        if present is _Present.RECORD and not replace:
            raise BackupError(
                f"the database {target.url} holds the record of this federation: what happened after "
                f"{content.made:%Y-%m-%d %H:%M} UTC would be lost. Give --replace if that is meant"
            )
        if target.directory is None:
            _check_replaceable(target)
        with _copied(home, directory, content) as copy:
            _check_logged(home, directory, copy)
            _copy_blobs(home, directory, copy, content, progress)
            statement = state_restore(home, copy, _newest_statement(home, content), now=now)
            if target.directory is None:
                target.migrate()
                with copy.read() as source, target.begin() as session:
                    copy_rows(source, session)
        aside = None
        if target.directory is None:
            _remove(home.directory / _COPY)
        else:
            aside = _put_in_place(home, target, keep=present is not _Present.NOTHING, now=now)
    return Restored(content, statement, aside)


class _Present(Enum):
    """The content of the database before the restore."""

    NOTHING = auto()
    RECORD = auto()  # of this federation
    DAMAGED = auto()  # a file that is no database


def _present(target: Database, home: CoordinatorHome) -> _Present:
    try:
        if not inspect(target.engine).has_table(Federation.__tablename__):
            return _Present.NOTHING
        with target.read() as session:
            if session.scalar(select(Federation)) is None:
                return _Present.NOTHING
    except DatabaseError:
        if target.directory is None:  # a server that does not answer
            raise
        return _Present.DAMAGED
    check_owner(target, home.directory, home.federation_id, home.ca)
    return _Present.RECORD


def _check_replaceable(target: Database) -> None:
    """Checks that this version can replace the rows of a server's database: it knows all tables."""
    try:
        target.check_known()
    except DatabaseIncompatible as error:
        raise BackupError(
            f"{error} To go back to the backup with this version, make an empty database, name it in `database` of "
            "coordinator.toml, and restore into that one; the present one stays as it is."
        ) from None


def _signed(home: CoordinatorHome, directory: Path) -> Content:
    try:
        return Content.open(directory, home.signing.chain)
    except BackupError as error:
        raise BackupError(
            f"{error}. Nothing was changed. If the signing key was replaced after the copy of the keys in "
            f"{home.directory} was made, put the newest copy there; otherwise somebody else has made or changed the "
            "backup: take another one"
        ) from None


def _check_logged(home: CoordinatorHome, directory: Path, copy: Database) -> None:
    """Compares the log with its checkpoints, and administrators and members with the log."""
    with copy.read() as session:
        problems = [item for item in log_problems(session, home.log_key, b"") if isinstance(item, str)]
        problems += LoggedRights.read(session, home.log_key.entry_key).problems(session)
    if problems:
        raise BackupError(
            f"the database in {directory} was changed before the backup was made: {'; '.join(problems[:5])}. Nothing "
            "was changed here. Take an older backup"
        )


@contextmanager
def _copied(home: CoordinatorHome, directory: Path, content: Content) -> Iterator[Database]:
    """A copy of the backup's database in the home, with the present schema."""
    path = home.directory / _COPY
    _remove(path)
    try:
        try:
            shutil.copyfile(directory / content.database, path)
        except FileNotFoundError:
            raise BackupError(f"the backup in {directory} is damaged: {content.database} is missing") from None
        path.chmod(0o600)
        if file_digest(path) != content.digest:
            raise BackupError(f"{directory / content.database} is damaged: its digest is not the one in backup.json")
        with closing(Database.open(f"sqlite:///{path.absolute()}", create=False)) as copy:
            copy.migrate()
            check_owner(copy, home.directory, home.federation_id, home.ca)
            copy.entry_key = home.log_key.entry_key
            yield copy
    except BaseException:
        _remove(path)
        raise


def _copy_blobs(home: CoordinatorHome, directory: Path, copy: Database, content: Content, progress: Progress) -> None:
    blobs, source, done = home.open_blobs(None), DirectoryStore(directory / BLOBS), 0
    blobs.probe(takes_new=True)

    def count(piece: int) -> None:
        nonlocal done
        done += piece
        progress(done, content.bytes)

    for digest in sorted(_digests(copy, content)):
        try:
            blobs.verify(digest)
            count(blobs.stat(digest).size)
        except (BlobMissing, BlobCorrupt):
            try:
                copy_blob(source, blobs, digest, count)
            except (BlobMissing, BlobCorrupt) as error:
                raise BackupError(f"the backup in {directory} is damaged: {error}. The database is as it was") from None


def _digests(database: Database, content: Content) -> set[str]:
    """The digests of the blobs that the backup holds."""
    with database.read() as session:
        return referenced(session, content.keep_rounds or None) - set(content.missing)


def _newest_statement(home: CoordinatorHome, content: Content) -> SignedEnvelope | None:
    """The newest of the statements in the home and in the backup that this federation has signed."""
    statements = list[tuple[float, SignedEnvelope]]()
    for data in (kept_statement(home.directory), base64.b64decode(content.restored)):
        with suppress(Refusal, DecodeError):
            envelope = SignedEnvelope.FromString(data)
            manifest = home.signing.chain.verify(envelope, RestoreManifest)
            statements.append((manifest.restored.ToDatetime().timestamp(), envelope))
    return max(statements, key=lambda statement: statement[0])[1] if statements else None


def _put_in_place(home: CoordinatorHome, target: Database, *, keep: bool, now: datetime) -> Path | None:
    """Moves the copy to the place of the SQLite file. The file that was there gets another name, or is removed."""
    path = Path(str(target.engine.url.database))
    target.engine.dispose()
    aside = path.with_name(f"{path.name}.replaced-{now:%Y%m%dT%H%M%SZ}") if keep else None
    if aside is None:
        _remove(path)
    else:
        for suffix in _SQLITE_FILES:
            with suppress(FileNotFoundError):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
    rename_durably(home.directory / _COPY, path)
    return aside


def _remove(path: Path) -> None:
    for suffix in _SQLITE_FILES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
