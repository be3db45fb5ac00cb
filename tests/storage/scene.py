"""What tests look up in a blob store, and how they damage its blobs and make them old; and the row of a run."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import update

from federation.digests import parse
from storage.blob_directory import DirectoryStore
from storage.blobs import BlobStore
from storage.models import BlobClaim, Run
from storage.objects.claims import FileClaims
from storage.objects.store import ObjectStore
from storage.states import RunState
from storage.table_claims import TableClaims
from tests.storage.memory_blobs import MemoryStore

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def run_row(run_id: str, model: str, **values: Any) -> Run:
    """A run under way, whose model is this one."""
    return Run(
        run_id=run_id,
        name=run_id,
        state=RunState.RUNNING,
        spec=b"",
        spec_digest=model,
        initial_model=model,
        model=model,
        submitted_by="a",
        created=NOON,
        **values,
    )


def stored(blobs: BlobStore) -> list[str]:
    """The digests of all blobs, in order."""
    return [blob.digest for blob in blobs.scan()]


def blob_file(blobs: DirectoryStore, digest: str) -> Path:
    """The file of a blob in a store that is a directory."""
    algorithm, value = parse(digest)
    return blobs.root / algorithm / value[:2] / value[2:]


def overwrite(blobs: BlobStore, digest: str, data: bytes) -> None:
    """Gives a blob other bytes, as a broken disk would."""
    if isinstance(blobs, MemoryStore):
        blobs.contents[digest] = data
    elif isinstance(blobs, DirectoryStore):
        blob_file(blobs, digest).write_bytes(data)
    elif isinstance(blobs, ObjectStore):
        blobs._bucket.put(blob_file(blobs._cache, digest).relative_to(blobs._cache.root).as_posix(), data)
        blobs._cache.delete(digest)


def date_back(blobs: BlobStore, digest: str, at: float = 0.0) -> None:
    """Lets a blob look as if it was stored at a time (seconds since the epoch)."""
    if isinstance(blobs, MemoryStore):
        blobs.modified[digest] = at
    elif isinstance(blobs, DirectoryStore):
        os.utime(blob_file(blobs, digest), (at, at))
    elif isinstance(blobs, ObjectStore):
        claims = blobs._claims
        claims.note(digest)
        if isinstance(claims, FileClaims):
            os.utime(claims.file(digest), (at, at))
        elif isinstance(claims, TableClaims):
            with claims._database.begin() as session:
                time = datetime.fromtimestamp(at, UTC)
                session.execute(update(BlobClaim).where(BlobClaim.digest == digest).values(claimed=time))
