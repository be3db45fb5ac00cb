"""Faults of machine or storage, not of the caller: a full or failing disk, no database, no descriptors, lost blobs."""

import errno
import sqlite3
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, PendingRollbackError

from storage.blobs import BlobCorrupt, BlobMissing, BlobStoreUnavailable
from storage.database import UNAVAILABLE

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_POSTGRESQL_DISK = frozenset({"53100", "58030"})  # psycopg.errors.DiskFull and IoError: it takes long to import
_SQLITE_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})


class StorageFault(StrEnum):
    """The kinds of faults; the value is the reason in a refusal."""

    DISK = "disk"
    DATABASE = "database"
    DESCRIPTORS = "descriptors"
    BLOB = "blob-damaged"
    BLOB_STORE = "blob-store"
    CLOCK = "clock"  # of the coordinator's machine: it differs from the database's
    GONE = "stopping"  # a directory of the coordinator is gone, which therefore stops


def fault_of(error: BaseException) -> StorageFault | None:
    """The fault that an exception shows; None for any other cause, such as a bug. It never shows CLOCK or GONE.

    A disk that is full, has become read-only, or reports errors is one fault: nothing can be recorded on it.
    """
    if isinstance(error, BlobCorrupt | BlobMissing):
        return StorageFault.BLOB
    if isinstance(error, BlobStoreUnavailable):
        return StorageFault.BLOB_STORE
    if isinstance(error, DBAPIError):
        cause = error.orig
        sqlite_code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if getattr(cause, "sqlstate", "") in _POSTGRESQL_DISK or sqlite_code in _SQLITE_DISK:
            return StorageFault.DISK
        if error.connection_invalidated:
            return StorageFault.DATABASE
    if isinstance(error, (*UNAVAILABLE, PendingRollbackError)):
        return StorageFault.DATABASE
    if isinstance(error, OSError) and error.errno in _DISK:
        return StorageFault.DISK
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS:
        return StorageFault.DESCRIPTORS
    return None


def explain_fault(error: BaseException) -> str:
    """The cause in one line, without the statement that failed."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
