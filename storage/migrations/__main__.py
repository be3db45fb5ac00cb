"""`python -m storage.migrations MESSAGE`: writes the next migration from what the models say."""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.script import ScriptDirectory

from storage.database import Database
from storage.migrations import config


def main(arguments: list[str]) -> int:
    """Writes the migration; the exit code is 2 without a message."""
    if len(arguments) != 1:
        print("usage: python -m storage.migrations MESSAGE", file=sys.stderr)  # noqa: T201
        return 2
    number = len(list(ScriptDirectory.from_config(config()).walk_revisions())) + 1
    with tempfile.TemporaryDirectory() as directory:
        database = Database.open(f"sqlite:///{Path(directory) / 'scratch.db'}")
        database.migrate()
        with database.engine.begin() as connection:
            command.revision(config(connection), arguments[0], autogenerate=True, rev_id=f"{number:04}")
        database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
