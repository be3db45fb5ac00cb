"""`python -m storage.migrations MESSAGE`: writes the next migration from the models.

The first one replaces the migration of unreleased versions.
"""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.script import ScriptDirectory

from storage.database import Database
from storage.migrations import config
from storage.revisions import FIRST, UNRELEASED_FILE


def main(arguments: list[str]) -> int:
    """Writes the migration; the exit code is 2 without a message."""
    if len(arguments) != 1:
        print("usage: python -m storage.migrations MESSAGE", file=sys.stderr)  # noqa: T201
        return 2
    Path(__file__).with_name("versions").joinpath(UNRELEASED_FILE).unlink(missing_ok=True)
    number = FIRST + len(list(ScriptDirectory.from_config(config()).walk_revisions()))
    with tempfile.TemporaryDirectory() as directory:
        database = Database.open(f"sqlite:///{Path(directory) / 'scratch.db'}")
        database.migrate()
        with database.engine.begin() as connection:
            command.revision(config(connection), arguments[0], autogenerate=True, rev_id=f"{number:04}")
        database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
