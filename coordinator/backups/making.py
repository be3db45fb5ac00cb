"""Makes a backup, or brings an older one up to date, while the coordinator serves or not."""

import base64
from collections.abc import Callable, Collection
from contextlib import closing
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.backups.inventory import BLOBS, CONTENT_FILE, LOCK_FILE, BackupError, Content, locked
from coordinator.backups.statement import kept_statement
from coordinator.home import CoordinatorHome
from federation.digests import file_digest
from federation.trust.certificates import fingerprint, pem
from federation.trust.keys import make_private_directory
from storage import audit
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore
from storage.copying import copy_blob, copy_rows
from storage.database import Database
from storage.models import Run
from storage.retention import referenced
from storage.revisions import pending_revisions

Progress = Callable[[int, int], None]  # bytes that were copied, and bytes that will be


def back_up(home: CoordinatorHome, directory: Path, *, now: datetime, progress: Progress) -> tuple[Content, list[str]]:
    """Copies the database, as it is at one moment, and then the blobs that it refers to.

    Blobs that the backup has already are not copied again, and those that nothing refers to any more are removed from
    it. The signing key signs the inventory. If this breaks off, the backup that the directory held before is still
    complete. Keys and settings are not copied.

    Args:
        home: the coordinator's directory.
        directory: takes the backup; it is made, or is empty, or holds a backup of this federation.
        now: the present time.
        progress: called with the bytes copied, and the bytes to copy.

    Returns:
        The inventory of the backup, and the digests of its blobs that could not be read.

    Raises:
        BackupError: the directory holds something else, or its disk is too small.
        HomeError: the database is missing or of another federation.
    """
    _check_usable(directory, home)
    make_private_directory(directory)
    with locked(directory), closing(home.open_database()) as database:
        name = f"database-{now:%Y%m%dT%H%M%SZ}.db"
        with database.read() as session:
            _check_current(session, directory=home.directory)
            digests = referenced(session, home.settings.keep_rounds or None)
            entries = audit.size(session)
            runs = session.scalar(select(func.count()).select_from(Run)) or 0
            _copy_database(session, directory / name)
        blobs, copy = home.open_blobs(database), DirectoryStore(directory / BLOBS)
        unread = _copy_blobs(blobs, copy, digests, progress)
        with database.read() as session:  # retention may have removed some of them in the meantime
            lost = sorted(unread & referenced(session, home.settings.keep_rounds or None))
        sizes = [copy.stat(digest).size for digest in digests - unread]
        content = Content(
            federation_id=home.federation_id,
            ca=pem(home.ca).decode(),
            server=pem(home.server).decode(),
            made=now,
            database=name,
            digest=file_digest(directory / name),
            log_entries=entries,
            runs=runs,
            blobs=len(sizes),
            bytes=sum(sizes),
            keep_rounds=home.settings.keep_rounds,
            missing=tuple(sorted(unread)),
            restored=base64.b64encode(kept_statement(home.directory)).decode(),
        )
        content.save(directory, home.signing_key)
        _prune(directory, copy, content, digests)
        with database.begin() as session:
            audit.record(
                session,
                at=now,
                actor="coordinator backup",
                action="backup.made",
                detail=f"{len(sizes)} blobs, {entries} entries of the log",
                digest=content.digest,
            )
    return content, lost


def _check_usable(directory: Path, home: CoordinatorHome) -> None:
    if not directory.exists() or not any(directory.iterdir()):
        return
    if (directory / CONTENT_FILE).exists():
        content = Content.load(directory)
        if content.ca_fingerprint != fingerprint(home.ca):
            raise BackupError(
                f"{directory} holds a backup of the federation {content.federation_id}, whose CA has the fingerprint "
                f"{content.ca_fingerprint}; that of {home.directory} has {fingerprint(home.ca)}. Name another directory"
            )
    elif not (directory / LOCK_FILE).exists():  # the first backup in this directory broke off
        raise BackupError(f"{directory} is not empty and holds no backup: name another directory")


def _check_current(session: Session, *, directory: Path) -> None:
    if pending_revisions(session.connection()):
        raise BackupError(
            "an older version of fedpareto made the database: make the backup with that version, or serve "
            f"{directory} once with this one, which upgrades the database"
        )


def _copy_database(source: Session, path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(Database.open(f"sqlite:///{path.absolute()}")) as copy:
        copy.migrate()
        with copy.begin() as target:
            copy_rows(source, target)


def _copy_blobs(blobs: BlobStore, copy: BlobStore, digests: Collection[str], progress: Progress) -> set[str]:
    """Copies the blobs that are not there yet; returns those that cannot be read."""
    unread, sizes = set[str](), dict[str, int]()
    for digest in sorted(digests):
        if not copy.exists(digest):
            try:
                sizes[digest] = blobs.stat(digest).size
            except BlobMissing:
                unread.add(digest)
    total, free = sum(sizes.values()), copy.free_bytes()
    if free is not None and total > free:
        raise BackupError(f"the backup needs {total / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB left")
    done = 0

    def count(piece: int) -> None:
        nonlocal done
        done += piece
        progress(done, total)

    for digest in sizes:
        try:
            copy_blob(blobs, copy, digest, count)
        except (BlobMissing, BlobCorrupt):
            unread.add(digest)
    return unread


def _prune(directory: Path, copy: BlobStore, content: Content, digests: Collection[str]) -> None:
    """Removes the files of older backups, and of ones that broke off."""
    copy.sweep_temporary()
    for blob in list(copy.scan()):
        if blob.digest not in digests:
            copy.delete(blob.digest)
    for path in directory.glob("database-*"):
        if path.name not in (content.database, content.signature):
            path.unlink()
