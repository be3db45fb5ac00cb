"""Copies rows from one database to another, of either kind, and blobs from one store to another."""

from collections.abc import Callable
from contextlib import closing

from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.orm import Session

from federation import digests
from storage.blobs import BlobStore
from storage.models import Base

_ROWS = 200  # in memory at once, with their envelopes
_PIECE = 1 << 20  # bytes of a blob that are copied at once


def copy_rows(source: Session, target: Session) -> None:
    """Replaces all rows of `target` by copies of those of `source`. Both have the same schema.

    Args:
        source: reads a consistent snapshot, as in `Database.read`.
        target: an open transaction.
    """
    for table in reversed(Base.metadata.sorted_tables):
        target.execute(delete(table))
    for table in Base.metadata.sorted_tables:
        rows = source.execute(select(table).execution_options(yield_per=_ROWS)).mappings()
        for batch in rows.partitions():
            target.connection().execute(insert(table), [dict(row) for row in batch])
    if target.get_bind().dialect.name == "postgresql":
        _continue_ids(target)


def _continue_ids(target: Session) -> None:
    """Makes PostgreSQL's sequences continue after the copied ids."""
    for table in Base.metadata.sorted_tables:
        column = table.autoincrement_column
        if column is not None:
            largest = target.scalar(select(func.max(column))) or 0
            target.execute(
                text("SELECT setval(pg_get_serial_sequence(:table, :column), :next, false)"),
                {"table": table.name, "column": column.name, "next": largest + 1},
            )


def copy_blob(source: BlobStore, target: BlobStore, digest: str, progress: Callable[[int], None]) -> None:
    """Copies a blob durably, and calls `progress` with the number of bytes of each piece.

    Raises:
        BlobMissing: `source` does not have it.
        BlobCorrupt: its bytes have another digest.
    """
    algorithm, _ = digests.parse(digest)
    with closing(source.open_range(digest)) as file, target.writer(algorithm=algorithm) as writer:
        while piece := file.read(_PIECE):
            writer.write(piece)
            progress(len(piece))
        writer.commit(digest)
