"""`python -m storage.migrations MESSAGE`: writes the next migration from the models.

With --check, it compares the tables that the migrations make with the models, and writes nothing.
"""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from storage.database import Database
from storage.migrations import config
from storage.models import Base
from storage.revisions import FIRST


def main(arguments: list[str]) -> int:
    """Writes the migration, or compares; the exit code is 2 without an argument, and 1 if there are differences."""
    if len(arguments) != 1:
        print("usage: python -m storage.migrations MESSAGE | --check", file=sys.stderr)  # noqa: T201
        return 2
    number = FIRST + len(list(ScriptDirectory.from_config(config()).walk_revisions()))
    with tempfile.TemporaryDirectory() as directory:
        database = Database.open(f"sqlite:///{Path(directory) / 'scratch.db'}")
        database.migrate()
        with database.engine.begin() as connection:
            if arguments == ["--check"]:
                found = compare_metadata(
                    MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata
                )
                print(*found or ["the migrations make the tables of the models"], sep="\n")  # noqa: T201
                return bool(found)
            command.revision(config(connection), arguments[0], autogenerate=True, rev_id=f"{number:04}")
        database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
