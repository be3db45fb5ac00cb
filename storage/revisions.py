"""The schema's versions by name. Alembic is not used here: its import takes as long as the rest of a short command."""

from importlib.metadata import version
from pathlib import Path

from sqlalchemy import Connection, inspect, text

# The number of the first release's migration. Databases of unreleased versions are at 0001, or at 0002 with a digest.
FIRST = 2
_VERSIONS = Path(__file__).with_name("migrations") / "versions"


def known_revisions() -> list[str]:
    """The revisions that this version of the program has, from the oldest: the beginnings of the names of their files.

    `storage.migrations` numbers them.
    """
    return [path.name.partition("_")[0] for path in sorted(_VERSIONS.glob("[0-9]*_*.py"))]


def pending_revisions(connection: Connection) -> list[str]:
    """The revisions that `storage.migrations.upgrade` would apply to the database, from the oldest."""
    present = max(_present_revisions(connection), default="")
    return [revision for revision in known_revisions() if revision > present]


def incompatibility(connection: Connection) -> str | None:
    """The reason why this version cannot use or upgrade the database, and the remedy; None if it can."""
    unknown = sorted(_present_revisions(connection).difference(known_revisions()))
    if not unknown:
        return None
    state, program = f"is at schema revision {', '.join(unknown)}", f"fedpareto {version('fedpareto')}"
    if all("." in revision or revision < f"{FIRST:04}" for revision in unknown):
        return (
            f"{state}, which an unreleased version of fedpareto made, and {program} does not upgrade it. Go on with "
            "the version that made it, or make a new federation, which every member joins: `fedpareto coordinator "
            "init` in another directory, with an empty database."
        )
    return (
        f"{state}, which {program} does not know: a newer version made it. Use that one, or restore a backup from "
        "before."
    )


def _present_revisions(connection: Connection) -> set[str]:
    if not inspect(connection).has_table("alembic_version"):
        return set()
    return set(connection.scalars(text("SELECT version_num FROM alembic_version")))
