"""The schema's versions, driven by Alembic from here: no alembic.ini, and installed with the package.

After a change to `storage.models`, `python -m storage.migrations "what changed"` writes the next version; read it
before you commit it.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for these migrations, to run in the open transaction of `connection`."""
    result = Config()
    # Alembic interpolates "%" in its options.
    result.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    result.attributes["connection"] = connection
    return result


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Brings the schema up to `revision`."""
    command.upgrade(config(connection), revision)


def downgrade(connection: Connection, revision: str) -> None:
    """Takes the schema down to `revision` ("base": nothing is left); data without a place there is lost."""
    command.downgrade(config(connection), revision)


def pending_revisions(connection: Connection) -> list[str]:
    """The revisions that `upgrade` would bring the database to, from the oldest."""
    scripts = ScriptDirectory.from_config(config())
    present = set(MigrationContext.configure(connection).get_current_heads())
    missing = []
    for script in scripts.walk_revisions():
        if script.revision in present:
            break
        missing.append(str(script.revision))
    return missing[::-1]


def unknown_revisions(connection: Connection) -> list[str]:
    """The revisions that the database is at and that this version does not have: a newer one made them."""
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    return sorted(set(MigrationContext.configure(connection).get_current_heads()) - known)
