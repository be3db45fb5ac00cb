"""The schema's versions by name, without Alembic, whose import takes as long as all else that a short command does."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text


def known_revisions() -> list[str]:
    """The revisions that this version of the program has, from the oldest: the beginnings of the names of their files.

    `storage.migrations` numbers them.
    """
    files = Path(__file__).with_name("migrations").joinpath("versions").glob("[0-9]*_*.py")
    return sorted(path.name.partition("_")[0] for path in files)


def pending_revisions(connection: Connection) -> list[str]:
    """The revisions that `storage.migrations.upgrade` would bring the database to, from the oldest."""
    present = max(_present_revisions(connection), default="")
    return [revision for revision in known_revisions() if revision > present]


def unknown_revisions(connection: Connection) -> list[str]:
    """The revisions that the database is at and that this version does not have: a newer one made them."""
    return sorted(_present_revisions(connection).difference(known_revisions()))


def _present_revisions(connection: Connection) -> set[str]:
    if not inspect(connection).has_table("alembic_version"):
        return set()
    return set(connection.scalars(text("SELECT version_num FROM alembic_version")))
