"""The claims of several coordinators that keep their blobs in one bucket: a table of PostgreSQL."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy import Connection, Interval, delete, func, literal, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError

from storage.blobs import BlobStoreUnavailable
from storage.database import Database
from storage.models import BlobClaim
from storage.objects.claims import Deletion

DELETION_SECONDS = 300  # longer than the requests of a deletion take, with their repetitions
WAIT_SECONDS = 30.0  # how long a claim waits for a deletion of the same blob
_LOCK_SPACE = 0x626C6F62  # "blob": the first half of the advisory locks of blobs; other locks are not in halves
_NOT_DELETED = or_(BlobClaim.deletion_ends.is_(None), BlobClaim.deletion_ends < func.clock_timestamp())
_WAITED = "55P03"  # psycopg.errors.LockNotAvailable


class TableClaims:
    """Claims as rows, with times by the database's clock, and advisory locks.

    A claim is one short transaction, with a shared lock. A deletion holds the exclusive lock of its blob in a session
    of its own, without a transaction, since it waits for the bucket. Before its request it marks the row, for the case
    that the request or this session breaks off: the bucket may yet remove the blob. Claims are refused until that is
    over.

    Args:
        database: on PostgreSQL.
        wait_seconds: how long a claim waits for a deletion.
    """

    def __init__(self, database: Database, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._database = database
        self._wait_seconds = wait_seconds

    def note(self, digest: str) -> None:
        """Writes the blob's row.

        Raises:
            BlobStoreUnavailable: a deletion of the blob has not ended in time, or has broken off a moment ago.
        """
        row = insert(BlobClaim).values(digest=digest, claimed=func.clock_timestamp())
        claim = row.on_conflict_do_update(
            index_elements=["digest"],
            set_={"claimed": row.excluded.claimed, "deletion_ends": None},
            where=_NOT_DELETED,
        )
        limit = {"limit": f"{self._wait_seconds * 1000:.0f}ms"}
        try:
            with self._database.begin() as session:
                session.execute(text("SELECT set_config('lock_timeout', :limit, true)"), limit)
                session.execute(text("SELECT pg_advisory_xact_lock_shared(:space, :blob)"), _lock(digest))
                claimed = session.scalar(claim.returning(BlobClaim.claimed)) is not None
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", "") != _WAITED:
                raise
            claimed = False
        if not claimed:
            raise BlobStoreUnavailable(
                f"blob {digest}, which is to be stored again, is being deleted, and the bucket or a coordinator does "
                f"not end that: try again, for up to {DELETION_SECONDS // 60} minutes"
            )

    def last(self, digest: str) -> float | None:
        """The time in the blob's row."""
        with self._database.read() as session:
            return _seconds(session.scalar(select(BlobClaim.claimed).where(BlobClaim.digest == digest)))

    def times(self) -> dict[str, float]:
        """The times in all rows."""
        with self._database.read() as session:
            rows = session.execute(select(BlobClaim.digest, BlobClaim.claimed))
            return {digest: claimed.timestamp() for digest, claimed in rows}

    @contextmanager
    def deletion(self, digest: str) -> Iterator[Deletion]:
        """Holds the lock of the blob, for `DELETION_SECONDS` at most if this process is frozen."""
        with self._database.locking_session(DELETION_SECONDS) as connection:
            connection.execute(text("SELECT pg_advisory_lock(:space, :blob)"), _lock(digest))
            claimed = connection.scalar(select(BlobClaim.claimed).where(BlobClaim.digest == digest))
            yield Deletion(_seconds(claimed), partial(_begin, connection, digest), partial(_finish, connection, digest))


def forget_claims(database: Database, *, before: float) -> None:
    """Removes the rows of older claims: the blobs are old without them. `before` is in seconds since the epoch."""
    old = BlobClaim.claimed < datetime.fromtimestamp(before, UTC)
    with database.begin() as session:
        session.execute(delete(BlobClaim).where(old, _NOT_DELETED))


def _begin(connection: Connection, digest: str) -> bool:
    """Marks the row, unless it is marked; a blob without a row stays old."""
    ends = func.clock_timestamp() + literal(timedelta(seconds=DELETION_SECONDS), Interval())
    row = insert(BlobClaim).values(digest=digest, claimed=datetime.fromtimestamp(0, UTC), deletion_ends=ends)
    marked = row.on_conflict_do_update(
        index_elements=["digest"], set_={"deletion_ends": row.excluded.deletion_ends}, where=_NOT_DELETED
    )
    return connection.scalar(marked.returning(BlobClaim.digest)) is not None


def _finish(connection: Connection, digest: str) -> None:
    connection.execute(delete(BlobClaim).where(BlobClaim.digest == digest))


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()


def _lock(digest: str) -> dict[str, int]:
    """The advisory lock of a blob. Blobs may share one: their claims and deletions then wait for each other."""
    return {"space": _LOCK_SPACE, "blob": zlib.crc32(digest.encode()) - (1 << 31)}
