"""The schema's versions, driven by Alembic from here: no alembic.ini, and installed with the package.

After a change to `storage.models`, `python -m storage.migrations "what changed"` writes the next version; read it
before you commit it. A version that was released never changes.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from federation.process.shared_state import alone


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for these migrations, to run in the open transaction of `connection`."""
    configuration = Config()
    # Alembic interpolates "%" in its options.
    configuration.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    configuration.attributes["connection"] = connection
    return configuration


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Brings the schema up to `revision`."""
    with alone():  # the context of Alembic belongs to the process
        command.upgrade(config(connection), revision)


def downgrade(connection: Connection, revision: str) -> None:
    """Takes the schema down to `revision` ("base": no tables); data without a column there is lost."""
    with alone():
        command.downgrade(config(connection), revision)
